"""What gives way to others on a busy machine, and for how long. In processes of their own: raising a
priority again may take a privilege."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_groups = pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(), reason="the system makes no groups of sessions"
)
PRELUDE = """
import os, threading
from pathlib import Path
from insitu.grid.replicas.priorities import *
def group(): return int(Path("/proc/self/autogroup").read_text().split()[-1])
def nice(): return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
def run(do):
    thread = threading.Thread(target=do); thread.start(); thread.join()
"""


def run(code: str) -> list[int]:
    """The numbers that `code` prints, in a session of its own: a program that no session was begun for
    since the machine started, as in a container, has no group at all."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        start_new_session=True,
    )
    return [int(word) for word in done.stdout.split()]


def test_a_thread_is_lowered_alone() -> None:
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert run("run(lambda: (lower_thread(), print(nice())))\nprint(nice())") == [19, usual]


@needs_groups
def test_a_session_is_lowered_as_long_as_anything_is_done_in_the_background() -> None:
    code = """
def do():
    with in_background():
        print(group(), nice())
        with in_background():
            pass
        print(group())
print(group())
run(do)
print(group(), nice())
"""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert run(code) == [0, 10, 19, 10, 0, usual]


@needs_groups
def test_a_session_that_others_are_in_stays_as_it_is() -> None:
    code = """
import subprocess, sys
inner = PRELUDE + "with in_background():\\n    print(group(), nice())"
subprocess.run([sys.executable, "-c", inner], check=True, timeout=30)
"""
    assert run(f"PRELUDE = {PRELUDE!r}\n{code}") == [0, 19]
