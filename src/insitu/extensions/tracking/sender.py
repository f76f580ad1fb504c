"""`python -m insitu.extensions.tracking.sender FOLDER [--once]` sends the records of a run to its tracker.

It runs beside the chief: the library of a tracker takes seconds to be imported, may hang, and prints much.
It ends with the chief, and another one continues where it was. Its standard input wakes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from insitu.base.disk.durable import replace_file
from insitu.base.tracking import OUTBOX_FILE, RUN_FILE, SENT_FILE, STATUS_FILE, hide_secrets, read_sent
from insitu.extensions.tracking.run_folder import END
from insitu.extensions.tracking.trackers import RunSpec, TrackedRun, find_tracker

_LOOK_SECONDS = 1.0
_MOST_PAUSE = 30.0
_FAREWELL_SECONDS = 10
"""How long a sender continues whose chief was killed: the next one waits for it."""
_TRIES = 3
"""Tries for a file or for parameters that a tracker refuses, before these are left out."""
_MOST_TEXT = 200
"""Characters of what a library says about a problem."""
_BATCH = 100
"""Records after which the library is asked to have them written."""


class Sender:
    """Sends the records of one run, in their order."""

    def __init__(self, folder: Path, say: TextIO, once: bool) -> None:
        self._folder = folder
        self._say = say
        self._once = once
        self._spec = json.loads((folder / RUN_FILE).read_text())
        self._sent = read_sent(folder)
        self._run: TrackedRun | None = None
        #: The largest step of each metric that the tracker had when the run was opened.
        self._known: dict[str, int] = {}
        self._link = self._problem = ""
        self._has_said = False
        #: Whether nothing more comes: the chief has ended.
        self._closed = False
        self._failures = 0

    def send_all(self) -> bool:
        """Send until the chief has ended and nothing is left. Return whether all is sent."""
        pause = 0.0
        while True:
            self._wait(pause)
            try:
                self._send_new()
                pause, self._failures = _LOOK_SECONDS, 0
                if self._problem:
                    self._note("")
            except Exception as error:  # of a library that isn't ours
                self._run, self._failures = None, self._failures + 1
                self._note(f"{type(error).__name__}: {error}")
                if self._once:
                    return False
                pause = min(_MOST_PAUSE, 2.0 ** (self._failures - 1))
            if self._closed and not self._problem:
                return True

    def _wait(self, seconds: float) -> None:
        """Wait until the chief writes something or ends, or the time is over."""
        if self._closed:
            time.sleep(min(seconds, _LOOK_SECONDS))
            return
        # While a tracker is unreachable, records that come don't hasten the next try.
        until = time.monotonic() + seconds
        while not self._closed:
            left = until - time.monotonic()
            if not select.select([0], [], [], max(0.0, left))[0]:
                return
            data = os.read(0, 4096)
            self._closed = not data or END in data
            if self._closed and END not in data:
                signal.alarm(_FAREWELL_SECONDS)
            if not self._problem:
                return

    def _send_new(self) -> None:
        count = 0
        for end, record in self._read_new():
            if self._run is None:
                self._open()
            self._send(record)
            self._sent = end
            count += 1
            if count % _BATCH == 0:
                self._confirm()
        if count % _BATCH:
            self._confirm()

    def _confirm(self) -> None:
        """Note what the tracker has."""
        if self._run is not None:
            self._run.flush()
        replace_file(self._folder / SENT_FILE, str(self._sent).encode())

    def _read_new(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each whole record that isn't sent, with where it ends."""
        # After a failure all are sent again that weren't confirmed; the tracker says which it has.
        position = self._sent = read_sent(self._folder)
        with contextlib.suppress(FileNotFoundError), (self._folder / OUTBOX_FILE).open("rb") as file:
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                position += len(line)
                yield position, json.loads(line)

    def _open(self) -> None:
        spec = self._spec
        tracker = find_tracker(spec["tracker"])
        self._run = tracker.open(RunSpec(spec["address"], spec["experiment"], spec["name"]))
        self._known = dict(self._run.read_last_steps())
        if self._known.get("", -1) == self._read_confirmed_step():
            # Of this step it has a record that was confirmed: another one of the same step may be new.
            self._known[""] -= 1
        self._link = hide_secrets(self._run.link, os.environ)
        self._write_status()
        if not self._has_said:
            self._has_said = True
            self._tell(f"run {spec['name']} is tracked by {spec['tracker']} {self._link}".rstrip())

    def _read_confirmed_step(self) -> int:
        """Return the largest step of what the tracker is known to have; -2 for none."""
        with (self._folder / OUTBOX_FILE).open("rb") as file:
            records = map(json.loads, file.read(read_sent(self._folder)).splitlines())
            return max((each["step"] for each in records if each["kind"] == "metrics"), default=-2)

    def _send(self, record: dict[str, Any]) -> None:
        run = self._run
        if run is None:
            raise RuntimeError("no run is open")
        kind = record["kind"]
        if kind == "metrics":
            least = self._known.get("", -1)
            values = {n: v for n, v in record["values"].items() if self._known.get(n, least) < record["step"]}
            if values:
                run.log_metrics(record["step"], values, record["at"])
        elif kind == "end":
            run.end(record["status"])
            self._run = None
        else:
            try:
                if kind == "parameters":
                    run.log_parameters(record["values"])
                elif Path(record["path"]).exists():
                    run.log_file(Path(record["path"]))
            except Exception as error:
                if self._failures < _TRIES:
                    raise
                # Else nothing behind it would be sent.
                self._tell(f"{kind} {record.get('path', '')} is left out: {type(error).__name__}: {error}")

    def _note(self, problem: str) -> None:
        """Write down what prevents sending, and say it the first time."""
        problem = hide_secrets(" ".join(problem.split()), os.environ)[:_MOST_TEXT]
        if bool(problem) != bool(self._problem):
            said = f"it isn't reachable ({problem}). Metrics wait on the disk, the training isn't affected"
            self._tell(f"{self._spec['tracker']}: {said if problem else 'it is reachable again'}")
        self._problem = problem
        self._write_status()

    def _write_status(self) -> None:
        status = {"link": self._link, "problem": self._problem}
        replace_file(self._folder / STATUS_FILE, json.dumps(status).encode())

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._say.write(f"insitu: {hide_secrets(text, os.environ)}\n")
            self._say.flush()


def silence_libraries() -> TextIO:
    """Send what libraries print to nowhere: they print URLs with tokens. Return what insitu itself prints
    to."""
    own = os.fdopen(os.dup(2), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return own


def main(arguments: list[str]) -> int:
    """Send a run's records. Return 0 if all are sent."""
    folder = Path(arguments[0])
    say = silence_libraries()
    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one that serves a chief that was killed is about to end
        return 0 if Sender(folder, say, "--once" in arguments).send_all() else 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)  # threads of libraries may wait for servers
