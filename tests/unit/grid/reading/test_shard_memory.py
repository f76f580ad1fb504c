"""Compressed caches that are used as a whole, and that they give what others give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from grid_jobs import context, wait_for_repairs

from insitu.base.context import Context
from insitu.base.errors import CorruptPartition, GridError, InputError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, Column
from insitu.grid import Catalog, Dataset, bring_up, dataset, import_cache
from insitu.grid.partitions import Partition
from insitu.grid.reading.shard_memory import ShardMemory, bytes_in_memory

ROWS = 3000


@pytest.fixture
def names(paths: Paths, tmp_path: Path) -> tuple[str, str, str]:
    """The same rows in three caches: as they are, and compressed by each codec."""
    bring_up(paths, 2)
    rng = np.random.default_rng(0)
    image = pa.FixedSizeListArray.from_arrays(pa.array(rng.integers(0, 3, ROWS * 20, dtype=np.uint8)), 20)
    lists = [list(range(i % 7)) for i in range(ROWS)]
    table = {
        "image": image,
        "id": pa.array(np.arange(ROWS)),
        "noise": pa.array(rng.random(ROWS)),
        "name": pa.array([f"row {i % 50}" for i in range(ROWS)]),
        "tokens": pa.array(lists, pa.list_(pa.int32())),
        "label": pa.array(np.arange(ROWS) % 10),
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=500)
    sources = [str(tmp_path / "a.parquet")]
    options: dict[str, Any] = {"partitions": 4, "backups": 1, "ragged": ["tokens"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("insitu.grid.importing.importer.choose_block_rows", lambda *_, **__: 64)
        import_cache(paths, "plain", sources, **options)
        import_cache(paths, "lz4", sources, compress="lz4", **options)
        import_cache(paths, "zstd", sources, compress="zstd", **options)
    return "plain", "lz4", "zstd"


def batches(ds: Dataset, epochs: int = 2) -> list[Any]:
    """Return all batches of all shards, as plain lists, with the places that their rows come from."""
    found: list[Any] = []
    for shard in range(ds.num_shards):
        for epoch in range(epochs):
            for batch in ds.shard_batches(shard, epoch):
                origins = [(index, rows.tolist()) for index, rows in batch.origins]
                found.append((plain(batch.data), batch.rows, origins))
    return found


def plain(data: Any) -> Any:
    if isinstance(data, tuple):
        return tuple(plain(each) for each in data)
    if isinstance(data, dict):
        return {name: plain(each) for name, each in data.items()}
    if data is None:
        return None
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in data], str(data.dtype)


CHAINS: dict[str, Callable[[Dataset], Dataset]] = {
    "in order": lambda ds: ds.batch(100),
    "exact": lambda ds: ds.shuffle(3).batch(96),
    "windows": lambda ds: ds.shuffle(3, exact=False, window_bytes=30_000).batch(96),
    "take": lambda ds: ds.take(150).shuffle(1).batch(40),
    "filter": lambda ds: ds.filter(lambda features, label: features["id"] % 3 == 0).shuffle(1).batch(64),
    "several passes": lambda ds: ds.shuffle(2).repeat(2).batch(500),
}


CHOSEN: list[Any] = [None, "id", ["name", "noise"], ["tokens", "image"]]


@pytest.mark.parametrize("chain", CHAINS)
def test_the_same_seed_gives_the_same_batches_whatever_is_compressed(
    paths: Paths, names: tuple[str, str, str], chain: str
) -> None:
    for features in [None, ["id", "image"]] if chain == "filter" else CHOSEN:
        found = []
        for name in names:
            ds = dataset(name, features=features, context=context(paths, num_shards=2))
            found.append(batches(CHAINS[chain](ds)))
        assert found[0] == found[1] == found[2]
        assert sum(rows for _, rows, _ in found[0])


def test_large_caches_are_read_in_windows_in_the_same_order(
    paths: Paths, names: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = [Catalog(paths).get(name) for name in names]
    assert caches[0].raw_bytes == caches[1].raw_bytes == caches[2].raw_bytes == caches[0].bytes
    assert caches[2].bytes < caches[0].bytes
    # What decides are the bytes without compression.
    monkeypatch.setattr("insitu.grid.reading.datasets.EXACT_BYTES", caches[0].bytes - 1)
    monkeypatch.setattr("insitu.grid.reading.datasets.WINDOW_BYTES", 20_000)
    sets = [dataset(name, context=Context(paths=paths)) for name in names]
    shuffled = [ds.shuffle(5) for ds in sets]
    assert all("windows of" in repr(ds) for ds in shuffled)
    for chained in (shuffled, sets):
        found = [batches(ds.batch(128)) for ds in chained]
        assert found[0] == found[1] == found[2]
    assert not any(ds._reader._shards for ds in sets), "all was read in windows"


def test_samples_and_first_rows_read_only_their_blocks(
    paths: Paths, names: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [dataset(name, context=Context(paths=paths)).sample(40, seed=1) for name in names]
    assert plain(samples[0]) == plain(samples[1]) == plain(samples[2])
    specs = [dataset(name, context=Context(paths=paths)).element_spec for name in names]
    assert specs[0] == specs[1] == specs[2]
    made: list[ShardMemory] = []
    original = ShardMemory.__init__

    def note(self: ShardMemory, *arguments: Any, few: bool) -> None:
        made.append(self)
        original(self, *arguments, few=few)

    monkeypatch.setattr(ShardMemory, "__init__", note)
    ds = dataset("zstd", context=Context(paths=paths)).take(70).batch(70)
    assert len(list(ds)) == 1
    (memory,) = made
    assert memory._ready.sum() == 2 and len(memory._ready) >= 40


def test_rows_in_order_are_views_that_nobody_can_change(paths: Paths, names: tuple[str, str, str]) -> None:
    ds = dataset("lz4", features="image", label=None, context=Context(paths=paths)).batch(32)
    first = next(iter(ds))
    with pytest.raises(ValueError, match="read-only"):
        first[:] = 0


def test_what_does_not_fit_into_memory_is_refused(
    paths: Paths, names: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.grid.reading.cache_reader.memory_bytes", lambda: 40_000)
    ds = dataset("zstd", context=Context(paths=paths))
    with pytest.raises(InputError, match=r"must fit into half of the memory.*Give exact=False"):
        ds.shuffle(1)
    assert sorted(i for f, _ in ds.shuffle(1, exact=False).batch(64) for i in f["id"]) == list(range(ROWS))
    assert batches(ds.batch(64)) == batches(dataset("plain", context=Context(paths=paths)).batch(64))
    assert len(list(ds.take(64).shuffle(1).batch(64))) == 1
    with pytest.raises(GridError, match=r"Received: \d+ bytes, where 20000 are half of it"):
        list(ds.take(2000).shuffle(1).batch(64))
    # One column fits, and others aren't decompressed.
    few = dataset("zstd", features="label", label=None, context=Context(paths=paths))
    monkeypatch.setattr("insitu.grid.reading.cache_reader.memory_bytes", lambda: 16 * ROWS + 20_000)
    assert len(list(few.shuffle(1).batch(500))) == 6
    dataset("plain", context=Context(paths=paths)).shuffle(1)


def test_texts_and_lists_count_twice() -> None:
    columns = (Column("x", "int64"), Column("t", "str"), Column("r", "int64[*]"))
    assert bytes_in_memory(columns, [(80, 10), (100, 20), (7, 7)], ("t", "x")) == 280
    assert bytes_in_memory(columns, [(80, 10), (100, 20), (7, 7)], ("r",)) == 14


def damage(paths: Paths, cache: CacheSpec, node: str, block: int) -> None:
    info = cache.partitions[1]
    path = paths.partition(node, cache.name, 1, 1)  # type: ignore[arg-type]
    place = Partition.of_cache(path, cache, info).places[block]
    with path.open("r+b") as file:
        file.seek(int(place["offset"] + place["metadata_bytes"]) + 20)
        file.write(b"damage")


@pytest.mark.parametrize("exact", [True, False])
def test_a_bad_block_is_read_from_a_backup(
    paths: Paths, names: tuple[str, str, str], exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Catalog(paths).get("lz4")
    damage(paths, cache, cache.partitions[1].owners[0], 3)
    ds = dataset("lz4", features=["id", "image"], context=Context(paths=paths)).shuffle(3, exact=exact)
    seen = [i for features, _ in ds.batch(100) for i in features["id"].tolist()]
    assert sorted(seen) == list(range(ROWS))
    assert caplog.text.count("of its block 3 is damaged") == 1
    wait_for_repairs()  # else the copy may be good again before both are read
    for owner in cache.partitions[1].owners:
        damage(paths, cache, owner, 3)
    again = dataset("lz4", features=["id", "image"], context=Context(paths=paths)).shuffle(3, exact=exact)
    with pytest.raises(CorruptPartition, match=r"None of the 2 copies.*block 3 is damaged.*part-00001"):
        list(again.batch(100))
