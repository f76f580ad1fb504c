"""Commands about data: what they refuse and what they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from record_writer import image_records, write_records

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.cli import data
from insitu.cli.import_progress import ProgressLines, format_seconds
from insitu.grid import Catalog, import_cache


@pytest.fixture
def source(tmp_path: Path) -> str:
    np.save(tmp_path / "a.npy", np.arange(100))
    return str(tmp_path / "a.npy")


def test_column_names_the_values_of_npy_files_alone(home: Path, source: str, tmp_path: Path) -> None:
    run("import", "a", source, "--column", "zz")
    assert [c.name for c in Catalog(Paths(home)).get("a").columns] == ["zz"]
    run("import", "b", source)
    assert [c.name for c in Catalog(Paths(home)).get("b").columns] == ["x"]
    (tmp_path / "b.csv").write_text("x\n1\n")
    with pytest.raises(InputError, match=r"--column names.*Received: --column zz for .*b\.csv of format csv"):
        run("import", "c", str(tmp_path / "b.csv"), "--column", "zz")


def test_records_and_drawings_are_imported(home: Path, tmp_path: Path) -> None:
    write_records(tmp_path / "a.tfrecord", image_records(20)[2])
    run("import", "a", str(tmp_path / "a.tfrecord"), "--features", "image:uint8[4,4]=image_raw,label:int64")
    assert Catalog(Paths(home)).get("a").rows == 20
    (tmp_path / "b.ndjson").write_text('{"word": "cat", "drawing": [[[1, 200], [3, 4]]]}\n')
    run("import", "b", str(tmp_path / "b.ndjson"), "--render", "8")
    assert [(c.name, c.shape) for c in Catalog(Paths(home)).get("b").columns] == [
        ("word", ()),
        ("drawing", (8, 8)),
    ]
    with pytest.raises(InputError, match="--features lists columns as NAME:DTYPE"):
        run("import", "c", str(tmp_path / "a.tfrecord"), "--features", "image")


@pytest.mark.parametrize("option", ["--ledger", "--events"])
def test_a_cache_has_no_ledger(home: Path, source: str, option: str) -> None:
    import_cache(Paths(home), "a", [source])
    message = f"--ledger and --events and --goodput can be asked of a job only.*Received: {option}"
    with pytest.raises(InputError, match=message):
        run("describe", "a", option)


@pytest.mark.parametrize(
    ("published", "message"), [(False, "nothing was imported"), (True, "the new version stands")]
)
def test_an_interrupted_import_says_what_became_of_it(
    home: Path, source: str, published: bool, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import_cache(Paths(home), "a", [source])

    with pytest.raises(KeyboardInterrupt), data._interruption_explained(Paths(home)):
        if published:
            import_cache(Paths(home), "a", [source], overwrite=True)
        raise KeyboardInterrupt
    assert message in capsys.readouterr().err


def test_rows_are_appended_and_counted_by_call(home: Path, source: str, tmp_path: Path) -> None:
    run("import", "a", source)
    np.save(tmp_path / "b.npy", np.arange(7))
    result = run("import", "a", str(tmp_path / "b.npy"), "--append", "--resume")
    assert "Imported 7 rows" in result.stderr
    assert Catalog(Paths(home)).get("a").rows == 107


def test_describe_tells_what_compression_saves(home: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", noise=rng.random(20_000), label=np.zeros(20_000, np.int64))
    result = run("import", "a", str(tmp_path / "a.npz"), "--compress", "zstd", "--partitions", "2")
    assert "Imported 20,000 rows" in result.stderr
    found = json.loads(run("describe", "a", "--json").stdout)
    compression, (noise, label) = found["compression"], found["compression"]["columns"]
    assert compression["codec"] == "zstd" and compression["raw_bytes"] > found["bytes"]
    assert (noise["name"], noise["codec"], noise["raw_bytes"]) == ("noise", None, 160_000)
    assert (label["name"], label["codec"], label["raw_bytes"]) == ("label", "zstd", 160_000)
    assert noise["bytes"] > 160_000 and label["bytes"] < 2000
    assert {p["bytes"] for p in found["partition_list"]} and found["bytes"] < 180_000
    shown = run("describe", "a").stdout
    assert "noise: float64, 160.0 kB, not compressed" in shown
    assert "label: int64, 160.0 kB as " in shown and " of zstd" in shown
    run("import", "b", str(tmp_path / "a.npz"))
    assert json.loads(run("describe", "b", "--json").stdout)["compression"] is None
    assert "codec" not in json.dumps(Catalog(Paths(home)).get("b").to_json())
    with pytest.raises(InputError, match=r"--compress must be lz4 or zstd\. Received: gzip"):
        run("import", "c", str(tmp_path / "a.npz"), "--compress", "gzip")


def test_what_versions_share_counts_once(home: Path, source: str) -> None:
    run("import", "a", source)
    Catalog(Paths(home)).pin("a", 1, "job")
    run("import", "a", source, "--append")
    (node,) = json.loads(run("nodes", "--json").stdout)
    assert node["bytes"] == Catalog(Paths(home)).get("a").bytes


def test_lines_tell_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines("a", started=100.0)
    for now, size in ((100.0, 1e9), (110.0, 2e9), (131.0, 4.1e9), (140.0, 5e9), (190.0, 10e9)):
        lines.show(1000, int(size), int(20e9), now)
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "import a: 1,000 rows, 4.1 GB of 20.0 GB, 100.0 MB/s, about 2:39 left",
        "import a: 1,000 rows, 10.0 GB of 20.0 GB, 100.0 MB/s, about 1:40 left",
    ]
    assert format_seconds(3725) == "1:02:05"


def test_a_job_has_no_partitions_to_verify(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu.cluster.find_job", lambda paths, name: paths.job("train-1"))
    with pytest.raises(InputError, match=r"--verify can .* a cache only, and train is a job"):
        run("describe", "train", "--verify")


def test_an_import_counts_the_rows_that_it_keeps(home: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.arange(1000))
    assert "Imported 10 rows" in run("import", "a", str(tmp_path / "b.npy"), "--limit", "10").stderr
    run("import", "b", str(tmp_path / "b.npy"), "--sample", "0.5")
    kept = Catalog(Paths(home)).get("b").rows
    again = run("import", "b", str(tmp_path / "b.npy"), "--sample", "0.5", "--overwrite")
    assert 0 < kept < 1000 and f"Imported {kept} rows" in again.stderr
