"""Having the head run a command. tests/process/test_remote_commands.py has a head."""

from __future__ import annotations

import base64
import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from insitu.base.errors import ClusterError
from insitu.cluster.engines import Channel
from insitu.cluster.engines.channel import open_channel_pair
from insitu.cluster.wire import remote
from insitu.cluster.wire.connection import HeadConnection
from insitu.cluster.wire.relays import make_request

Ask = Callable[..., Any]


def say(text: bytes, stream: str = "out") -> dict[str, Any]:
    return {"do": "output", "stream": stream, "data": base64.b64encode(text).decode()}


def wait(channel: Channel) -> list[dict[str, Any]]:
    assert select.select([channel], [], [], 60)[0]
    return channel.receive()


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """Run a command at a head that does what a function says with its end of the connection."""
    threads: list[threading.Thread] = []

    def run(serve: Callable[[Channel], None], given: tuple[bytes, ...] = ()) -> Any:
        here, there = open_channel_pair()

        def serve_and_close() -> None:
            with contextlib.closing(there):
                serve(there)

        monkeypatch.setattr(remote, "dial_head", lambda *_: HeadConnection(here, {}, ""))
        threads.append(threading.Thread(target=serve_and_close))
        threads[-1].start()
        said: list[tuple[str, bytes]] = []
        request = make_request(["ps"], 80, [])
        code = remote.run_at_head("h:1", "t", request, lambda *each: said.append(each), iter(given))
        return said, code

    yield run
    for thread in threads:
        thread.join(60)


def test_what_a_command_says_comes_with_its_code(ask: Ask) -> None:
    def serve(channel: Channel) -> None:
        assert wait(channel) == [{"do": "run", "arguments": ["ps"], "columns": 80, "terminals": []}]
        for message in (say(b"a"), say(b"b", "err"), {"do": "ended", "code": 3}):
            channel.send(message)

    assert ask(serve) == ([("out", b"a"), ("err", b"b")], 3)


def test_parts_are_sent_as_they_are_asked_for_and_the_end_once(ask: Ask) -> None:
    found: list[bytes] = []

    def serve(channel: Channel) -> None:
        wait(channel)
        for _ in range(5):
            channel.send({"do": "more"})
        while len(found) < 3:
            found.extend(base64.b64decode(each["data"]) for each in wait(channel))
        channel.send({"do": "ended", "code": 0})

    assert ask(serve, (b"first", b"second"))[1] == 0 and found == [b"first", b"second", b""]


def test_an_interrupt_goes_to_the_command(ask: Ask) -> None:
    before = signal.getsignal(signal.SIGINT)

    def serve(channel: Channel) -> None:
        wait(channel)
        os.kill(os.getpid(), signal.SIGINT)
        assert wait(channel) == [{"do": "interrupt"}]
        channel.send(say(b"detached"))
        channel.send({"do": "ended", "code": 130})

    assert ask(serve) == ([("out", b"detached")], 130)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"error": "no room"}, "no room"),
        ({"do": "dance"}, "must send what a command says"),
        ({"do": "ended", "code": "0"}, "must send what a command says"),
        ({"do": "output", "stream": "in"}, "out and err"),
        (None, "has ended the connection"),
    ],
)
def test_what_a_head_must_not_send_is_an_error(ask: Ask, message: Any, words: str) -> None:
    def serve(channel: Channel) -> None:
        wait(channel)
        if message is not None:
            channel.send(message)

    with pytest.raises(ClusterError, match=words):
        ask(serve)
