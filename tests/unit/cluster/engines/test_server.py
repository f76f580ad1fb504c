"""The server's side of an engine in another process; `tests/process/test_jobs_engine.py` has the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from readiness import wait_readable

from insitu.base.spec import TaskId
from insitu.cluster.engines.channel import Channel, ChannelClosed, open_channel_pair
from insitu.cluster.engines.engine import Ended, Output
from insitu.cluster.engines.server import MAX_UNSENT_BYTES, EngineServer
from insitu.cluster.engines.wakeup import Wakeup

W0 = TaskId("worker", 0)
PATIENCE = 60.0


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    made = Wakeup()
    yield made
    made.close()


class PrintingEngine:
    """Has 1 MiB of output at each of the first 32 looks, then the end of the task, then nothing."""

    def __init__(self, channel: Channel, wakeup: Wakeup) -> None:
        self._channel = channel
        self._wakeup = wakeup
        self._looks = 0
        self.looks_while_full = 0
        self.is_closed = False

    def wait(self, timeout: float | None) -> list[Output | Ended]:
        self._looks += 1
        self.looks_while_full += self._channel.unsent_bytes >= MAX_UNSENT_BYTES
        if self._looks <= 32:
            return [Output(W0, bytes(1 << 20))]
        if self._looks == 33:
            return [Ended(W0, 0)]
        wait_readable([self._wakeup])
        return []

    def close(self) -> None:
        self.is_closed = True


def test_output_is_left_with_the_tasks_while_the_other_end_does_not_read(wakeup: Wakeup) -> None:
    ours, its = open_channel_pair()
    engine = PrintingEngine(its, wakeup)
    server = threading.Thread(target=EngineServer(engine, its, wakeup).serve)  # type: ignore[arg-type]
    server.start()
    deadline = time.monotonic() + PATIENCE
    while its.unsent_bytes < MAX_UNSENT_BYTES:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    messages: list[dict[str, object]] = []
    while not (messages and "ended" in messages[-1]):
        assert time.monotonic() < deadline
        wait_readable([ours], 1.0)
        messages += ours.receive()
    assert len(messages) == 33 and engine.looks_while_full == 0
    ours.close()
    server.join(PATIENCE)
    assert engine.is_closed and not server.is_alive()
    its.close()


def test_what_is_no_message_closes_a_channel() -> None:
    for garbage in (b"no json\n", b"[1]\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n"):
        ours, its = open_channel_pair()
        ours.send({"first": 1})
        ours._socket.sendall(garbage)
        assert its.receive() == [{"first": 1}]
        with pytest.raises(ChannelClosed):
            its.receive()
        ours.close()
        its.close()


def test_a_line_without_end_closes_a_channel_that_has_a_limit() -> None:
    ours, its = open_channel_pair()
    limited = Channel(its._socket, 1000)
    ours._socket.sendall(b" " * 1001)
    with pytest.raises(ChannelClosed):
        limited.receive()
    ours.close()
    its.close()
