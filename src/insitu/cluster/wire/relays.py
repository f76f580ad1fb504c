"""Commands of insitu that the head runs for a caller that has only the cluster's address and token."""

from __future__ import annotations

import base64
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from insitu.base.errors import ClusterError
from insitu.base.paths import HOME_ENV, Paths
from insitu.base.typed import convert
from insitu.cluster.wire.messages import Message

_Argument = Annotated[str, Meta(max_length=1 << 16, pattern=r"^[^\0]*\Z")]
_Arguments = Annotated[list[_Argument], Meta(min_length=1, max_length=1 << 14)]
_Columns = Annotated[int, Meta(ge=0, lt=10_000)]
_Terminals = list[Literal["out", "err"]]
RELAYED = (
    *("import", "caches", "delete", "rebalance", "scrub", "repair", "quota"),
    *("start", "resume", "scale", "stop", "ps", "attach", "logs", "describe", "top", "prune"),
    *("nodes", "drain", "down"),
)
"""What may be asked from elsewhere. Left out is what serves, or writes files, where it runs."""
FOR_CALLER = "--for-caller"
"""With it a command of insitu reads what its caller sends from the standard input. Its value has those of the
caller's streams that are terminals, or `none`."""
CLUSTER_ENV = "INSITU_CLUSTER"
TOKEN_FILE_ENV = "INSITU_TOKEN_FILE"
MAX_RELAYS = 32
PART_BYTES = 1 << 18
"""Bytes that the caller sends at a time."""
_WINDOW = 8
"""Parts that may be on their way to a command, or wait until it reads them."""
_MAX_UNSENT_BYTES = 1 << 20
"""While so much waits to be read by the caller, the command's output isn't read."""


class Relay:
    """One command that runs."""

    def __init__(self, paths: Paths, message: Message) -> None:
        """Start it. Raises ClusterError for what isn't relayed, and where no process can be started."""
        arguments = convert("arguments", message.get("arguments"), _Arguments, ClusterError)
        columns = convert("columns", message.get("columns"), _Columns, ClusterError)
        terminals = convert("terminals", message.get("terminals"), _Terminals, ClusterError)
        #: The command's name.
        self.name = arguments[0]
        if self.name not in RELAYED:
            raise ClusterError(
                f"The head runs {', '.join(RELAYED)} for others. Received: {self.name!r:.100}. Run it on the "
                f"machine of the head"
            )
        environment = {
            name: value for name, value in os.environ.items() if name not in (CLUSTER_ENV, TOKEN_FILE_ENV)
        }
        environment |= {HOME_ENV: str(paths.home), "COLUMNS": str(columns), "TERM": "xterm"}
        shown = ",".join(terminals) or "none"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "insitu", f"{FOR_CALLER}={shown}", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(
                f"The head can't start a process: {error}. Check memory and ulimit -u"
            ) from error
        self._ended = os.pidfd_open(self._process.pid)
        #: Parts that the caller has sent and the command hasn't read; b"" is the end.
        self._input: deque[bytes] = deque()
        #: How many parts the caller may send that it hasn't sent yet.
        self._asked = 0
        #: The streams that may still say something, by descriptor.
        self._streams: dict[int, str] = {}
        for name, stream in (("err", self._process.stderr), ("out", self._process.stdout)):
            if stream is not None:
                self._streams[stream.fileno()] = name
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)

    def list_descriptors(self, unsent_bytes: int) -> dict[int, int]:
        """Return what to wait for, with the events; nothing while the caller doesn't read."""
        if unsent_bytes > _MAX_UNSENT_BYTES:
            return {}
        found = dict.fromkeys((*self._streams, self._ended), select.POLLIN)
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed and (self._input or not self._asked):
            found[stdin.fileno()] = select.POLLOUT
        return found

    def take_input(self, message: Message) -> None:
        """Take a part that the caller has sent. Raises ClusterError for one that it wasn't asked for."""
        if not self._asked or (self._input and not self._input[-1]):
            raise ClusterError("A caller sends what it is asked for. Received: another part")
        self._asked -= 1
        self._input.append(_decode(message.get("data")))

    def interrupt(self) -> None:
        """Have the command end as by Ctrl-C."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)

    def advance(self) -> list[Message]:
        """Return what there is to send: output, questions for input, and at last the exit code."""
        code = self._process.poll()  # first: what is written before the end is read after it
        messages = [message for descriptor in list(self._streams) for message in self._read(descriptor)]
        if code is None or messages:
            return [*messages, *self._feed()]
        return [{"do": "ended", "code": code if code >= 0 else 128 - code}]

    def _feed(self) -> list[Message]:
        """Give the command what has come, and ask for more."""
        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            return []
        try:
            while self._input and self._input[0]:
                left = self._input[0][os.write(stdin.fileno(), self._input[0]) :]
                if left:
                    self._input[0] = left
                else:
                    self._input.popleft()
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._input.clear()
            self._input.append(b"")
        if self._input and not self._input[0]:
            stdin.close()
            return []
        more = _WINDOW - self._asked - len(self._input)
        self._asked += more
        return [{"do": "more"}] * more

    def _read(self, descriptor: int) -> list[Message]:
        try:
            data = os.read(descriptor, PART_BYTES)
        except BlockingIOError:
            return []
        if not data:
            del self._streams[descriptor]
            return []
        return [{**make_input(data), "do": "output", "stream": self._streams[descriptor]}]

    def close(self) -> None:
        """End the command, where it runs."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        os.close(self._ended)


class Relays:
    """The commands that run for callers, by the number of their connection."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._running: dict[int, Relay] = {}

    def handle(self, number: int, message: Message) -> None:
        """Start a command for a caller, interrupt it, or take input for it. Raises ClusterError if that can't
        be."""
        relay = self._running.get(number)
        match message.get("do"):
            case "run" if relay is None and len(self._running) < MAX_RELAYS:
                self._running[number] = Relay(self._paths, message)
            case "run":
                raise ClusterError(
                    f"The head runs {MAX_RELAYS} commands at a time. Received: another. Try later"
                )
            case "input" if relay is not None:
                relay.take_input(message)
            case "interrupt" if relay is not None:
                relay.interrupt()

    def is_running(self, name: str) -> bool:
        """Return whether a command of this name runs."""
        return any(relay.name == name for relay in self._running.values())

    def list_descriptors(self, count_unsent: Callable[[int], int]) -> dict[int, tuple[int, int]]:
        """Return what to wait for, with the caller that it is for and the events. `count_unsent` says what
        waits for one."""
        return {
            descriptor: (number, events)
            for number, relay in self._running.items()
            for descriptor, events in relay.list_descriptors(count_unsent(number)).items()
        }

    def advance(self, number: int) -> list[Message]:
        """Return what there is to send to a caller."""
        relay = self._running.get(number)
        messages = [] if relay is None else relay.advance()
        if messages and messages[-1]["do"] == "ended":
            self.end(number)
        return messages

    def end(self, number: int) -> None:
        """End the command of a caller, where one runs."""
        relay = self._running.pop(number, None)
        if relay is not None:
            relay.close()

    def close(self) -> None:
        """End all."""
        for number in list(self._running):
            self.end(number)


def make_request(arguments: Sequence[str], columns: int, terminals: Sequence[str]) -> Message:
    """Return the message that asks the head to run a command. `terminals`: "out", "err" if they are some."""
    return {"do": "run", "arguments": [*arguments], "columns": columns, "terminals": [*terminals]}


def make_input(data: bytes) -> Message:
    """Return the message with a part of what a command reads; b"" is the end."""
    return {"do": "input", "data": base64.b64encode(data).decode()}


def parse_output(message: Message) -> tuple[str, bytes]:
    """Return the stream, "out" or "err", and the bytes that the command has written there."""
    stream = message.get("stream")
    if stream not in ("out", "err"):
        raise ClusterError(f"A command writes to out and err. Received: {stream!r:.100}")
    return str(stream), _decode(message.get("data"))


def _decode(data: Any) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (TypeError, ValueError):
        raise ClusterError(f"What is passed on must be base64. Received: {data!r:.100}") from None
