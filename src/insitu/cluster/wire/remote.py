"""Has the head run a command, on behalf of a machine that has only the cluster's address and token."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable, Mapping

from insitu.base.errors import ClusterError
from insitu.cluster.engines import Channel, ChannelClosed
from insitu.cluster.wire.connection import dial_head
from insitu.cluster.wire.relays import make_request, parse_output

Write = Callable[[str, bytes], None]


def run_at_head(
    address: str,
    token: str,
    arguments: list[str],
    columns: int,
    write: Write,
    given: Mapping[str, str | None] | None = None,
) -> int:
    """Run a command of insitu on the machine of the head, as long as this process lives.

    `write` is given the stream, "out" or "err", and the bytes that come there. `given`: variables of this
    shell for it. Returns the exit code. Raises
    ClusterError where the head can't be asked, or the connection to it is lost.
    """
    connection = dial_head(address, token, "client")
    with contextlib.closing(connection.channel) as channel:
        try:
            channel.send(make_request(arguments, columns, given))
            while True:
                code = _receive(channel, write)
                if code is not None:
                    return code
        except ChannelClosed:
            raise ClusterError(
                f"The head at {address} has ended the connection. `insitu nodes` on its machine shows "
                f"whether it runs"
            ) from None


def _receive(channel: Channel, write: Write) -> int | None:
    """Wait for what comes. Return the exit code once the command has ended."""
    waiting = not channel.flush()
    poll = select.poll()
    poll.register(channel, select.POLLIN | (select.POLLOUT if waiting else 0))
    poll.poll()
    for message in channel.receive():
        match message.get("do"):
            case "output":
                write(*parse_output(message))
            case "ended" if isinstance(message.get("code"), int):
                return int(message["code"])
            case _ if "error" in message:
                raise ClusterError(str(message["error"]))
            case other:
                raise ClusterError(f"The head must send what a command says. Received: {other!r:.100}")
    return None
