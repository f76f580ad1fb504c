"""Has the head run a command, on behalf of a machine that has only the cluster's address and token."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
from collections.abc import Callable, Iterator

from insitu.base.errors import ClusterError
from insitu.cluster.engines import Channel, ChannelClosed
from insitu.cluster.wire.connection import dial_head
from insitu.cluster.wire.messages import Message
from insitu.cluster.wire.relays import make_input, parse_output

Write = Callable[[str, bytes], None]


def run_at_head(address: str, token: str, request: Message, write: Write, given: Iterator[bytes]) -> int:
    """Run a command of insitu on the machine of the head, as long as this process lives; see `make_request`.

    `write` receives the stream, "out" or "err", and the bytes that come there. `given`: the parts that the
    command reads, of PART_BYTES at most, which are taken as it reads them. Ctrl-C interrupts the command, a
    second one this process. Returns the exit code. Raises ClusterError if the head can't be asked, or the
    connection to it is lost.
    """
    connection = dial_head(address, token, "client")
    with contextlib.closing(connection.channel) as channel, _caught_interrupts() as interrupts:
        try:
            channel.send(request)
            parts = itertools.chain(given, (b"",))
            while (code := _advance(channel, write, parts, interrupts)) is None:
                pass
            return code
        except ChannelClosed:
            raise ClusterError(
                f"The head at {address} has ended the connection. `insitu nodes` on its machine shows "
                f"whether it runs"
            ) from None


@contextlib.contextmanager
def _caught_interrupts() -> Iterator[int]:
    """Yield a descriptor with a byte for each Ctrl-C: none comes in the middle of a message."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def note(*_: object) -> None:
        os.write(writer, b"i")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield reader
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(reader)
        os.close(writer)


def _advance(channel: Channel, write: Write, parts: Iterator[bytes], interrupts: int) -> int | None:
    """Wait for what comes. Return the exit code once the command has ended."""
    waiting = not channel.flush()
    poll = select.poll()
    poll.register(channel, select.POLLIN | (select.POLLOUT if waiting else 0))
    poll.register(interrupts, select.POLLIN)
    if any(descriptor == interrupts for descriptor, _ in poll.poll()):
        os.read(interrupts, 1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        channel.send({"do": "interrupt"})
    while messages := channel.receive():
        for message in messages:
            match message.get("do"):
                case "output":
                    write(*parse_output(message))
                case "more":
                    for part in itertools.islice(parts, 1):
                        channel.send(make_input(part))
                case "ended" if isinstance(message.get("code"), int):
                    return int(message["code"])
                case _ if "error" in message:
                    raise ClusterError(str(message["error"]))
                case other:
                    raise ClusterError(f"The head must send what a command says. Received: {other!r:.100}")
    return None
