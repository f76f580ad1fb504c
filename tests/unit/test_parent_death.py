"""A further replica's process ends together with the one that started it."""

from __future__ import annotations

import os
import subprocess
import sys

from insitu.parent_death import PARENT_PIPE_ENV, ReplicaConfig, get_replica_config

CODE = """
import os, sys
from insitu.parent_death import PARENT_PIPE_ENV, get_replica_config, tie_to_parent
tie_to_parent()
config = get_replica_config()
print(config.replica, config.devices, config.addresses, config.secret.hex(), PARENT_PIPE_ENV in os.environ)
print(config, flush=True)
import threading
threading.Event().wait()
"""
CONFIG = ReplicaConfig(1, ("cpu:0", "cpu:1"), ("a:1", "b:2"), b"\x07secret")


def start(parent: int, code: str = CODE) -> tuple[subprocess.Popen[str], int]:
    """A child with one end of a pipe, and the other end."""
    theirs, ours = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, PARENT_PIPE_ENV: f"{theirs}:{parent}"},
        pass_fds=(theirs,),
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    return child, ours


def test_a_replica_gets_its_configuration_and_ends_with_the_pipe() -> None:
    child, ours = start(os.getpid())
    os.write(ours, CONFIG.to_line())
    assert child.stdout is not None
    expected = f"1 {CONFIG.devices} {CONFIG.addresses} {CONFIG.secret.hex()} False\n"
    assert child.stdout.readline() == expected
    assert "secret" not in child.stdout.readline()
    os.close(ours)
    assert child.wait(60) == 1
    child.stdout.close()


def test_a_replica_whose_parent_has_gone_ends_though_the_pipe_is_held() -> None:
    child, ours = start(parent=1)  # as if another process had adopted it
    os.write(ours, CONFIG.to_line())
    assert child.wait(60) == 1
    os.close(ours)
    assert child.stdout is not None
    child.stdout.close()


def test_a_parent_that_ends_before_it_has_said_anything_ends_the_replica() -> None:
    child, ours = start(os.getpid())
    os.close(ours)
    assert child.wait(60) == 1
    assert child.stdout is not None and child.stdout.read() == ""
    child.stdout.close()


def test_a_process_that_nobody_started_as_a_replica_has_no_configuration() -> None:
    assert get_replica_config() is None
