"""Kills and suspends processes of a job while one of its tasks waits within an event.

From outside the job: a task on a host of `hosts_lab.py` doesn't see the processes of other hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_hosts import wait_until
from hosts_lab import Host

POWER, LINK = "power", "link"
"""Targets that aren't processes: the host of the task that waits loses its power, or is cut off."""
SUPERVISOR = "control.supervisor"
"""A job ends with the process that has this in its command line."""
CONTROLLER = "controller of the job"
"""The child of that process, with the same command line."""


class Hits:
    """Does what the tasks of one job ask for in the folder `fired`, until it is closed."""

    def __init__(self, fired: Path, homes: Sequence[Path], hosts: Sequence[Host]) -> None:
        self._fired = fired
        #: What the environment of a process says that belongs to the job, or to agents and heads.
        self._marks = [f"INSITU_TEST_FIRED={fired}", *(f"INSITU_HOME={home}" for home in homes)]
        self._hosts = hosts
        #: What went wrong. Written by the thread.
        self.problems: list[str] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Hits:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(0.02):
            for path in sorted(self._fired.glob("*.wanted")):
                fault = json.loads(path.read_text())
                path.unlink()
                try:
                    self._hit(fault)
                except BaseException as error:
                    self.problems.append(f"{fault}: {error!r}")
                path.with_suffix(".hit").touch()

    def _hit(self, fault: dict[str, Any]) -> None:
        target = fault["target"]
        if target in (POWER, LINK):
            (host,) = (each for each in self._hosts if find_space(each.pid) == fault["space"])
            host.kill() if target == POWER else host.cut()
            return
        # One that was hit before may be about to come back.
        for pid in wait_until(lambda: self._find(fault), f"a process of {target!r}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, f"SIG{fault.get('signal', 'KILL')}"))

    def _find(self, fault: dict[str, Any]) -> list[int]:
        """Return the processes that are meant, those first that would start others."""
        target = fault["target"]
        if target in (SUPERVISOR, CONTROLLER):
            both = self._list(SUPERVISOR, self._marks, fault)
            return [pid for pid in both if (read_parent(pid) in both) == (target == CONTROLLER)]
        found = self._list(target, self._marks if target else self._marks[:1], fault)
        return sorted(found, key=lambda pid: (SUPERVISOR not in read_command(pid), pid))

    @staticmethod
    def _list(word: str, marks: Sequence[str], fault: dict[str, Any]) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or word not in read_command(int(entry.name)):
                continue
            with contextlib.suppress(OSError):
                environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                near = not fault.get("near") or find_space(int(entry.name)) == fault["space"]
                if near and any(mark in environment for mark in marks):
                    found.append(int(entry.name))
        return found


def read_command(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def read_parent(pid: int) -> int:
    """Return the number of the process that has started one; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def find_space(pid: int) -> str:
    """Return the name of the namespace of processes that one is in; empty if it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""
