"""A hybrid replica exchanges dense floats, and pushes rows once a step has succeeded."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import insitu
from insitu.train import HybridStrategy
from insitu.train.parameter_server.hybrid import HybridReplica
from insitu.train.parameter_server.step import LossScale
from insitu.train.replica import LossCounts, Span


class Variable:
    """A variable of a replica; `rows` says whether it holds rows of a table."""

    trainable, dtype = True, "float32"

    def __init__(self, shape: tuple[int, ...], *, rows: bool = False) -> None:
        self.shape, self.insitu_rows = shape, rows
        self.assigned: list[Any] = []

    def assign(self, value: Any) -> None:
        self.assigned.append(value.tolist())


class Inner:
    """A replica of a dense variable of two elements, rows of one, and a dense one of one."""

    floats_size, floats_dtype, train_record_size, test_record_size = 4, np.dtype("float32"), 2, 2
    copy_out = staticmethod(np.copyto)
    seeds_size, plan_number = 0, 7

    def __init__(self) -> None:
        self.rows = Variable((1, 1), rows=True)
        self.dense = Variable((2,)), Variable((1,))
        self.applied: list[Any] = []

    def float_spans(self) -> Any:
        first, last = self.dense
        return [(first, Span(0, 2, (2,))), (self.rows, Span(2, 3, (1, 1))), (last, Span(3, 4, (1,)))]

    def gradient(self, shard: int, data: Any, floats: Any, record: Any) -> None:
        floats[:] = data * np.array([1, 2, 3, 4])
        record[:] = 5, 0

    def needs_totals(self, *, training: bool) -> bool:
        return training

    def count_losses(self, shard: int, data: Any, *, training: bool) -> Any:
        return LossCounts(np.zeros(1) if data is None else np.array([np.sum(data)]), [])

    def apply(self, floats: Any, records: Any) -> Any:
        self.assign(floats)
        return {"loss": 1.0}

    def assign(self, floats: Any) -> None:
        self.applied.append(floats.tolist())

    def evaluate(self, shard: int, data: Any, record: Any) -> None:
        record[:] = len(data), 0

    def merge(self, records: Any) -> Any:
        return {"rows": float(records[0, 0])}

    def predict(self, data: Any) -> Any:
        return np.asarray(data)


class Session:
    shards = (0, 1)

    def __init__(self) -> None:
        self.pushed: list[Any] = []
        self.waited = 0

    def locate_table_rows(self, spans: Any) -> None:
        self.located = len(spans)

    def push_rows_of(self, pushes: Any) -> Any:
        self.pushed.append({push.shard: (push.rows, push.floats.tolist()) for push in pushes})
        return [SimpleNamespace(result=self._wait)]

    def _wait(self) -> str:
        self.waited += 1
        return "applied"


class Lookup:
    def __init__(self) -> None:
        self.created: list[bool] = []

    def pull(self, data: Any, *, create: bool = True) -> Any:
        self.created.append(create)
        return SimpleNamespace(data=data)

    def rows_loaded(self, batch: Any) -> Any:
        return nullcontext()

    def by_row_index(self) -> Any:
        return nullcontext()

    def pieces(self, data: Any) -> Any:
        return [data[:1], data[1:]]


@pytest.fixture
def parts() -> Any:
    inner, session, lookup = Inner(), Session(), Lookup()
    scale = LossScale(keras.optimizers.SGD(loss_scale_factor=2.0))
    return HybridReplica(inner, session, lookup, scale), inner, session, lookup  # type: ignore[arg-type]


def test_only_dense_floats_are_exchanged(parts: Any) -> None:
    replica, inner, session, _ = parts
    assert replica.floats_size == 3 and session.located == 3
    assert replica.float_spans() == [
        (inner.dense[0], Span(0, 2, (2,))),
        (inner.dense[1], Span(2, 3, (1,))),
    ]
    floats, record = np.zeros(3, "float32"), np.zeros(2)
    replica.gradient(1, 4.0, floats, record)
    assert floats.tolist() == [4, 8, 16] and record[0] == 5
    assert inner.rows.assigned == [[[0.0]]]  # replicas are equal between steps


def test_rows_are_pushed_behind_the_update_and_once_however_often_it_was_computed(parts: Any) -> None:
    replica, inner, session, _ = parts
    floats, records = np.zeros(3, "float32"), np.zeros((2, 2))
    for _ in range(2):
        replica.gradient(1, 4.0, floats, records[1])
    assert session.pushed == []
    assert replica.apply(np.array([1, 2, 3], "float32"), records) == {"loss": 1.0}
    assert inner.applied == [[1, 2, 0, 3]]
    ((pushed),) = session.pushed
    assert pushed[1] == (5, [2, 4, 6, 8])  # without the loss' scale
    assert pushed[0][0] == 0  # numbers of pushes have no gap
    replica.apply(np.zeros(3, "float32"), records)
    assert session.pushed[1][1][0] == 0 and session.waited == 1
    replica.wait_for_pushes()
    replica.wait_for_pushes()
    assert session.waited == 2


def test_a_gradient_that_overflows_pushes_no_rows() -> None:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0)
    optimizer.build([keras.Variable(np.zeros(2, "float32"))])
    session = Session()
    replica = HybridReplica(Inner(), session, Lookup(), LossScale(optimizer))  # type: ignore[arg-type]
    replica.gradient(0, np.inf, np.zeros(3, "float32"), np.zeros(2))
    replica.apply(np.zeros(3, "float32"), np.zeros((2, 2)))
    assert [rows for rows, _ in session.pushed[0].values()] == [0, 0]


def test_rows_that_are_only_read_are_not_created(parts: Any) -> None:
    replica, inner, _, lookup = parts
    record = np.zeros(2)
    replica.evaluate(0, [1, 2], record)
    assert replica.merge(record[None]) == {"rows": 2.0}
    assert replica.predict([1, 2, 3]).tolist() == [1, 2, 3]
    assert lookup.created == [False] * 3 and len(inner.rows.assigned) == 2


def test_losses_are_counted_with_the_rows_of_the_batch(parts: Any) -> None:
    replica, inner, _, lookup = parts
    assert replica.needs_totals(training=True) and not replica.needs_totals(training=False)
    assert replica.count_losses(0, [1, 2], training=True).totals.tolist() == [3]
    assert replica.count_losses(0, [1, 2], training=False).totals.tolist() == [3]
    assert replica.count_losses(0, None, training=True).totals.tolist() == [0]
    assert lookup.created == [True, False] and len(inner.rows.assigned) == 2
    assert replica.plan_number == 7


def test_values_are_assigned_around_the_rows(parts: Any) -> None:
    replica, inner, *_ = parts
    replica.assign(np.array([7, 8, 9], "float32"))
    assert inner.applied == [[7, 8, 0, 9]]
    with pytest.raises(NotImplementedError):
        replica.load(np.zeros(3, "float32"), np.zeros((2, 2)))


def test_a_task_without_rows_in_its_first_step_finds_out_what_a_step_logs() -> None:
    strategy = HybridStrategy()
    with strategy.scope():
        keys = keras.Input((2,), dtype="int32")
        rows = keras.layers.Flatten()(insitu.layers.Embedding(2, name="table")(keys))
        model = keras.Model(keys, keras.layers.Dense(1)(rows))
        model.compile("sgd", "mse")
    model.fit(np.arange(16, dtype="int32").reshape(8, 2), np.ones((8, 1)), batch_size=8, verbose=0)
    (replica,) = strategy._replicas
    inner: Any = replica._inner
    for training in (True, False):
        inner._logs = {True: None, False: None}
        inner._forget_traces()
        replica.find_out(training=training)
        found = inner._logs[training]
        assert found is not None or keras.backend.backend() == "jax"  # which doesn't trace it again
