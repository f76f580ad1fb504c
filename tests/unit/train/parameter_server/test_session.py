"""A worker's session with a server in its own process: steps, fits, and what both may not mix up."""

from __future__ import annotations

import atexit
import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from models import in_shards

from insitu.base.errors import ParameterError, ServerStalled, TrainingError
from insitu.parameters import ConsistencyPolicy
from insitu.train.parameter_server import session as session_module
from insitu.train.parameter_server.server_task import ServerConfig
from insitu.train.parameter_server.session import ParameterServerSession, ShardPush
from insitu.train.replica import Span

RATE = 0.5
MIN_BYTES = 1 << 20


class Replica:
    """One trainable variable of three elements."""

    floats_size, floats_dtype = 3, np.dtype("float32")

    def __init__(self, name: str = "dense/kernel") -> None:
        self.variable = SimpleNamespace(
            path=name, trainable=True, numpy=lambda: np.array([1, 2, 3], "float32"), insitu_rows=False
        )
        self.assigned: list[Any] = []

    def float_spans(self) -> Any:
        return [(self.variable, Span(0, 3, (3,)))]

    def assign(self, values: Any) -> None:
        self.assigned.append(values.tolist())


MODEL: Any = SimpleNamespace(non_trainable_variables=[], jit_compile=False)


@pytest.fixture
def make() -> Iterator[Callable[..., ParameterServerSession]]:
    """Makes sessions of a process with so many shards."""
    made = []

    def session(shards: int = 1, **changes: Any) -> ParameterServerSession:
        context = dataclasses.replace(in_shards(tuple(range(shards)), shards), **changes)
        made.append(ParameterServerSession(context, ServerConfig(ConsistencyPolicy("async", shards), "clip")))
        return made[-1]

    yield session
    for one in made:
        atexit.unregister(one._end)
        one.close()


def define(session: ParameterServerSession, replica: Any, **options: Any) -> Any:
    optimizer = keras.optimizers.SGD(RATE, **options)
    session.define(MODEL, optimizer, replica, exact=False, min_piece_bytes=MIN_BYTES)
    return replica


def push(session: ParameterServerSession, value: float, shard: int = 0, rows: int = 1) -> ShardPush:
    floats = session.gradient_buffer(shard)
    floats[:] = value
    return ShardPush(shard, rows, floats, None)


def test_a_replica_gets_the_values_of_the_servers(make: Any) -> None:
    session = make()
    assert define(session, Replica()).assigned == [[1, 2, 3]]
    session.exchange([push(session, 2.0)])
    assert define(session, Replica()).assigned == [[0, 1, 2]]  # another step of the same model


def test_a_step_over_other_variables_is_refused_by_name(make: Any) -> None:
    session = make()
    define(session, Replica())
    with pytest.raises(TrainingError, match=r"a step that differs in dense/kernel, other/kernel\. Train"):
        define(session, Replica("other/kernel"))


def test_a_step_pushes_each_shard_and_pulls_once(make: Any) -> None:
    session = make(2)
    define(session, Replica())
    values = session.exchange([push(session, 2.0, 0), push(session, 4.0, 1)])
    assert values.tolist() == [-2, -1, 0] and values is session.values
    assert (session.sequence, session.applied()) == (1, 1) and session.left_out == frozenset()


def test_a_step_that_the_servers_have_is_not_pushed_again(make: Any) -> None:
    session = make()
    define(session, Replica())
    session.exchange([push(session, 2.0)])
    session.begin(0, session.applied())  # as a worker that was restarted
    assert session.exchange([push(session, 100.0)]).tolist() == [0, 1, 2]
    assert session.exchange([push(session, 2.0)]).tolist() == [-1, 0, 1]


def test_a_gradient_that_overflowed_is_left_out(make: Any) -> None:
    session = make(2)
    define(session, Replica())
    overflowed = dataclasses.replace(push(session, 1.0, 1, rows=0), overflowed=True)
    session.exchange([push(session, 2.0, 0), overflowed])
    assert session.left_out == {1}
    session.exchange([push(session, 2.0, 0), push(session, 2.0, 1)])
    assert session.left_out == frozenset()


def test_a_fit_ends_with_the_averages_that_the_optimizer_keeps(make: Any) -> None:
    session = make()
    define(session, Replica(), use_ema=True, ema_momentum=0.5)
    for _ in range(2):
        last = session.exchange([push(session, 2.0)]).copy()
    session.finish(0, waiting=lambda: None)
    assert (session.pull() != last).any()
    session.finish(0, waiting=lambda: None)  # as a worker that comes back late


def test_a_fit_waits_for_all_shards_and_names_those_that_do_not_come(make: Any) -> None:
    session = make(1, num_shards=3, stall_timeout=0.2)
    define(session, Replica())
    waited: list[int] = []
    with pytest.raises(ServerStalled, match=r"no end from shards \[1, 2\]\. Read the logs"):
        session.finish(0, waiting=lambda: waited.append(1))
    assert waited


def test_saved_rows_are_loaded_by_the_chief_once(make: Any) -> None:
    session = make()
    layer: Any = SimpleNamespace(
        name="words", output_dim=2, embeddings_initializer=keras.initializers.Zeros(), eviction=None
    )
    table = session.table(layer, keras.optimizers.SGD(RATE))
    keys = np.array([7, 3], np.int64)
    table.begin(keys, np.array([[7, 7], [3, 3]], "float32"))
    table.begin(keys, np.zeros((2, 2), "float32"))  # a restarted worker finds the trained rows
    assert table.pull(keys).tolist() == [[7, 7], [3, 3]]
    found, rows = table.read_all()
    assert found.tolist() == [3, 7] and rows.tolist() == [[3, 3], [7, 7]]
    table.assign(keys[:1], np.ones((1, 2), "float32"))
    assert table.pull(keys[:1]).tolist() == [[1, 1]]


def test_one_checkpoint_is_written_at_a_time_and_a_failure_ends_no_training(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session, begun = make(), []
    futures = [SimpleNamespace(done=lambda: False, result=lambda: None)]

    def checkpoint(directory: Path) -> Any:
        begun.append(directory)
        if not futures:
            raise ParameterError("a checkpoint is under way")
        return futures.pop()

    session._client.close()
    monkeypatch.setattr(session, "_client", SimpleNamespace(checkpoint=checkpoint, close=lambda: None))
    session.checkpoint(tmp_path)
    session.checkpoint(tmp_path)
    assert begun == [tmp_path]
    session.wait_for_checkpoint()
    with caplog.at_level(logging.WARNING, "insitu"):
        session.checkpoint(tmp_path)
    assert "can't begin a checkpoint. Training continues" in caplog.text


def test_a_process_that_ends_lets_the_others_go_on(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[int] = []

    def finish(shard: int) -> Any:
        finished.append(shard)
        return SimpleNamespace(result=lambda timeout: None)

    for leaves, expected in ((False, []), (True, [0, 1])):
        session = make(2)
        limits: list[float] = []
        requests = SimpleNamespace(limit_search=limits.append)
        client = SimpleNamespace(finish=finish, close=lambda: None, requests=requests)
        session._client.close()
        monkeypatch.setattr(session, "_client", client)
        if leaves:
            session.leave_at_exit()
        session._end()
        assert finished == expected and bool(limits) == leaves


def test_a_process_does_not_wait_at_its_end_for_servers_that_have_ended(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_EXIT_TIMEOUT", 0.2)
    session = make()
    define(session, Replica())
    session.leave_at_exit()
    _, server = session._ending.peek()[2]
    server.stop()
    session._end()
