"""Commands on hosts, by the user's launcher."""

from __future__ import annotations

import shlex

import pytest

from insitu.base.errors import InputError
from insitu.cluster.wire.hosts_file import HostLine
from insitu.cluster.wire.launching import (
    SSH,
    Outcome,
    check_launcher,
    fill_launcher,
    make_start_command,
    make_stop_command,
    run_on_hosts,
)

LOCAL = "env HOST={host} sh -c"


def test_the_command_is_one_argument_of_the_launcher() -> None:
    assert fill_launcher(SSH, "me@a", "insitu agent")[-2:] == ["me@a", "insitu agent"]
    assert fill_launcher("run {command} on {host}", "a", "x y") == ["run", "x y", "on", "a"]


@pytest.mark.parametrize("launcher", ["ssh host", "", "ssh '{host}"])
def test_a_launcher_says_where_it_runs(launcher: str) -> None:
    with pytest.raises(InputError, match=r"--launcher must"):
        check_launcher(launcher)


def test_commands_survive_the_hosts_shell() -> None:
    line = HostLine("a", "fast", "ib0", "/data/my insitu", 7071)
    assert make_start_command(line, "/opt/x/python -m insitu", "10.0.0.1:7070") == (
        "env INSITU_HOME='/data/my insitu' /opt/x/python -m insitu agent --detach --token-stdin "
        "--head 10.0.0.1:7070 --name fast --interface ib0 --port 7071"
    )
    assert make_stop_command(HostLine("a"), "insitu") == "insitu agent --stop"


def run(*commands: str, seconds: float = 60, launcher: str = LOCAL) -> list[Outcome]:
    reported: list[Outcome] = []
    named = [(f"h{index}", command) for index, command in enumerate(commands)]
    outcomes = run_on_hosts(launcher, named, "token\n", reported.append, seconds=seconds)
    assert reported == outcomes
    return outcomes


def test_the_token_is_the_input_and_the_answer_the_last_json_line() -> None:
    (outcome,) = run(
        'read given; echo "Welcome {not json"; printf \'{"got": "%s %s"}\\n\' "$given" "$HOST"; echo bye'
    )
    assert outcome == Outcome("h0", {"got": "token h0"})


def test_failures_are_named_by_host_and_hurt_no_other() -> None:
    good, failing, silent = run(
        "echo '{}'", "echo first >&2; echo 'error: no room' >&2; exit 3", f"exec {shlex.quote('false')}"
    )
    assert good.answer == {}
    assert failing == Outcome("h1", None, "no room")
    assert silent == Outcome("h2", None, "the command ended with code 1")


def test_a_command_that_never_ends_is_ended() -> None:
    (outcome,) = run("sleep 600", seconds=0.2)
    assert outcome.silent and "said nothing for 0.2 s" in outcome.problem


def test_a_launcher_that_is_not_there_is_named() -> None:
    (outcome,) = run("x", launcher="/nowhere/ssh {host}")
    assert outcome.problem == "the launcher can't be run: /nowhere/ssh (No such file or directory)"
