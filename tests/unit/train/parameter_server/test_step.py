"""A step on servers: what is computed, pushed and loaded, and in which order."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from insitu.base.errors import TrainingError
from insitu.train.elastic import TRAIN, LoopPosition
from insitu.train.parameter_server.model_spec import ClipNorms
from insitu.train.parameter_server.step import LossScale, ServerStep
from insitu.train.replica import NeedsTotals, ShardBatch, Span

POSITION = LoopPosition(0, TRAIN)
WEIGHT = keras.Variable(np.full(2, 5, "float32"))
MOVED = keras.Variable(np.float32(5), trainable=False)


class Replica:
    """Two trainable elements and one of state. A gradient is the sum of the shard's rows, three times."""

    floats_size, floats_dtype, train_record_size, test_record_size = 3, np.dtype("float32"), 2, 2

    def __init__(self) -> None:
        self.copy_out: Any = np.copyto
        self.calls: list[Any] = []

    def watch_weights(self, variables: Any) -> bool:
        return False

    def float_spans(self) -> Any:
        return [(WEIGHT, Span(0, 2, (2,))), (MOVED, Span(2, 3, ()))]

    def gradient(self, shard: int, data: Any, floats: Any, record: Any) -> None:
        self.copy_out(floats, np.full(3, np.sum(data), "float32"))
        record[:] = len(data), 1

    def load(self, values: Any, records: Any) -> Any:
        self.calls.append(("load", values.tolist(), records[:, 0].tolist()))
        return {"loss": float(records[:, 0].sum())}

    def assign(self, values: Any) -> None:
        self.calls.append(("assign", values.tolist()))

    def evaluate(self, shard: int, data: Any, record: Any) -> None:
        record[:] = len(data), sum(data)

    def merge(self, records: Any) -> Any:
        return {"sum": float(records[0, 1])}

    def predict(self, data: Any) -> Any:
        return np.asarray(data) * 2


class Session:
    """Servers whose values are always 5, and which keep what is pushed."""

    rate_variable = None

    def __init__(self) -> None:
        self.buffers = [np.full(3, np.nan, "float32") for _ in range(2)]
        self.values = np.full(3, 5, "float32")
        self.pushed: list[Any] = []

    def gradient_buffer(self, index: int) -> Any:
        return self.buffers[index]

    def exchange(self, pushes: Any, *, rate: Any = None) -> Any:
        self.pushed += [
            (push.shard, push.rows, push.floats.tolist(), push.overflowed, push.finite) for push in pushes
        ]
        return self.values

    def pull(self) -> Any:
        return self.values + 1


class Lookup:
    """No tables: a batch is what was given."""

    def pull(self, data: Any, *, create: bool = True) -> Any:
        return SimpleNamespace(data=data)

    def rows_loaded(self, batch: Any) -> Any:
        return nullcontext()

    def pieces(self, data: Any) -> Any:
        return [data[:2], data[2:]] if len(data) > 2 else [data]


def make(optimizer: Any = None, *, norms: ClipNorms | None = None, clips: bool = False) -> Any:
    replica, session, lookup = Replica(), Session(), Lookup()
    options: Any = {"norms": norms or ClipNorms(), "scale": LossScale(optimizer), "clips": clips}
    step = ServerStep(replica, session, 2, lookup, **options)  # type: ignore[arg-type]
    return step, replica, session


def train(step: Any, *rows: Any) -> tuple[Any, list[str]]:
    places: list[str] = []
    parts = [ShardBatch(shard, len(data), data or None) for shard, data in enumerate(rows)]
    return step.train(POSITION, parts, places.append), places


def test_gradients_are_pushed_and_the_servers_values_loaded() -> None:
    step, replica, session = make()
    logs, places = train(step, [1.0, 2.0], [])
    assert places == ["pull rows", "gradient", "push and pull", "update"]
    assert session.pushed == [(0, 2, [3, 3, 3], False, True), (1, 0, [0, 0, 0], False, False)]
    assert replica.calls == [("load", [5, 5, 5], [2, 0])] and logs == {"loss": 2.0}


def test_a_step_without_rows_takes_the_values_and_repeats_the_logs() -> None:
    step, replica, _ = make()
    train(step, [1.0], [])
    logs, _ = train(step, [], [])
    assert replica.calls[-1] == ("assign", [5, 5, 5]) and logs == {"loss": 1.0}


def test_a_gradient_that_is_not_finite_is_not_said_to_be() -> None:
    step, _, session = make()
    train(step, [np.inf], [1.0])
    assert [finite for *_, finite in session.pushed] == [False, True]


def test_a_loss_that_needs_totals_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    step, replica, _ = make()

    def gradient(*arguments: Any) -> None:
        raise NeedsTotals

    monkeypatch.setattr(replica, "gradient", gradient)
    with pytest.raises(TrainingError, match="divides by something else: the entries that a mask"):
        train(step, [1.0], [])


def test_norms_are_bounded_and_moved_state_is_sent_as_it_is() -> None:
    step, _, session = make(norms=ClipNorms(each=np.sqrt(2.0)))
    train(step, [7.0], [])
    (_, _, floats, _, finite), _ = session.pushed
    np.testing.assert_allclose(floats, [1, 1, 7], rtol=1e-6)
    assert not finite  # it was changed behind the copy, so the session looks itself


def test_state_that_is_not_finite_stays_where_what_is_not_is_clipped() -> None:
    for clips, state in ((True, 5.0), (False, np.nan)):
        step, _, session = make(clips=clips)
        train(step, [np.nan], [])
        np.testing.assert_array_equal(session.pushed[0][2], [np.nan, np.nan, state])


def test_a_gradient_that_overflows_is_not_pushed() -> None:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=4.0)
    optimizer.build([keras.Variable(np.zeros(2, "float32"))])
    step, _, session = make(optimizer)
    train(step, [8.0], [np.inf])
    (_, rows, floats, overflowed, _), second = session.pushed
    assert (rows, floats[:2], overflowed) == (1, [2, 2], False)
    assert (second[1], second[3]) == (0, True)


def test_tests_and_predictions_take_this_tasks_rows_in_pieces() -> None:
    step, _, _ = make()
    assert step.test(POSITION, [ShardBatch(0, 3, [1, 2, 3]), ShardBatch(1, 0, None)]) == {"sum": 3.0}
    outputs = step.predict(POSITION, [ShardBatch(0, 3, [1, 2, 3])], np.zeros((1,), int))
    assert outputs.tolist() == [2, 4, 6]
    assert step.predict(POSITION, [ShardBatch(0, 0, None)], np.zeros((1, 4))).shape == (0, 4)
    assert step.example_output([4]).tolist() == [8]


def test_a_refresh_pulls_into_the_replica() -> None:
    step, replica, _ = make()
    step.refresh()
    assert replica.calls == [("assign", [6, 6, 6])]
