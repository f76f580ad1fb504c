"""Import: every row once, in the partition that its hash says, with nothing left behind by what fails."""

from __future__ import annotations

import errno
import fcntl
import gzip
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.base.errors import CacheBusy, CacheExists, GridError, InputError, SourceError, StorageFull
from insitu.base.paths import MANIFEST, Paths
from insitu.base.spec import CacheSpec, Column, NodeId, Topology
from insitu.grid import Catalog, bring_up, import_cache
from insitu.grid.catalog.manifests import prepare_manifest
from insitu.grid.catalog.orphaned_imports import sweep
from insitu.grid.intake.import_plan import choose_partitions, measure_rows, most_readable
from insitu.grid.layout.affinity import hash_integers, hash_rows, partition_of_rows, split_of_rows
from insitu.grid.partitions import Partition, file_checksum
from insitu.grid.sources import SourceOptions, find_sources, open_sources


def partition_files(paths: Paths, cache: CacheSpec) -> list[Partition]:
    found = []
    for info in cache.partitions:
        files = [paths.partition(owner, cache.name, cache.version, info.index) for owner in info.owners]
        for file in files:
            assert file.stat().st_size == info.bytes and file_checksum(file) == info.checksum
        found.append(Partition(files[0], cache.columns, info.rows, cache.block_rows))
    return found


def column(paths: Paths, cache: CacheSpec, name: str) -> list[Any]:
    """The values of one column by partition."""
    return [p.values[name].slice(0, p.rows) for p in partition_files(paths, cache)]


def everything(paths: Paths) -> list[str]:
    """All files below home; locks, catalogue, and what the grid notes beside partitions left out."""
    return sorted(
        str(p.relative_to(paths.home))
        for p in paths.home.rglob("*")
        if p.is_file()
        and p.parent.name != "locks"
        and p != paths.catalog
        and p.suffix != ".verified"
        and p.name not in ("store-id", "manifest.json")
    )


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, rows in (("cat", 700), ("ant", 300), ("dog", 500)):
        np.save(folder / f"{name}.npy", rng.integers(0, 255, (rows, 6, 5), dtype=np.uint8))
    return folder


def test_rows_go_where_the_hash_of_their_index_says(paths: Paths, images: Path) -> None:
    (cache,) = import_cache(paths, "images", [str(images)], partitions=4, label_from_filename=True)
    assert cache == Catalog(paths).get("images")
    assert cache.columns == (Column("x", "uint8", (6, 5)), Column("label", "int64"))
    assert cache.labels == ("ant", "cat", "dog") and cache.rows == 1500
    values = np.concatenate([np.load(images / f"{name}.npy") for name in cache.labels])
    labels = np.repeat([0, 1, 2], [300, 700, 500])
    partition = partition_of_rows(hash_rows(0, 1500), 4)
    for index in range(4):
        np.testing.assert_array_equal(column(paths, cache, "x")[index], values[partition == index])
        np.testing.assert_array_equal(column(paths, cache, "label")[index], labels[partition == index])


def test_columns_lie_in_place_aligned_and_read_only(paths: Paths, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = {
        "flag": rng.integers(0, 2, 101) == 1,
        "small": rng.integers(0, 9, (101, 3), dtype=np.int8),
        "wide": rng.normal(size=(101, 2, 7)).astype(np.float16),
        "text": np.array([f"é{i}" for i in range(101)]),
        "one": rng.normal(size=101).astype(np.float32),
    }
    np.savez(tmp_path / "a.npz", **table)
    (cache,) = import_cache(paths, "a", [str(tmp_path / "a.npz")], partitions=1)
    (partition,) = partition_files(paths, cache)
    for name, expected in table.items():
        values = partition.values[name].slice(0, 101)
        np.testing.assert_array_equal(values, expected)
        if name != "text":
            assert values.ctypes.data % 8 == 0 and not values.flags.writeable and not values.flags.owndata
    with pa.memory_map(str(partition.path)) as file:
        assert pa.ipc.open_file(file).num_record_batches == 1


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    partitions=st.integers(1, 9),
    block_bytes=st.integers(1, 2000),
    data=st.data(),
)
def test_every_row_comes_once(
    paths: Paths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[int],
    partitions: int,
    block_bytes: int,
    data: st.DataObject,
) -> None:
    monkeypatch.setattr("insitu.grid.importing.importer.BLOCK_BYTES", block_bytes)
    start = 0
    for i in range(3):
        (tmp_path / f"{i}.parquet").unlink(missing_ok=True)
    for i, count in enumerate(rows):
        ids = np.arange(start, start + count)
        start += count
        pq.write_table(pa.table({"id": ids, "name": [f"row-{i}" for i in ids]}), tmp_path / f"{i}.parquet")
    key = data.draw(st.sampled_from([None, "id", "name"]))
    (cache,) = import_cache(
        paths, "a", [str(tmp_path / "*.parquet")], partitions=partitions, key=key, overwrite=True
    )
    by_partition = column(paths, cache, "id")
    assert sorted(np.concatenate(by_partition).tolist()) == list(range(start))
    for ids, names in zip(by_partition, column(paths, cache, "name"), strict=True):
        assert names.tolist() == [f"row-{i}" for i in ids]
    if key != "name":
        hashes = hash_integers(np.arange(start)) if key else hash_rows(0, start)
        for index, ids in enumerate(by_partition):
            assert (partition_of_rows(hashes, partitions)[ids] == index).all()


def test_equal_keys_meet_in_one_partition(paths: Paths, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,v\n" + "".join(f"u{i % 7},{i}\n" for i in range(200)))
    (cache,) = import_cache(paths, "a", [str(tmp_path / "a.csv")], partitions=3, key="user")
    users = [set(np.asarray(values).tolist()) for values in column(paths, cache, "user")]
    assert sum(map(len, users)) == 7 == len(set.union(*users))


def test_a_split_makes_disjoint_caches_at_once(paths: Paths, images: Path) -> None:
    split = {"train": 0.8, "test": 0.2}
    train, test = import_cache(paths, "images", [str(images)], split=split, label_from_filename=True)
    assert [c.name for c in Catalog(paths).caches()] == ["images/test", "images/train"]
    assert train.rows + test.rows == 1500 and 250 < test.rows < 350
    values = np.concatenate([np.load(images / f"{name}.npy") for name in train.labels])
    in_test = split_of_rows(hash_rows(0, 1500), [0.8, 0.2]) == 1
    got = np.concatenate(column(paths, test, "x"))
    assert sorted(map(bytes, got)) == sorted(map(bytes, values[in_test]))


def test_backups_lie_on_other_nodes(paths: Paths, images: Path) -> None:
    bring_up(paths, 3)
    (cache,) = import_cache(paths, "images", [str(images)], backups=2, partitions=5)
    assert all(len(set(p.owners)) == 3 for p in cache.partitions)
    partition_files(paths, cache)
    assert len(everything(paths)) == 5 * 3 + 1


@pytest.mark.parametrize(("nodes", "partitions"), [(1, 8), (2, 8), (3, 9), (5, 10), (8, 8), (11, 11)])
def test_by_default_each_node_has_as_many_partitions(
    nodes: int, partitions: int, paths: Paths, images: Path
) -> None:
    bring_up(paths, nodes)
    (cache,) = import_cache(paths, "images", [str(images)])
    assert Counter(p.owners[0] for p in cache.partitions) == {
        f"node-{i}": partitions // nodes for i in range(nodes)
    }


def test_overwriting_drops_the_old_version(paths: Paths, images: Path) -> None:
    import_cache(paths, "images", [str(images)])
    with pytest.raises(CacheExists, match="--overwrite"):
        import_cache(paths, "images", [str(images)])
    (cache,) = import_cache(paths, "images", [str(images)], overwrite=True)
    assert cache.version == 2 and not paths.version("node-0", "images", 1).exists()
    assert len(everything(paths)) == 8


def test_an_old_version_stays_while_a_job_holds_it(paths: Paths, images: Path) -> None:
    (old,) = import_cache(paths, "images", [str(images)])
    Catalog(paths).pin("images", 1, "job")
    import_cache(paths, "images", [str(images)], overwrite=True)
    sweep(paths)
    partition_files(paths, old)
    Catalog(paths).unpin("job")
    assert len(everything(paths)) == 8


def test_more_partitions_than_rows_leaves_some_empty(paths: Paths, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    (cache,) = import_cache(paths, "a", [str(tmp_path / "a.npy")], partitions=20)
    assert cache.rows == 3 and len(cache.partitions) == 20
    assert sorted(np.concatenate(column(paths, cache, "x")).tolist()) == [0, 1, 2]


def test_progress_is_told(paths: Paths, images: Path) -> None:
    told: list[tuple[int, int, int | None]] = []
    import_cache(paths, "images", [str(images)], progress=lambda *said: told.append(said))
    total = sum(p.stat().st_size for p in images.iterdir())
    assert told[-1] == (1500, total, total) and told == sorted(told)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"partitions": 0}, InputError, r"--partitions must be at least 1. Received: 0"),
        ({"partitions": 100_000}, InputError, r"--partitions must be in \[1,.*Received: 100000"),
        ({"partitions": 1 << 20}, InputError, "--partitions"),
        ({"backups": 1}, InputError, r"--backups must be in \[0, 1\).*insitu up"),
        ({"backups": -1}, InputError, "--backups"),
        ({"key": "nothing"}, InputError, "no column of the sources, which have x uint8"),
        ({"key": "x"}, InputError, "--key must be a column of whole numbers or text"),
        ({"ragged": ["x"]}, InputError, r"Received: --ragged x for .* with x uint8"),
        ({"format": "tsv"}, InputError, "--format must be npy, "),
        ({"split": {"train": 0.5}}, InputError, "add up to 1"),
        ({"split": {"a b": 1.0}}, InputError, "name is made of"),
        ({"column": "label", "label_from_filename": True}, SourceError, "column 'label' of its own"),
    ],
)
def test_bad_options_say_what_to_change(
    options: dict[str, Any], error: type[Exception], message: str, paths: Paths, images: Path
) -> None:
    with pytest.raises(error, match=message):
        import_cache(paths, "images", [str(images)], **options)
    assert everything(paths) == [] and Catalog(paths).caches() == []


def test_bad_names_are_refused(paths: Paths, images: Path) -> None:
    with pytest.raises(InputError, match="name is made of"):
        import_cache(paths, "../images", [str(images)])


def test_nan_labels_are_refused_with_their_place(paths: Paths, tmp_path: Path) -> None:
    labels = np.zeros(100, np.float32)
    labels[[40, 60]] = np.nan
    np.savez(tmp_path / "a.npz", x=np.zeros((100, 3)), label=labels)
    with pytest.raises(SourceError, match=r"2 of the labels of rows .0, 100. are NaN, the first in row 40"):
        import_cache(paths, "a", [str(tmp_path / "a.npz")])
    assert everything(paths) == [] and Catalog(paths).caches() == []


def test_a_source_that_breaks_half_way_leaves_nothing(
    paths: Paths, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.grid.importing.importer.BLOCK_BYTES", 1000)
    import_cache(paths, "images", [str(images)])
    before = everything(paths)

    def cut(rows: int, done: int, total: int | None) -> None:
        os.truncate(images / "dog.npy", 5000)

    with pytest.raises(SourceError, match="truncated"):
        import_cache(paths, "images", [str(images)], overwrite=True, progress=cut)
    assert everything(paths) == before and Catalog(paths).get("images").version == 1


def test_a_split_without_rows_is_refused(paths: Paths, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(2))
    with pytest.raises(SourceError, match="would have none of the 2 row"):
        import_cache(paths, "a", [str(tmp_path / "a.npy")], split={"train": 0.999999, "test": 0.000001})
    assert everything(paths) == []


def test_two_imports_at_once_are_refused(paths: Paths, images: Path) -> None:
    lock = paths.cache_lock("images/test")
    lock.parent.mkdir(parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CacheBusy, match="importing into images/test"):
            import_cache(paths, "images", [str(images)], split={"train": 0.5, "test": 0.5})
        import_cache(paths, "other", [str(images)])
    import_cache(paths, "images", [str(images)], split={"train": 0.5, "test": 0.5})


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("step", ["_write_all", "column_sums", "copyfile", "put_in_place"])
def test_a_full_disk_leaves_the_old_version(
    step: str, code: int, paths: Paths, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_up(paths, 2)
    import_cache(paths, "images", [str(images)], backups=1)
    before = everything(paths)
    calls = []

    def full(*arguments: Any, **options: Any) -> None:
        calls.append(step)
        raise OSError(code, os.strerror(code))

    modules = {
        "copyfile": "insitu.grid.intake.partition_builder.shutil",
        "put_in_place": "insitu.grid.importing.importer.ImportOwners",
    }
    monkeypatch.setattr(f"{modules.get(step, 'insitu.grid.partitions.writer')}.{step}", full)
    words = "disk must take what is written to" if code == errno.EIO else "No room is left.*INSITU_HOME"
    with pytest.raises(GridError if code == errno.EIO else StorageFull, match=words):
        import_cache(paths, "images", [str(images)], backups=1, overwrite=True)
    assert calls and everything(paths) == before and Catalog(paths).get("images").version == 1


def test_sweeping_spares_imports_that_are_alive(paths: Paths, images: Path) -> None:
    import_cache(paths, "images", [str(images)])
    mine, dead = paths.staged("mine", "1-x").root, paths.staged("images", "2-y").root
    orphan = paths.version("node-0", "images", 7)
    for folder in (mine, dead, orphan):
        folder.mkdir(parents=True)
        (folder / "part-00000.arrow").write_text("x")
    prepare_manifest(
        paths, NodeId("node-0"), replace(Catalog(paths).get("images"), version=7), orphan / MANIFEST
    )
    lock = paths.cache_lock("mine")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        sweep(paths)
        assert mine.exists() and not dead.exists() and not orphan.exists()
    sweep(paths)
    assert not mine.exists() and len(everything(paths)) == 8


def test_sweeping_spares_imports_of_other_hosts(paths: Paths) -> None:
    """Whether one of them is alive can't be seen on every file system that hosts share."""
    far, old = paths.staging / "a~0123abcd-77-0a1b2c3d", paths.staging / "a~77-0a1b2c3d"
    for folder in (far, old):
        folder.mkdir(parents=True)
    sweep(paths)
    assert far.exists() and not old.exists()


@pytest.mark.parametrize("size", [10, -10])
def test_a_source_that_changes_while_it_is_read_is_an_error(paths: Paths, images: Path, size: int) -> None:
    def change(rows: int, done: int, total: int | None) -> None:
        path = images / "ant.npy"
        os.truncate(path, path.stat().st_size + size) if not rows else None

    with pytest.raises(SourceError, match=r"ant.npy (must stay as it is.*has changed since|is truncated)"):
        import_cache(paths, "images", [str(images)], progress=change)
    assert everything(paths) == [] and Catalog(paths).caches() == []


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_source_that_grows_while_it_is_read_is_an_error(paths: Paths, tmp_path: Path, name: str) -> None:
    """Lines come at its end after they were counted: some may have been read, so none are taken."""
    packed = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(packed(b"x\n" + b"1\n" * 1000))

    def grow(rows: int, done: int, total: int | None) -> None:
        with (tmp_path / name).open("ab") as file:
            file.write(packed(b"2\n" * 1000))

    for resume in (False, True):
        with pytest.raises(SourceError, match=r"must stay as it is.*has changed since the import began"):
            import_cache(paths, "a", [str(tmp_path / name)], progress=grow, resume=resume)
        assert Catalog(paths).caches() == []
    (cache,) = import_cache(paths, "a", [str(tmp_path / name)])
    assert cache.rows > 2000


def test_a_source_that_vanishes_is_named(paths: Paths, images: Path) -> None:
    def remove(rows: int, done: int, total: int | None) -> None:
        (images / "dog.npy").unlink(missing_ok=True)

    with pytest.raises(SourceError, match=r"dog.npy can't be read"):
        import_cache(paths, "images", [str(images)], progress=remove)


def test_what_cannot_fit_is_refused_before_it_is_read(
    paths: Paths, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1500 * 30 + 900]  # all rows, and no more
    usage = "insitu.grid.intake.import_plan.shutil.disk_usage"
    monkeypatch.setattr(usage, lambda folder: SimpleNamespace(free=free[0]))
    (cache,) = import_cache(paths, "images", [str(images)], partitions=1)
    assert cache.bytes < free[0] + 2000
    free[0] = 44_999
    with pytest.raises(StorageFull, match=r"about 45900 bytes of 1500 rows, where 44999 are free"):
        import_cache(paths, "images", [str(images)], overwrite=True)
    assert Catalog(paths).get("images").version == 1


@pytest.mark.parametrize(
    ("size", "nodes", "partitions"),
    [
        (0, 1, 8),
        (8 << 30, 1, 8),
        (9 << 30, 1, 9),
        (100 << 30, 3, 102),
        (1 << 50, 1, 65535),
        (1 << 50, 3, 65535),
    ],
)
def test_partitions_are_of_a_gibibyte(size: int, nodes: int, partitions: int) -> None:
    topology = Topology(tuple(NodeId(f"node-{i}") for i in range(nodes)))
    assert choose_partitions(None, topology, size) == partitions


def test_partitions_that_no_process_could_map_are_refused(
    paths: Paths, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.grid.intake.import_plan.read_max_mappings", lambda: 65_530)
    words = r"Received: 40000 partitions, where this system allows 65530 mappings.*sysctl -w vm.max_map_count"
    with pytest.raises(InputError, match=words):
        import_cache(paths, "images", [str(images)], partitions=40_000)
    with pytest.raises(InputError, match=r"in \[1, 65536\]. Received: 100000"):
        import_cache(paths, "images", [str(images)], partitions=100_000)
    assert most_readable(65_530) == 30_765 and most_readable(None) == most_readable(1 << 20) == 65_536
    assert choose_partitions(None, Topology((NodeId("node-0"),)), 1 << 50, most=30_765) == 30_764


def test_the_size_of_text_is_judged_by_its_beginning(paths: Paths, tmp_path: Path) -> None:
    text = "t\n" + "x" * 99 + "\n"
    (tmp_path / "a.csv").write_text(text * 1 + ("x" * 99 + "\n") * 39_999)
    opened = open_sources(find_sources([str(tmp_path / "a.csv")], None), SourceOptions())
    sizes = measure_rows(opened, opened[0].columns)
    assert sizes.rows == pytest.approx(40_000, rel=0.01) and sizes.text_bytes == pytest.approx(99)
    assert not sizes.is_known and sizes.bytes == pytest.approx(40_000 * 107 * 1.02, rel=0.01)
