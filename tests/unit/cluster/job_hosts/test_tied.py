"""Processes that end with others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from insitu.base.process.processes import ProcessIdentity, has_ended, identify_process
from insitu.cluster.job_hosts.tied import identify_parent, tie_to

TIED = """
import os, signal, sys
from insitu.cluster.job_hosts.tied import identify_parent, tie_to
from insitu.base.process.processes import ProcessIdentity
tied = [ProcessIdentity(*map(int, each.split(":"))) for each in sys.argv[1:]] or [identify_parent()]
tie_to(tied)
print(os.getpid(), signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)
signal.pause()
"""
PARENT = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {TIED!r}])
input()
"""


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits until it is killed."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def identity_of(pid: int) -> ProcessIdentity:
    found = identify_process(pid)
    assert found is not None
    return found


def start_tied(*identities: ProcessIdentity) -> subprocess.Popen[str]:
    arguments = [f"{each.pid}:{each.start}" for each in identities]
    process = subprocess.Popen([sys.executable, "-c", TIED, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline()
    return process


def test_a_process_ends_with_its_parent_at_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline()
        parent.kill()
        # The child has the output of its parent: it ends when both have ended.
        assert parent.stdout.read() == ""


def test_a_process_ends_with_one_that_nobody_has_reaped(other: subprocess.Popen[bytes]) -> None:
    """As a raylet in a container whose first process doesn't reap."""
    watched = identity_of(other.pid)
    with start_tied(watched) as tied:
        assert not has_ended(watched)
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(watched)
        assert tied.wait(60) == -signal.SIGTERM


def test_who_is_tied_to_what_has_ended_does_not_begin() -> None:
    with pytest.raises(SystemExit, match="has ended"):
        tie_to([ProcessIdentity(os.getpid(), 1)])
    tie_to([])
    parent = identify_parent()
    assert parent is not None and parent.pid == os.getppid()


def test_a_mask_of_signals_that_was_handed_down_is_lifted() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen([sys.executable, "-c", TIED], stdout=subprocess.PIPE, text=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().split()[1] == "False"
        process.kill()
