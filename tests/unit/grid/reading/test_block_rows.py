"""Rows of a version that are read once: all of them, drawn ones, and ones by number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid_jobs import ROWS

from insitu.base.errors import CorruptPartition, GridError, UnknownCache
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec
from insitu.grid import bring_up, dataset, hash_values, import_cache, read_blocks, read_drawn, read_numbered
from insitu.grid.catalog import Catalog

NAMES = ["id", "x", "name"]


@pytest.fixture(params=[None, "lz4"])
def rows(paths: Paths, source: Path, request: pytest.FixtureRequest) -> CacheSpec:
    return import_cache(paths, "a", [str(source)], partitions=4, compress=request.param)[0]


def join(blocks: Any) -> dict[str, Any]:
    found = list(blocks)
    joined = {"numbers": np.concatenate([block.numbers for block in found])}
    for name in found[0].values:
        parts = [block.values[name] for block in found]
        is_array = isinstance(parts[0], np.ndarray)
        joined[name] = np.concatenate([each if is_array else np.array(each.to_pylist()) for each in parts])
    return joined


def test_all_rows_come_in_their_order(paths: Paths, rows: CacheSpec) -> None:
    found = join(read_blocks(paths, rows, NAMES))
    assert list(found["numbers"]) == list(range(ROWS)) and sorted(found["id"]) == list(range(ROWS))
    whole, _ = next(iter(dataset("a", features=["row", *NAMES], paths=paths).batch(ROWS)))
    order = np.argsort(whole["row"])
    for name in NAMES:
        np.testing.assert_array_equal(found[name], whole[name][order])
    assert {block.partition for block in read_blocks(paths, rows, ["id"])} == {0, 1, 2, 3}


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 4, 3 * len(data) // 4):
        data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("limit", [1, 10, ROWS - 1, ROWS, 10 * ROWS])
def test_the_first_rows_come_alone(paths: Paths, rows: CacheSpec, limit: int) -> None:
    some, every = join(read_blocks(paths, rows, NAMES, limit)), join(read_blocks(paths, rows, NAMES))
    for name, values in some.items():
        np.testing.assert_array_equal(values, every[name][:limit])


def test_drawn_rows_are_single_ones_from_all_parts(paths: Paths, tmp_path: Path) -> None:
    count = 100_000
    np.savez(tmp_path / "n.npz", n=np.arange(count), word=np.full(count, "w"))
    (cache,) = import_cache(paths, "n", [str(tmp_path / "n.npz")], partitions=3)
    found, again, other = (join(read_drawn(paths, cache, ["n", "word"], 2000, seed)) for seed in (1, 1, 2))
    assert len(np.unique(found["numbers"])) == 2000
    np.testing.assert_array_equal(found["n"], again["n"])
    assert set(found["n"]) != set(other["n"])
    shares = np.histogram(found["numbers"], 10, (0, count))[0]
    assert shares.min() > 140 and shares.max() < 260
    assert np.count_nonzero(np.diff(found["numbers"]) == 1) < 200  # about 40 by chance
    np.testing.assert_array_equal(join(read_numbered(paths, cache, ["n"], found["numbers"]))["n"], found["n"])
    assert list(join(read_drawn(paths, cache, ["n"], 2 * count, 1))["numbers"]) == list(range(count))


def test_another_replica_takes_the_place_of_a_damaged_one(
    paths: Paths, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bring_up(paths, 2)
    (cache,) = import_cache(paths, "a", [str(source)], partitions=2, backups=1)
    before = join(read_blocks(paths, cache, NAMES))
    damage(paths.partition(cache.partitions[0].owners[0], "a", 1, 0))
    after = join(read_blocks(paths, cache, NAMES))
    assert "That on node-" in caplog.text
    for name, values in before.items():
        np.testing.assert_array_equal(values, after[name])


def test_rows_that_are_not_there_are_an_error(paths: Paths, rows: CacheSpec, source: Path) -> None:
    damage(paths.partition(rows.partitions[3].owners[0], "a", 1, 3))
    with pytest.raises(CorruptPartition):
        join(read_blocks(paths, rows, NAMES))
    import_cache(paths, "a", [str(source)], overwrite=True)
    with pytest.raises(UnknownCache, match="was replaced or dropped"):
        join(read_blocks(paths, rows, NAMES))
    with pytest.raises(UnknownCache, match=r"Name a@2"):
        Catalog(paths).get_named("a@1")


def test_rows_on_other_hosts_are_an_error(head: Paths, source: Path) -> None:
    (cache,) = import_cache(head, "a", [str(source)], partitions=2)
    for partition in cache.partitions:
        head.partition(partition.owners[0], "a", 1, partition.index).unlink()
    import shutil

    shutil.rmtree(head.nodes)
    for read in (read_blocks(head, cache, ["id"]), read_drawn(head, cache, ["id"], 3, 0)):
        with pytest.raises(GridError, match="insitu fetch a"):
            list(read)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float64", "bool", "float16"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_rows_hash_alike_if_their_bytes_are_equal(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(0, 2, (500, *shape)).astype(dtype)
    hashes = hash_values(values)
    rows = [row.tobytes() for row in values]
    assert len(set(hashes.tolist())) == len(set(rows))
    assert dict(zip(rows, hashes.tolist(), strict=True)) == {
        row: int(each) for row, each in zip(rows, hashes, strict=True)
    }
    assert len(hash_values(values[:0])) == 0


def test_moved_values_and_texts_hash_otherwise() -> None:
    import pyarrow as pa

    pair = np.array([[1, 2], [2, 1], [0, 0]])
    assert len(set(hash_values(pair).tolist())) == 3
    texts = pa.array(["", "a", "b", "ab", "a"], pa.large_utf8())
    hashes = hash_values(texts).tolist()
    assert hashes[1] == hashes[4] and len(set(hashes)) == 4
    assert hash_values(texts.slice(1, 2)).tolist() == hashes[1:3]
