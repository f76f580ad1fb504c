"""Steps: every row of the data once an epoch, in the shard where it belongs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import InputError, TrainingError
from insitu.train.fit.arrays import ArraySource, DrawnOrder
from insitu.train.fit.feed import StreamFeed
from insitu.train.fit.streams import Reader, Source

ORDER = DrawnOrder(3, script_seed=0)


class Sizes(Source):
    """Batches of so many rows each, one iteration after the other."""

    num_steps = None

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def _batches(self) -> Iterator[Any]:
        start = 0
        for size in self.sizes:
            yield (np.arange(start, start + size),)
            start += size

    def peek(self) -> Any:
        return next(self._batches())

    def begin(self) -> Reader:
        return lambda epoch, start: self._batches()


class Batches(Source):
    """These batches, in one iteration."""

    num_steps = None

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def peek(self) -> Any:
        return self.batches[0]

    def begin(self) -> Reader:
        return lambda epoch, start: iter(self.batches[start:])


def rows_by_shard(
    rows: int, batch: int, num_shards: int, *, shuffle: bool, epoch: int = 0
) -> list[list[int]]:
    source = ArraySource((np.arange(rows),), batch, shuffle, ORDER)
    feed = StreamFeed(source, range(num_shards), num_shards)
    seen: list[list[int]] = [[] for _ in range(num_shards)]
    for step in feed.steps(epoch, 0):
        for part in step.parts:
            assert part.rows == (0 if part.data is None else len(part.data[0]))
            if part.data is not None:
                seen[part.shard] += part.data[0].tolist()
    return seen


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 5), st.booleans())
def test_every_row_once(rows, batch, num_shards, shuffle):
    seen = rows_by_shard(rows, batch, num_shards, shuffle=shuffle)
    assert sorted(row for shard in seen for row in shard) == list(range(rows))


def test_a_shard_gets_the_same_rows_whoever_hosts_it():
    alone = rows_by_shard(50, 8, 2, shuffle=True, epoch=4)
    source = ArraySource((np.arange(50),), 8, True, ORDER)
    for shard in (0, 1):
        feed = StreamFeed(source, [shard], 2)
        parts = [step.parts[0] for step in feed.steps(4, 0)]
        assert [r for p in parts if p.data is not None for r in p.data[0].tolist()] == alone[shard]


def test_any_batch_may_leave_replicas_without_rows():
    feed = StreamFeed(Sizes(3, 1, 2), (0, 1, 2), 3)
    assert len(feed.example()[0]) == 1
    rows = [[part.rows for part in step.parts] for step in feed.steps(0, 0)]
    assert rows == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
    with pytest.raises(InputError, match="at least one row"):
        StreamFeed(Sizes(0, 2), (0,), 3).example()


def test_the_step_under_way_is_cut_again_for_other_shards():
    feed = StreamFeed(Sizes(4, 4, 4), (0,), 2)
    steps = feed.begin()(0, 0)
    assert next(steps).parts[0].data[0].tolist() == [0, 1]
    assert next(steps).parts[0].data[0].tolist() == [4, 5]
    feed.assign_shards((0, 1))
    assert [part.data[0].tolist() for part in feed.step_at(0, 1).parts] == [[4, 5], [6, 7]]
    assert [part.data[0].tolist() for part in next(steps).parts] == [[8, 9], [10, 11]]
    with pytest.raises(TrainingError, match="step 0 of epoch 0"):
        feed.step_at(0, 0)


def test_arrays_can_be_read_at_any_step():
    feed = StreamFeed(ArraySource((np.arange(10),), 4), (0,), 1)
    assert feed.step_at(3, 2).parts[0].data[0].tolist() == [8, 9]


def test_optional_inputs_of_none_have_no_rows():
    source = ArraySource(({"a": np.arange(4), "b": None},), 4)
    feed = StreamFeed(source, (0, 1), 2)
    assert feed.example() == ({"a": np.zeros(1, int), "b": None},)
    (step,) = feed.steps(0, 0)
    assert [part.rows for part in step.parts] == [2, 2]
    assert step.parts[1].data[0]["b"] is None and step.parts[1].data[0]["a"].tolist() == [2, 3]


@pytest.mark.parametrize("kind", ["scipy", "jax", "tensorflow"])
def test_sparse_batches_become_dense_on_any_backend(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a backend that knows its own tensors only.
    monkeypatch.setattr(keras.ops, "convert_to_numpy", np.array)
    dense = np.array([[0.0, 1.0], [2.0, 0.0]], "float32")
    if kind == "scipy":
        sparse: Any = pytest.importorskip("scipy.sparse").coo_matrix(dense)
    elif kind == "jax":
        sparse = pytest.importorskip("jax.experimental.sparse").BCOO.fromdense(dense)
    else:
        sparse = pytest.importorskip("tensorflow").sparse.from_dense(dense)
    (example,) = StreamFeed(Batches((sparse,)), [0], 1).steps(0, 0)
    np.testing.assert_array_equal(example.parts[0].data[0], dense)


@pytest.mark.parametrize("shared", [np.eye(3), np.float32(0.5)])
def test_arrays_without_rows_of_their_own_can_not_be_cut(shared: Any) -> None:
    rows, both = (np.zeros((4, 2)),), (np.zeros((4, 2)), shared)
    whole = Batches(both)
    assert [part.data for step in StreamFeed(whole, (0,), 1).steps(0, 0) for part in step.parts] == [both]
    for source in (whole, Batches(rows, both)):  # the first batch, or a later one
        feed = StreamFeed(source, (0,), 2)
        with pytest.raises(
            InputError, match=r"as many rows.*of the shapes \(4, 2\), \(.*Repeat what all rows"
        ):
            [feed.example(), *feed.steps(0, 0)]


def test_keras_sees_strings_as_tensors():
    source = ArraySource((np.array(["a", "b", "c"], object),), 2)
    feed = StreamFeed(source, (0,), 1)
    assert keras.backend.standardize_dtype(feed.example()[0].dtype) == "string"


def test_each_part_tells_which_global_batch_it_is_of():
    feed = StreamFeed(Sizes(4, 2), (0, 1), 2, None, lambda batch: 10 + len(batch[0]))
    assert [[part.fingerprint for part in step.parts] for step in feed.steps(0, 0)] == [[14, 14], [12, 12]]
