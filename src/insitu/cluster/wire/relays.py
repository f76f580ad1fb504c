"""Commands of insitu that the head runs for a caller that has only the cluster's address and token."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from insitu.base.errors import ClusterError
from insitu.base.paths import HOME_ENV, Paths
from insitu.base.typed import convert
from insitu.cluster.wire.messages import Message

_Argument = Annotated[str, Meta(max_length=4096, pattern=r"^[^\0]*\Z")]
_Arguments = Annotated[list[_Argument], Meta(max_length=1024)]
_Columns = Annotated[int, Meta(ge=0, lt=10_000)]
_PREFIX = ("--prefix", "--no-prefix")
RELAYED: Mapping[str, frozenset[str]] = {
    "nodes": frozenset({"--json", "--check"}),
    "caches": frozenset({"--json"}),
    "describe": frozenset({"--json", "--ledger", "--events", "--goodput", "--statistics", "--verify"}),
    "ps": frozenset({"--all", "-a", "--json"}),
    "top": frozenset({"--json", "--once", "--every"}),
    "logs": frozenset({"--follow", "-f", "--attempt", *_PREFIX}),
    "attach": frozenset(_PREFIX),
    "stop": frozenset(),
    "scale": frozenset(),
    "drain": frozenset({"--deadline", "--cancel"}),
    "resume": frozenset({"--detach", "--env", *_PREFIX}),
}
"""What may be asked from outside, and the options of each: what shows caches and jobs, and what controls
jobs. Nothing that starts a program of the caller's choice, nothing that reads or writes files that the caller
names, on this machine or on the caller's, and nothing that deletes."""
_HELP = frozenset({"--help", "-h"})
CLUSTER_ENV = "INSITU_CLUSTER"
TOKEN_FILE_ENV = "INSITU_TOKEN_FILE"
ENV_ON_STDIN = "--env-on-stdin"
"""With it `insitu resume` reads the variables of a caller elsewhere, {name: value or null}, as JSON."""
MAX_RELAYS = 32
_PART_BYTES = 1 << 16
_MAX_GIVEN = 1 << 15
"""Characters of a caller's variables, so that a pipe takes them at once."""
_MAX_UNSENT_BYTES = 1 << 20
"""While so much waits to be read by the caller, the command's output isn't read."""


def check_relayed(arguments: Sequence[str]) -> None:
    """Raise ClusterError for a command that isn't run for others."""
    if not arguments or arguments[0] not in RELAYED:
        raise ClusterError(
            f"The head runs {', '.join(RELAYED)} for others. Received: {' '.join(arguments)!r:.100}. Run "
            f"it on the machine of the head"
        )
    name, *rest = arguments
    allowed = RELAYED[name] | _HELP
    for each in rest:
        if each.startswith("-") and each != "--" and each.partition("=")[0] not in allowed:
            raise ClusterError(
                f"The head runs {name} for others with {', '.join(sorted(allowed))}. Received: "
                f"{each!r:.100}. Run it on the machine of the head"
            )
        if "://" in each:  # the head's machine would connect there, with its passwords for such servers
            raise ClusterError(
                f"The head runs {name} for others on what its cluster has. Received: {each!r:.100}. Run it "
                f"on a machine that reaches that server, without --cluster"
            )


class Relay:
    """One command that runs."""

    def __init__(self, paths: Paths, message: Message) -> None:
        """Start it. Raises ClusterError for what isn't relayed, and where no process can be started."""
        arguments = convert("arguments", message.get("arguments"), _Arguments, ClusterError)
        columns = convert("columns", message.get("columns"), _Columns, ClusterError)
        check_relayed(arguments)
        environment = {
            name: value for name, value in os.environ.items() if name not in (CLUSTER_ENV, TOKEN_FILE_ENV)
        }
        given = json.dumps(_parse_given(message.get("given"))).encode() if arguments[0] == "resume" else b""
        command = [arguments[0], *([ENV_ON_STDIN] if given else []), *arguments[1:]]
        environment |= {HOME_ENV: str(paths.home), "COLUMNS": str(columns)}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "insitu", *command],
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
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(given)
        self._ended = os.pidfd_open(self._process.pid)
        #: The streams that may still say something, by descriptor.
        self._streams: dict[int, str] = {}
        for name, stream in (("out", self._process.stdout), ("err", self._process.stderr)):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                self._streams[stream.fileno()] = name

    def descriptors(self, unsent_bytes: int) -> list[int]:
        """Return what to wait for; nothing while the caller doesn't read."""
        return [] if unsent_bytes > _MAX_UNSENT_BYTES else [*self._streams, self._ended]

    def advance(self) -> list[Message]:
        """Return what there is to send: output, and at last the exit code."""
        code = self._process.poll()  # first: what is written before the end is read after it
        messages = [message for descriptor in list(self._streams) for message in self._read(descriptor)]
        if code is None or messages:
            return messages
        return [{"do": "ended", "code": code if code >= 0 else 128 - code}]

    def _read(self, descriptor: int) -> list[Message]:
        try:
            data = os.read(descriptor, _PART_BYTES)
        except BlockingIOError:
            return []
        if not data:
            del self._streams[descriptor]
            return []
        return [
            {"do": "output", "stream": self._streams[descriptor], "data": base64.b64encode(data).decode()}
        ]

    def close(self) -> None:
        """End the command, where it runs."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        os.close(self._ended)


class Relays:
    """The commands that run for callers, by the number of their connection."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._running: dict[int, Relay] = {}

    def start(self, number: int, message: Message) -> None:
        """Start a command for a caller. Raises ClusterError where that can't be."""
        if number in self._running or len(self._running) >= MAX_RELAYS:
            raise ClusterError(f"The head runs {MAX_RELAYS} commands at a time. Received: another. Try later")
        self._running[number] = Relay(self._paths, message)

    def list_descriptors(self, count_unsent: Callable[[int], int]) -> dict[int, int]:
        """Return what to wait for, with the caller that it is for. `count_unsent` says what waits for one."""
        return {
            descriptor: number
            for number, relay in self._running.items()
            for descriptor in relay.descriptors(count_unsent(number))
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


def parse_output(message: Message) -> tuple[str, bytes]:
    """Return the stream, "out" or "err", and the bytes that the command has written there."""
    stream, data = message.get("stream"), message.get("data")
    if stream not in ("out", "err") or not isinstance(data, str):
        raise ClusterError("The head must send output as text. Received: something else")
    try:
        return str(stream), base64.b64decode(data, validate=True)
    except ValueError:
        raise ClusterError("The output of a command must be base64. Received: something else") from None


def make_request(
    arguments: list[str], columns: int, given: Mapping[str, str | None] | None = None
) -> dict[str, Any]:
    """Return the message that asks the head to run a command. `given`: variables of the caller."""
    return {"do": "run", "arguments": arguments, "columns": columns, "given": dict(given or {})}


def _parse_given(value: Any) -> dict[str, str | None]:
    """Return the variables of a caller. Raises ClusterError for anything else."""
    given = {} if value is None else value
    if not isinstance(given, dict) or not all(
        isinstance(name, str) and (text is None or isinstance(text, str)) and "\0" not in f"{name}{text}"
        for name, text in given.items()
    ):
        raise ClusterError("Variables of a caller are texts by name. Received: something else")
    if sum(len(name) + len(text or "") for name, text in given.items()) > _MAX_GIVEN:
        raise ClusterError(f"Variables of a caller have {_MAX_GIVEN:,} characters at most. Received: more")
    return given
