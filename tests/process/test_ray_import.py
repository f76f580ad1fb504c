"""Imports by Ray Data's readers: rows and bytes of insitu's own readers. Run by `make test-ray`."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from record_writer import encode_example, write_records

from insitu.base.errors import SourceError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec
from insitu.grid import bring_up, import_cache
from insitu.grid.partitions import Partition

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

ROWS, FILES = 500, 3


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[Any]:
    """A Ray of this machine, which the imports of this process find."""
    missing = [name for name in ("ray", "pandas", "PIL") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} isn't installed: pip install 'insitu[ray-data]'")
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112
    ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    yield ray
    ray.shutdown()


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    found = Paths(tmp_path / "home")
    bring_up(found, 2)
    return found


def run(paths: Paths, name: str, source: Path, reader: str | None, *options: str, **more: Any) -> CacheSpec:
    given = {"reader": reader, "reader_options": options, "overwrite": True}
    (found,) = import_cache(paths, name, [str(source)], **given, **more)
    return found


def describe(cache: CacheSpec) -> Any:
    """What two caches of equal rows in an equal order share."""
    return cache.columns, [(p.rows, p.checksum) for p in cache.partitions]


def read(paths: Paths, cache: CacheSpec, column: str) -> list[Any]:
    found: list[Any] = []
    for info in cache.partitions:
        file = paths.partition(info.owners[0], cache.name, cache.version, info.index)
        values = (
            Partition(file, cache.columns, info.rows, cache.block_rows).values[column].slice(0, info.rows)
        )
        found += list(values)
    return found


def rows_of(number: int) -> dict[str, Any]:
    x = np.arange(number * ROWS, (number + 1) * ROWS)
    return {"x": x, "y": x / 4, "name": [f"row {i}" for i in x]}


def write_parquet(folder: Path) -> None:
    for number in range(FILES):
        table = pa.table({**rows_of(number), "v": list(np.arange(ROWS * 3).reshape(-1, 3))})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=90)


def write_csv(folder: Path) -> None:
    for number in range(FILES):
        rows = rows_of(number)
        lines = [f"{x},{y},{name}" for x, y, name in zip(rows["x"], rows["y"], rows["name"], strict=True)]
        (folder / f"{number} #%.csv").write_text("\n".join(["x,y,name", *lines]) + "\n")


def write_json(folder: Path) -> None:
    for number in range(FILES):
        rows = rows_of(number)
        lines = [
            json.dumps({"x": int(x), "y": float(y) + 0.5, "name": name})
            for x, y, name in zip(rows["x"], rows["y"], rows["name"], strict=True)
        ]
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")


def write_tfrecords(folder: Path) -> None:
    for number in range(FILES):
        x = rows_of(number)["x"]
        records = [encode_example({"x": ("int64", [int(i)]), "a": ("float", [float(i), 0.5])}) for i in x]
        write_records(folder / f"{number}.tfrecord", records)


WRITERS = {"parquet": write_parquet, "csv": write_csv, "json": write_json, "tfrecords": write_tfrecords}
OWN: dict[str, dict[str, Any]] = {"tfrecords": {"features": "a:float32[2],x:int64"}}


@pytest.mark.parametrize("reader", WRITERS)
def test_the_cache_has_the_bytes_of_one_that_insitu_reads(paths: Paths, tmp_path: Path, reader: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    WRITERS[reader](folder)
    if reader == "tfrecords":
        pytest.importorskip("tensorflow", reason="Ray reads TFRecord files by TensorFlow")
    own = run(paths, "own", folder, None, **OWN.get(reader, {}))
    assert describe(run(paths, "ray", folder, reader)) == describe(own)
    # However the work is shared out.
    assert describe(run(paths, "ray", folder, reader, "concurrency=1", "num_cpus=3")) == describe(own)


def test_images_and_web_datasets(paths: Paths, tmp_path: Path) -> None:
    from PIL import Image

    images = np.random.default_rng(0).integers(0, 256, (70, 6, 5), dtype=np.uint8)
    folder, shards = tmp_path / "images", tmp_path / "shards"
    folder.mkdir()
    shards.mkdir()
    for shard in range(2):
        with tarfile.open(shards / f"{shard}.tar", "w") as archive:
            for number in range(shard * 35, (shard + 1) * 35):
                data = io.BytesIO()
                Image.fromarray(images[number]).save(data, "PNG")
                (folder / f"{number:02}.png").write_bytes(data.getvalue())
                for suffix, content in (("png", data.getvalue()), ("cls", str(number).encode())):
                    member = tarfile.TarInfo(f"{number:02}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    cache = run(paths, "images", folder, "images", "include_paths=true", partitions=1)
    np.testing.assert_array_equal(read(paths, cache, "image"), images)
    assert [Path(str(path)).name for path in read(paths, cache, "path")] == [f"{n:02}.png" for n in range(70)]
    cache = run(paths, "small", folder, "images", "size=3,2", "mode=RGB")
    assert [(c.name, c.dtype, c.shape) for c in cache.columns] == [("image", "uint8", (3, 2, 3))]
    cache = run(paths, "shards", shards, "webdataset", partitions=1)
    assert {c.name: c.shape for c in cache.columns} == {"__key__": (), "png": (6, 5), "cls": ()}
    assert read(paths, cache, "cls") == list(range(70))
    np.testing.assert_array_equal(read(paths, cache, "png"), images)
    Image.fromarray(images[0][:4]).save(folder / "99.png")
    with pytest.raises(SourceError, match=r"mixed shapes|same columns"):
        run(paths, "images", folder, "images")


def test_what_ray_can_not_read_is_said_and_leaves_nothing(paths: Paths, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_csv(folder)
    before = run(paths, "rows", folder, "csv")
    (folder / "3.csv").write_text("x,y,name\n1,2\n")
    with pytest.raises(SourceError, match=r"as Ray's reader csv expects them.*Received: "):
        run(paths, "rows", folder, "csv")
    (folder / "3.csv").write_text("x,y\n1,2\n")
    with pytest.raises(SourceError, match=r"All rows must have the same columns.*Received: x, y in .*3\.csv"):
        run(paths, "rows", folder, "csv")
    (folder / "3.csv").unlink()
    assert describe(run(paths, "rows", folder, "csv")) == describe(before)
    (folder / "0 #%.csv").write_text("x,path\n1,2\n")
    with pytest.raises(SourceError, match="has a column 'path' of its own"):
        run(paths, "rows", folder, "csv")


def test_the_command_starts_a_ray_of_its_own_and_ends_it(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_csv(folder)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_ADDRESS")}
    environment |= {"INSITU_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-m", "insitu", "import", "rows", str(folder), "--reader", "csv", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["rows"] == FILES * ROWS and "Warning" not in done.stderr
