"""Why a command on a host has failed, from what ssh says. tests/fault/test_hosts_ssh.py has a real one."""

from __future__ import annotations

import pytest

from insitu.cluster.wire.launching import describe_failure

BANNER = "Authorized use only.\nAll is watched.\n" * 3


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("Host key verification failed.", "accept it once by `ssh me@a`"),
        ("me@a: Permission denied (publickey,password).", "`ssh-copy-id me@a`"),
        ("Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures", "`ssh me@a true`"),
        ("ssh: Could not resolve hostname a: Name or service not known", "Correct its name"),
        ("ssh: connect to host a port 22: Connection refused", "Check that it is on"),
        ("kex_exchange_identification: read: Connection reset by peer", "MaxStartups"),
        ("ssh: connect to host a port 22: Connection timed out", "Another port goes into ~/.ssh/config"),
    ],
)
def test_what_ssh_says_comes_with_what_helps(said: str, remedy: str) -> None:
    found = describe_failure("me@a", 255, b"", f"{BANNER}{said}\n".encode())
    assert said.rstrip(".") in found and remedy in found


def test_other_launchers_keep_their_words() -> None:
    assert describe_failure("a", 255, b"", b"a times out\n") == "a times out"
    assert describe_failure("a", 1, b"", b"") == "the command ended with code 1"
    assert describe_failure("a", 1, b"", b"pod not found") == "the command ended with code 1: pod not found"


def test_an_error_of_insitu_is_shown_whole_and_alone() -> None:
    err = f"{BANNER}warning\nerror: no room.\nReceived: 1\n2\n3\nLogs: /x\n"
    assert describe_failure("a", 1, b"{}\n", err.encode()) == "no room. Received: 1 2 3 Logs: /x"


def test_a_host_without_insitu_says_how_it_is_named() -> None:
    found = describe_failure("a", 127, b"Welcome\n", b"bash: line 1: insitu: command not found\n")
    assert found.startswith("bash: line 1: insitu: command not found. Install insitu there, or give its path")


def test_a_shell_that_runs_no_command_is_shown_with_what_it_prints() -> None:
    closed = describe_failure("a", 1, b"This account is currently not available.\n", b"")
    assert closed == "the command ended with code 1: This account is currently not available."
    left = describe_failure("a", 0, b"Closed today\n", b"")
    assert "ended with code 0: Closed today. `ssh a true` must run that command alone" in left
