"""Imports, and commands of plug-in pages, that were started from the page. Each is a process of the command
line, so that it shares nothing with the server but the home."""

from __future__ import annotations

import collections
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from insitu.base.errors import InputError
from insitu.service import clean_line

_MOST = 100
"""Commands that are remembered."""
_AT_ONCE = 2
_TAIL = 20
_CHUNK = 4096


@dataclass
class _Command:
    """One import, or another command."""

    #: `import`, or the name of the page that has started it.
    kind: str
    #: Its number for users.
    token: str
    #: The cache that it makes, or the form that has asked for it.
    subject: str
    #: The command that runs.
    command: Sequence[str]
    #: When it was started, in seconds since 1970.
    started: float
    #: The process.
    process: subprocess.Popen[bytes]
    #: The last lines that it printed, without control sequences of terminals.
    output: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=_TAIL))
    #: When it ended; None while it runs.
    ended: float | None = None
    #: Its exit code; None while it runs.
    code: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it in the form of docs/reference/json.md."""
        state = "running" if self.code is None else "failed" if self.code else "finished"
        return {
            "import": self.token,
            "cache": self.subject,
            "state": state,
            "command_line": shlex.join(self.command),
            "started": self.started,
            "ended": self.ended,
            "exit_code": self.code,
            "output": list(self.output),
        }


class StartedCommands:
    """The imports and other commands of this server. Safe for use by several threads."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._commands: dict[str, _Command] = {}

    def start_import(
        self, cache: str, sources: Sequence[str], options: Sequence[str], done: Callable[[], None]
    ) -> dict[str, Any]:
        """Start an import. `done` is called when it has ended. Raises InputError if too many run."""
        return self.start("import", cache, ["import", *options, "--", cache, *sources], done)

    def start(
        self, kind: str, subject: str, arguments: Sequence[str], done: Callable[[], None]
    ) -> dict[str, Any]:
        """Start a command of insitu. `done` is called when it has ended. Raises InputError if too many of
        its kind run."""
        with self._lock:
            if sum(each.code is None and each.kind == kind for each in self._commands.values()) >= _AT_ONCE:
                raise InputError(f"{_AT_ONCE} commands of a kind run at a time. Wait for one to end")
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "insitu", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**self._environment, "NO_COLOR": "1"},
            )
            token = secrets.token_hex(4)
            started = _Command(kind, token, subject, ["insitu", *arguments], time.time(), process)
            self._commands[token] = started
            ended = [each.token for each in self._commands.values() if each.code is not None]
            for old in ended[: max(0, len(self._commands) - _MOST)]:
                del self._commands[old]
        threading.Thread(target=self._read, args=(started, done), daemon=True).start()
        return started.to_json()

    def list(self, kind: str = "import") -> list[dict[str, Any]]:
        """Return all imports, or all commands of another kind, the latest first."""
        with self._lock:
            return [each.to_json() for each in reversed(self._commands.values()) if each.kind == kind]

    def find_import(self, token: str) -> dict[str, Any] | None:
        """Return one import, or None."""
        return next((each for each in self.list() if each["import"] == token), None)

    def close(self) -> None:
        """End all that runs: an import that is interrupted leaves caches as they were."""
        with self._lock:
            for each in self._commands.values():
                if each.code is None:
                    each.process.terminate()

    def _read(self, running: _Command, done: Callable[[], None]) -> None:
        stream: IO[bytes] | None = running.process.stdout
        rest = b""
        while stream is not None and (data := stream.read1(_CHUNK)):  # type: ignore[attr-defined]
            *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
            rest = rest[-_CHUNK:]
            with self._lock:
                running.output.extend(text for line in lines if (text := clean_line(line).strip()))
        code = running.process.wait()
        with self._lock:
            if rest.strip():
                running.output.append(clean_line(rest))
            running.ended = time.time()
            running.code = code
        if stream is not None:
            stream.close()
        done()
