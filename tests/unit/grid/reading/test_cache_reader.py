"""The columns of a cache as a dataset reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from insitu.base.paths import Paths
from insitu.base.spec import NodeId, ShardMap
from insitu.grid import Catalog
from insitu.grid.layout import ShuffledPlan, WindowedOrder
from insitu.grid.partitions import Partition
from insitu.grid.reading.cache_reader import CacheReader
from insitu.grid.reading.reads import READS


@pytest.fixture
def reader(paths: Paths, cache: str) -> CacheReader:
    """Two shards of columns `id` and `label`."""
    shard_map = ShardMap(cache, 1, ((0, 2, 4), (1, 3, 5)))
    return CacheReader(paths, Catalog(paths).get(cache), shard_map, (0, 1), None, ("id", "name"), "label")


def test_starts_are_the_positions_of_partitions_in_their_shard(reader: CacheReader) -> None:
    rows = [reader.cache.partitions[index].rows for index in (1, 3, 5)]
    assert reader.starts(1) == [0, rows[0], rows[0] + rows[1], sum(rows)]


def test_rows_of_a_batch_come_from_all_partitions_of_the_shard(reader: CacheReader) -> None:
    starts = reader.starts(0)
    order = np.array([starts[2] + 3, starts[2] + 1, starts[0] + 2])
    (features, label), rows, origins = reader.read_rows(
        0, reader.map_shard(0), ShuffledPlan(starts, 3, order), 0
    )
    # The rows of a batch come by partition, and there in the order of the plan.
    assert rows == 3 and [index for index, _ in origins] == [0, 4]
    whole = [reader.read_ranges(0, [(k, 0, 5)])[0][0]["id"] for k in range(3)]
    assert features["id"].tolist() == [whole[0][2], whole[2][3], whole[2][1]]
    assert features["name"].tolist() == [f"row {i}" for i in features["id"]]
    assert label.tolist() == [i % 10 for i in features["id"]]


def test_ranges_are_joined_across_partitions(reader: CacheReader) -> None:
    end = reader.cache.partitions[1].rows
    (features, _), rows, origins = reader.read_ranges(1, [(0, end - 2, end), (1, 0, 3)])
    assert rows == 5 and [len(indices) for _, indices in origins] == [2, 3]
    parts = [reader.read_ranges(1, [(0, end - 2, end)])[0][0], reader.read_ranges(1, [(1, 0, 3)])[0][0]]
    assert features["id"].tolist() == [*parts[0]["id"].tolist(), *parts[1]["id"].tolist()]


def test_a_probe_counts_as_no_read(reader: CacheReader) -> None:
    before = READS.reads
    (features, label), rows = reader.probe()
    assert rows == 2 and len(features["id"]) == len(label) == 2 and READS.reads == before


def test_a_probe_reads_what_lies_on_this_host(paths: Paths, cache: str) -> None:
    found = Catalog(paths).get(cache)
    away = replace(found.partitions[0], owners=(NodeId("elsewhere"),))
    found = replace(found, partitions=(away, *found.partitions[1:]))
    paths.partition("node-0", cache, 1, 0).unlink()
    shard_map = ShardMap(cache, 1, ((0, 2, 4), (1, 3, 5)))
    reader = CacheReader(paths, found, shard_map, (1,), NodeId("node-0"), ("id",), None)
    ids, rows = reader.probe()
    first = reader.read_ranges(1, [(0, 0, 2)])[0]
    assert rows == 2 and ids.tolist() == first.tolist()


def test_pages_read_in_order_are_mapped_once_ahead(
    reader: CacheReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, int]] = []
    monkeypatch.setattr(Partition, "prefault", lambda self, most: asked.append((self.path, most)))
    for _ in range(2):
        reader.read_ranges(1, [(0, 0, 2), (1, 0, 3)])
    held = sum(reader.cache.partitions[index].bytes for index in (1, 3, 5))
    assert [(path.stem, most) for path, most in asked] == [("part-00001", held), ("part-00003", held)]


def test_windows_open_each_partition_once(reader: CacheReader, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    original = Partition.__init__

    def open_and_note(self: Partition, path: Path, *arguments: Any) -> None:
        opened.append(path)
        original(self, path, *arguments)

    monkeypatch.setattr(Partition, "__init__", open_and_note)
    order = WindowedOrder(reader.starts(0), reader.cache.block_rows, 2, seed=1, epoch=0, shard=0)
    columns = reader.read_windows(0, order, lambda: order)
    reader.read_rows(0, columns, ShuffledPlan(reader.starts(0), 3, order), 0)
    columns.close()
    assert len(opened) == 3 == len(set(opened))
