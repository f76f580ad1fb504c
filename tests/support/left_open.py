"""Finds the sockets and processes that tests have left open, and the test that has made each."""

from __future__ import annotations

import functools
import gc
import os
import socket
import subprocess
import time
import traceback
import weakref
from typing import Any

_FRAMES = 12
"""The innermost frames of where a thing was made that are told of."""
_SECONDS = 30.0
"""How long what is about to be closed is waited for, as by a thread that ends."""


class LeftOpen:
    """Keeps account of all sockets and processes that Python's classes make in this process."""

    def __init__(self) -> None:
        #: For each thing that somebody refers to still (the test that made it, where).
        self._made: weakref.WeakKeyDictionary[Any, tuple[str, traceback.StackSummary]]
        self._made = weakref.WeakKeyDictionary()

    def watch(self) -> None:
        """Keep account from now on."""
        for kind in (socket.socket, subprocess.Popen):
            setattr(kind, "__init__", self._noting(kind.__init__))  # noqa: B010

    def _noting(self, make: Any) -> Any:
        @functools.wraps(make)
        def make_and_note(thing: Any, *arguments: Any, **options: Any) -> None:
            make(thing, *arguments, **options)
            test = os.environ.get("PYTEST_CURRENT_TEST", "outside of tests")
            stack = traceback.StackSummary(traceback.extract_stack(limit=_FRAMES)[:-1])
            self._made[thing] = test, stack

        return make_and_note

    def find(self) -> list[str]:
        """Return what is open still: what it is, which test made it, where. Things that nothing refers to any
        more are let go before, which close by themselves or warn that they were left."""
        gc.collect()
        deadline = time.monotonic() + _SECONDS
        while (
            left := [thing for thing in list(self._made) if _is_open(thing)]
        ) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [self._describe(thing) for thing in left]

    def _describe(self, thing: Any) -> str:
        test, stack = self._made[thing]
        frames = [frame for frame in stack if "site-packages" not in frame.filename]
        return f"{thing!r}, made in {test}:\n{''.join(traceback.format_list(frames))}"


def _is_open(thing: Any) -> bool:
    return thing.returncode is None if isinstance(thing, subprocess.Popen) else thing.fileno() != -1
