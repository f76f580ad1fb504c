"""What `filter`, `take` and `repeat` leave of a dataset: the same rows in every task, in full batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid_jobs import ROWS, context

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.grid import Dataset, dataset


def whole(paths: Paths, shards: int = 1, **more: Any) -> Dataset:
    here = context(paths, shards=tuple(range(shards)), num_shards=shards)
    return dataset("a", features="id", context=here, **more)


def rows(ds: Dataset, epoch: int = 0) -> list[int]:
    return [
        int(row)
        for shard in range(ds.num_shards)
        for batch in ds.shard_batches(shard, epoch)
        if batch.rows
        for row in (batch.data[0] if isinstance(batch.data, tuple) else batch.data)
    ]


def is_even(ids: Any, label: Any) -> Any:
    return ids % 2 == 0


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_filter_leaves_full_batches(paths: Paths, cache: str, shards: int, shuffle: bool) -> None:
    ds = whole(paths, shards).filter(is_even)
    ds = (ds.shuffle(3) if shuffle else ds).batch(64)
    assert sorted(rows(ds)) == list(range(0, ROWS, 2))
    assert ds.rows == ROWS // 2 and ds.is_selected
    for shard in range(shards):
        sizes = [batch.rows for batch in ds.shard_batches(shard, 0)]
        own = 64 // shards + (shard < 64 % shards)
        assert sizes[: ds.rows_of_shard(shard) // own] == [own] * (ds.rows_of_shard(shard) // own)
        assert len(sizes) == ds.num_steps
    assert (rows(ds, 0) != rows(ds, 1)) is shuffle
    assert rows(ds, 1) == rows(ds, 1)


def test_a_filter_sees_what_the_maps_before_it_made(paths: Paths, cache: str) -> None:
    ds = whole(paths).map(lambda ids, label: {"id": ids + 1}).filter(lambda made: made["id"] > ROWS - 2)
    assert sorted(int(i) for batch in ds.batch(8) for i in batch["id"]) == [ROWS - 1, ROWS]


def test_origins_are_those_of_the_rows_that_are_left(paths: Paths, cache: str) -> None:
    for ds in (whole(paths, 2).filter(is_even), whole(paths, 2).filter(is_even).shuffle(1)):
        batched = ds.batch(50)
        for shard in range(2):
            batches = list(batched.shard_batches(shard, 2))
            together: dict[int, set[int]] = {}
            for batch in batches[:3]:
                for partition, found in batch.origins:
                    together.setdefault(partition, set()).update(found.tolist())
            stated = {p: set(found.tolist()) for p, found in batched.shard_origins(shard, 2, 3)}
            assert stated == together


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 7, 500, ROWS, ROWS + 5])
def test_take_leaves_each_shard_its_share(paths: Paths, cache: str, shards: int, count: int) -> None:
    ds = whole(paths, shards).take(count)
    left = [ds.rows_of_shard(shard) for shard in range(shards)]
    assert sum(left) == ds.rows == min(count, ROWS)
    if count >= shards:
        assert len(set(rows(ds.batch(50)))) == min(count, ROWS)
        assert set(rows(ds.shuffle(1).batch(50))) == set(rows(ds.batch(50)))


def test_filter_and_take_follow_each_other(paths: Paths, cache: str) -> None:
    few = whole(paths, 2).filter(is_even).take(10)
    assert few.rows == 10 and all(row % 2 == 0 for row in rows(few.batch(4)))
    none_left = whole(paths).take(0).batch(4)
    with pytest.raises(InputError, match="must leave a row"):
        list(none_left)


def test_each_pass_of_repeat_is_an_epoch_of_the_data(paths: Paths, cache: str) -> None:
    ds = whole(paths, label=None).shuffle(1).batch(300)
    twice = ds.repeat(2)
    assert (twice.passes, twice.num_steps, len(twice), len(ds)) == (2, 4, 8, 4)
    found = [batch.tolist() for batch in twice]
    expected = [batch.data.tolist() for epoch in range(2) for batch in ds.shard_batches(0, epoch)]
    assert found == expected
    assert next(batch.tolist() for batch in twice) == next(iter(ds.shard_batches(0, 2))).data.tolist()
    assert ds.repeat(2).repeat(3).passes == 6
    endless = ds.repeat()
    assert endless.passes is None
    with pytest.raises(TypeError, match="has no end"):
        len(endless)
    iterator = iter(endless)
    assert len([next(iterator) for _ in range(9)]) == 9


def test_what_cannot_be_chosen_is_refused(paths: Paths, cache: str) -> None:
    ds = whole(paths)
    for wrong in (ds.shuffle(1), ds.batch(5)):
        with pytest.raises(InputError, match="before shuffle and batch"):
            wrong.take(3)
        with pytest.raises(InputError, match="before shuffle and batch"):
            wrong.filter(is_even)
    for call in (lambda: ds.take(-1), lambda: ds.take(True), lambda: ds.repeat(0), lambda: ds.filter(3)):  # type: ignore[arg-type]
        with pytest.raises(InputError, match="Received"):
            call()
    for predicate in (lambda ids, label: ids, lambda ids, label: ids[:1] > 0):
        with pytest.raises(InputError, match="one bool per row"):
            rows(ds.filter(predicate).batch(8))


def test_a_dataset_says_what_was_chosen(paths: Paths, cache: str) -> None:
    text = repr(whole(paths).filter(is_even).take(5).batch(2).repeat(3))
    assert ".filter(...).take(...).batch(2).repeat(3)" in text


def test_the_caches_name_is_the_jobs(paths: Paths, cache: str, tmp_path: Path) -> None:
    here = context(paths)
    with pytest.raises(InputError, match="Received: a process outside a job"):
        dataset(context=here)
    assert dataset(context=context(paths, cache="a")).cache.name == "a"


def test_rows_are_those_of_text_too(paths: Paths, cache: str) -> None:
    ds = dataset("a", features="name", label=None, context=context(paths))
    left = ds.filter(lambda names: np.array([name.endswith("7") for name in names])).batch(100)
    assert all(name.endswith("7") for batch in left for name in batch) and left.rows == ROWS // 10


def test_rows_of_different_lengths_are_filled_up(paths: Paths, cache: str) -> None:
    def numbers(names: Any) -> Any:
        found = np.empty(len(names), object)
        found[:] = [list(range(len(name) - 4)) for name in names]
        return found

    ds = dataset("a", features="name", label=None, context=context(paths)).map(numbers)
    padded = ds.batch(100, pad=-1, length=4)
    assert padded.element_spec.shape == (None, 4)
    seen = np.concatenate(list(padded))
    assert seen.shape == (ROWS, 4) and seen.dtype == np.int64
    assert sorted({tuple(row) for row in seen.tolist()}) == [(0, -1, -1, -1), (0, 1, -1, -1), (0, 1, 2, -1)]
    words = ds.map(lambda found: np.array([np.array(["w"] * len(row)) for row in found], object))
    with pytest.raises(InputError, match="at most length=2 values"):
        list(ds.batch(100, pad=-1, length=2))
    with pytest.raises(InputError, match="pad and length go together"):
        ds.batch(100, pad=-1)
    same = ds.map(lambda found: np.array([[1, 2]] * len(found), object)).batch(7, pad=0, length=3)
    assert next(iter(same)).tolist() == [[1, 2, 0]] * 7 and same.element_spec.dtype == np.int64
    none = ds.map(lambda found: np.array([*([[]] * (len(found) - 1)), [5, 6, 7]], object))
    assert none.batch(ROWS, pad=0, length=3).element_spec.dtype == np.int64
    text = next(iter(words.batch(5, pad="", length=3)))
    assert text.shape == (5, 3) and text.dtype == object and set(text.ravel()) <= {"w", ""}
