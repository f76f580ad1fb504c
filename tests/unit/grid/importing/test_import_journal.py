"""Imports that are interrupted anywhere and continued: the same files come out."""

from __future__ import annotations

import errno
import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from record_writer import encode_example, write_records

from insitu.base.disk.durable import unseal
from insitu.base.errors import GridError, InputError, SourceError, StorageFull
from insitu.base.paths import Paths
from insitu.base.spec import Column, NodeId, Topology
from insitu.grid import Catalog, import_cache, measure_store, set_quotas, sweep, take_down
from insitu.grid.catalog.orphaned_imports import list_resumable
from insitu.grid.importing.import_journal import fingerprint
from insitu.grid.intake.import_plan import ImportPlan, RowSizes
from insitu.grid.intake.row_plan import RowPlan
from insitu.grid.intake.source_blocks import FileState
from insitu.grid.partitions import PartitionWriter
from insitu.grid.partitions import writer as writer_module
from insitu.grid.sources import SourceOptions
from insitu.options import ImportOptions

ROWS = 3000
LINES = ["ndjson", "ndjson.gz", "tfrecord", "tfrecord.gz"]
FEATURES = "id:int64,name:str"


def table(start: int) -> dict[str, Any]:
    ids = np.arange(start, start + ROWS)
    return {"id": ids, "half": ids / 2, "name": np.array([f"row {i}" for i in ids])}


def write_sources(folder: Path, kind: str) -> str:
    """Write two files of a format. Returns a glob."""
    for number in range(2):
        path, rows = folder / f"{number}.{kind}", table(number * ROWS)
        if kind == "npz":
            np.savez(path, **rows)
        elif kind == "npy":
            np.save(path, rows["id"].reshape(-1, 2))
        elif kind == "parquet":
            pq.write_table(pa.table(rows), path, row_group_size=700)
        elif kind == "arrow":
            with pa.ipc.new_file(str(path), pa.table(rows).schema) as file:
                file.write_table(pa.table(rows), max_chunksize=700)
        elif kind.startswith("ndjson"):
            columns = {name: values.tolist() for name, values in rows.items()}
            lines = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
            text = "".join(json.dumps(line) + "\n" for line in lines)
            path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
        elif kind.startswith("tfrecord"):
            features = (
                {"id": ("int64", [i]), "other": ("int64", [0]), "name": ("bytes", [b"row %d" % i])}
                for i in rows["id"].tolist()
            )
            write_records(path, list(map(encode_example, features)))
        else:
            text = "id,half,name\n" + "".join(f"{i},{i / 2},row {i}\n" for i in rows["id"])
            path.write_bytes(gzip.compress(text.encode()) if kind == "csv.gz" else text.encode())
    return str(folder / f"*.{kind}")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu.grid.importing.importer.BLOCK_BYTES", 4000)
    monkeypatch.setattr("insitu.grid.intake.import_plan.BUFFER_BYTES", 0)
    monkeypatch.setattr("insitu.grid.importing.import_journal.JOURNAL_BYTES", 1)


class Stop(Exception):
    """Ends an import in its middle."""


def import_until(paths: Paths, source: str, rows: int, **options: Any) -> None:
    """Import until so many rows have been read, then stop."""

    def stop(done: int, *rest: Any) -> None:
        if done >= rows:
            raise Stop

    with pytest.raises(Stop):
        import_cache(paths, "a", [source], partitions=3, resume=True, progress=stop, **options)


@pytest.mark.parametrize("kind", ["npy", "npz", "parquet", "arrow", "csv", "csv.gz", *LINES])
@pytest.mark.usefixtures("small_blocks")
def test_what_was_written_is_kept_and_the_same_files_come_out(
    kind: str, paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_sources(tmp_path, kind)
    options = {"features": FEATURES} if kind.startswith("tfrecord") else {}
    (whole,) = import_cache(paths, "whole", [source], partitions=3, **options)
    for rows in (1, whole.rows // 3, whole.rows * 2 // 3, whole.rows):
        import_until(paths, source, rows, **options)
    began: list[int] = []
    written: list[int] = []
    original = PartitionWriter.write
    monkeypatch.setattr(
        PartitionWriter,
        "write",
        lambda self, rows, values: (written.append(rows), original(self, rows, values)),
    )
    (cache,) = import_cache(
        paths,
        "a",
        [source],
        partitions=3,
        resume=True,
        progress=lambda rows, *rest: began.append(rows),
        **options,
    )
    assert cache.partitions == whole.partitions
    assert sum(written) < whole.rows / 2 and began[0] > whole.rows / 2
    assert not list(paths.staging.iterdir())


@pytest.mark.usefixtures("small_blocks")
def test_blocks_that_were_damaged_or_cut_are_written_again(paths: Paths, tmp_path: Path) -> None:
    source = write_sources(tmp_path, "csv")
    (whole,) = import_cache(paths, "whole", [source], partitions=3)
    import_until(paths, source, whole.rows)
    first, second, third = sorted(paths.staging.rglob("*.arrow"))
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 255
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:-100])
    third.write_bytes(b"")
    (cache,) = import_cache(paths, "a", [source], partitions=3, resume=True)
    assert cache.partitions == whole.partitions


@pytest.mark.usefixtures("small_blocks")
def test_a_journal_that_was_cut_counts_as_far_as_it_goes(paths: Paths, tmp_path: Path) -> None:
    source = write_sources(tmp_path, "npz")
    (whole,) = import_cache(paths, "whole", [source], partitions=3)
    import_until(paths, source, whole.rows)
    (journal,) = paths.staging.rglob("journal")
    journal.write_bytes(journal.read_bytes()[:-30])
    (cache,) = import_cache(paths, "a", [source], partitions=3, resume=True)
    assert cache.partitions == whole.partitions


@pytest.mark.usefixtures("small_blocks")
def test_splits_and_appended_rows_are_continued(paths: Paths, tmp_path: Path) -> None:
    source = write_sources(tmp_path, "parquet")
    split = {"train": 0.7, "test": 0.3}
    whole = import_cache(paths, "whole", [source], partitions=3, split=split)
    import_until(paths, source, 4000, split=split)
    parts = import_cache(paths, "a", [source], partitions=3, split=split, resume=True)
    assert [part.partitions for part in parts] == [part.partitions for part in whole]
    import_cache(paths, "a", [source], partitions=3)
    import_until(paths, source, 4000, append=True)
    (cache,) = import_cache(paths, "a", [source], partitions=3, append=True, resume=True)
    assert cache.rows == 4 * ROWS


@pytest.mark.usefixtures("small_blocks")
def test_other_sources_and_options_are_refused(paths: Paths, tmp_path: Path) -> None:
    source = write_sources(tmp_path, "csv")
    import_until(paths, source, 4000)
    with pytest.raises(InputError, match="--resume continues with an import of the same files"):
        import_cache(paths, "a", [source], partitions=4, resume=True)
    with (tmp_path / "1.csv").open("a") as file:
        file.write("1,0.5,more\n")
    with pytest.raises(InputError, match="unchanged since"):
        import_cache(paths, "a", [source], partitions=3, resume=True)
    assert import_cache(paths, "a", [source], partitions=4)[0].rows == 2 * ROWS + 1
    assert not list(paths.staging.iterdir())


@pytest.mark.usefixtures("small_blocks")
def test_other_features_are_refused(paths: Paths, tmp_path: Path) -> None:
    source = write_sources(tmp_path, "tfrecord")
    import_until(paths, source, 4000, features="x:int64=id")
    with pytest.raises(InputError, match="with the same options"):
        import_cache(paths, "a", [source], partitions=3, resume=True, features="x:int64=other")


@pytest.mark.usefixtures("small_blocks")
def test_blocks_that_the_sources_have_no_rows_for_are_refused(paths: Paths, tmp_path: Path) -> None:
    source = write_sources(tmp_path, "npy")
    import_until(paths, source, ROWS)
    writer = PartitionWriter(next(paths.staging.rglob("*.arrow")), (Column("x", "int64", (2,)),))
    (journal,) = paths.staging.rglob("journal")
    block_rows = unseal(journal.read_bytes().split(b"\n")[0])["block_rows"]
    writer.adopt(block_rows)
    for _ in range(50):
        writer.write(block_rows, {"x": np.zeros((block_rows, 2), np.int64)})
    with pytest.raises(GridError, match="rows more than the sources have"):
        import_cache(paths, "a", [source], partitions=3, resume=True)


@pytest.mark.usefixtures("small_blocks")
def test_a_full_disk_says_what_is_kept(paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_sources(tmp_path, "csv")
    calls: list[int] = []

    def fill(descriptor: int, pieces: list[memoryview]) -> None:
        calls.append(descriptor)
        if len(calls) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor, pieces)

    original = writer_module._write_all
    monkeypatch.setattr(writer_module, "_write_all", fill)
    with pytest.raises(StorageFull, match=r"What was written is kept: .* --resume removes it. Free some"):
        import_cache(paths, "a", [source], partitions=3, resume=True)
    monkeypatch.setattr(writer_module, "_write_all", original)
    (whole,) = import_cache(paths, "whole", [source], partitions=3)
    (cache,) = import_cache(paths, "a", [source], partitions=3, resume=True)
    assert cache.partitions == whole.partitions


@pytest.mark.usefixtures("small_blocks")
def test_what_can_be_continued_goes_with_the_nodes(paths: Paths, tmp_path: Path) -> None:
    source = write_sources(tmp_path, "csv")
    import_until(paths, source, 4000)
    take_down(paths, force=True)
    assert not list_resumable(paths) and not list(paths.staging.iterdir())


@pytest.mark.usefixtures("small_blocks")
def test_what_is_removed_first_needs_no_room(paths: Paths, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(40_000))
    import_until(paths, str(tmp_path / "a.npy"), 30_000)
    node = NodeId("node-0")
    kept = measure_store(paths, node).used
    set_quotas(paths, [node], quota=400_000)
    assert 200_000 < kept < 400_000
    np.save(tmp_path / "b.npy", np.arange(90_000))
    with pytest.raises(StorageFull):
        import_cache(paths, "a", [str(tmp_path / "b.npy")], partitions=3)
    assert list_resumable(paths), "an import that doesn't fit removes nothing"
    import_cache(paths, "a", [str(tmp_path / "a.npy")], partitions=3)
    assert not list(paths.staging.iterdir())


@pytest.mark.usefixtures("small_blocks")
def test_what_can_be_continued_is_not_swept(paths: Paths, tmp_path: Path) -> None:
    source = write_sources(tmp_path, "csv")
    import_until(paths, source, 4000)
    assert sweep(paths) == 0 and list(list_resumable(paths)) == ["a"] and list_resumable(paths)["a"] > 50_000
    import_cache(paths, "other", [source])
    assert list(list_resumable(paths)) == ["a"]
    with pytest.raises(SourceError):
        import_cache(paths, "a", [source], split={"test": 1 - 1e-9, "train": 1e-9})
    import_cache(paths, "a", [source])
    assert not list_resumable(paths) and Catalog(paths).get("a").rows == 2 * ROWS


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.usefixtures("small_blocks")
def test_compressed_partitions_are_continued_and_appended(codec: str, paths: Paths, tmp_path: Path) -> None:
    source = write_sources(tmp_path, "parquet")
    (whole,) = import_cache(paths, "whole", [source], partitions=3, compress=codec)
    import_until(paths, source, ROWS, compress=codec)
    with pytest.raises(InputError, match="with the same options"):
        import_cache(paths, "a", [source], partitions=3, resume=True)
    (cache,) = import_cache(paths, "a", [source], partitions=3, resume=True, compress=codec)
    assert cache.partitions == whole.partitions and cache.column_bytes == whole.column_bytes
    (cache,) = import_cache(paths, "a", [source], append=True)
    assert cache.codec == codec and cache.partitions[:3] == whole.partitions
    assert [raw for raw, _ in cache.column_bytes[:2]] == [2 * raw for raw, _ in whole.column_bytes[:2]]
    assert all(info.raw_bytes > info.bytes for info in cache.partitions)
    other = {"lz4": "zstd", "zstd": "lz4"}[codec]
    with pytest.raises(InputError, match=r"--append takes all but the rows.*Received: --compress"):
        import_cache(paths, "a", [source], append=True, compress=other)


@pytest.mark.usefixtures("small_blocks")
def test_lists_of_different_lengths_are_continued_and_appended(paths: Paths, tmp_path: Path) -> None:
    lists = pa.array([list(range(i % 7)) for i in range(ROWS)], pa.list_(pa.int32()))
    pq.write_table(pa.table({"x": lists, "id": range(ROWS)}), tmp_path / "a.parquet", row_group_size=300)
    source = str(tmp_path / "a.parquet")
    (whole,) = import_cache(paths, "whole", [source], partitions=3, ragged=["x"])
    import_until(paths, source, 2 * ROWS // 3, ragged=["x"])
    (cache,) = import_cache(paths, "a", [source], partitions=3, ragged=["x"], resume=True)
    assert cache.partitions == whole.partitions
    (cache,) = import_cache(paths, "a", [source], append=True)
    assert cache.rows == 2 * ROWS and cache.columns == whole.columns


def test_a_plan_has_the_fingerprint_that_earlier_versions_gave_it() -> None:
    """What an import of an earlier version has left is continued."""
    columns = (Column("x", "uint8", (2, 3)), Column("label", "int64"))
    rows = RowPlan(
        token="",
        names=("a/train", "a/test"),
        fractions=(0.9, 0.1),
        partitions=4,
        columns=columns,
        labels=("cat", "dog"),
        label_from="filename",
        key="x",
        block_rows=7,
        codec=None,
        drop_pages=False,
        primaries=(),
        destinations=(),
    )
    source: Any = SimpleNamespace(path="/data/a.csv")
    plan = ImportPlan(
        options=ImportOptions("a", ("/data/a.csv",)),
        sources=(source,),
        states=(FileState(10, 20, 30),),
        rows=rows,
        backups=1,
        topology=Topology((NodeId("n-0"), NodeId("n-1"))),
        sizes=RowSizes(1, 0.0, 1, True),
    )
    assert fingerprint(plan) == "e84a93e4"
    other = replace(
        plan,
        options=ImportOptions("a", ("/data/a.csv",), features="x:int64", render=28),
        rows=replace(rows, codec="lz4", token="t", block_rows=1),
        reader=("images", "size=1"),
        node_options=SourceOptions(),
    )
    assert fingerprint(other) == "9630a582"
