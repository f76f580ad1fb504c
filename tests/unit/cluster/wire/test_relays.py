"""Commands that the head runs for callers."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from insitu.base.errors import ClusterError
from insitu.base.paths import Paths
from insitu.cluster.wire import relays
from insitu.cluster.wire.relays import Relay, make_request, parse_output

PROGRAM = """
import os, sys, time
print(os.environ["COLUMNS"], os.environ["INSITU_HOME"], os.environ.get("INSITU_CLUSTER"), sys.argv[1:])
print(sys.stdin.read())
print("a word", file=sys.stderr)
if "waits" in sys.argv:
    sys.stdout.flush()
    time.sleep(600)
if "much" in sys.argv:
    sys.stdout.write("x" * 300_000)
sys.exit(3)
"""


@pytest.fixture
def start(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Relay]]:
    """Start a relay whose insitu is the program above."""
    (tmp_path / "fake" / "insitu").mkdir(parents=True)
    (tmp_path / "fake" / "insitu" / "__init__.py").touch()
    (tmp_path / "fake" / "insitu" / "__main__.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("INSITU_CLUSTER", "10.0.0.1:1")
    made: list[Relay] = []

    def make(*arguments: str, given: Any = None) -> Relay:
        message = {**make_request(list(arguments), 77), "given": given}
        made.append(Relay(Paths(home), message))
        return made[-1]

    yield make
    for relay in made:
        relay.close()


def read_all(relay: Relay, until: Callable[[dict[str, bytes]], bool] = lambda said: False) -> Any:
    """Return what the command says by stream, and its exit code."""
    said = {"out": b"", "err": b""}
    deadline = time.monotonic() + 60
    while not until(said):
        assert time.monotonic() < deadline
        select.select(relay.descriptors(0), [], [], 1)
        for message in relay.advance():
            if message["do"] == "ended":
                return said, message["code"]
            stream, data = parse_output(message)
            said[stream] += data
    return said, None


def test_a_command_runs_in_the_home_of_the_head(start: Callable[..., Relay], home: Path) -> None:
    said, code = read_all(start("describe", "x"))
    assert said == {"out": f"77 {home} None ['describe', 'x']\n\n".encode(), "err": b"a word\n"} and code == 3


def test_a_job_that_is_resumed_is_given_what_its_caller_names(start: Callable[..., Relay]) -> None:
    given = {"A_TOKEN": "geheim", "B_TOKEN": None}
    said, _ = read_all(start("resume", "x", "--env", "A_TOKEN", given=given))
    assert b"['resume', '--env-on-stdin', 'x', '--env', 'A_TOKEN']" in said["out"]
    assert json.loads(said["out"].splitlines()[1]) == given
    # Other commands are given nothing.
    said, _ = read_all(start("describe", "x", given=given))
    assert b"geheim" not in said["out"]


@pytest.mark.parametrize("given", [[], {"A": 1}, {"A": "\0"}, {"A": "x" * (1 << 15)}])
def test_variables_that_cannot_be_are_refused(start: Callable[..., Relay], given: Any) -> None:
    with pytest.raises(ClusterError, match="Variables of a caller"):
        start("resume", "x", given=given)


def test_nothing_of_much_output_is_lost(start: Callable[..., Relay]) -> None:
    relay = start("logs", "much")
    said, code = read_all(relay)
    assert said["out"].endswith(b"x" * 300_000) and code == 3
    assert relay.descriptors(2 << 20) == []  # a caller that doesn't read isn't sent more


def test_a_caller_that_ends_ends_the_command(start: Callable[..., Relay]) -> None:
    relay = start("logs", "waits")
    read_all(relay, lambda said: b"logs" in said["out"])
    handle = os.pidfd_open(relay._process.pid)
    assert not select.select([handle], [], [], 0)[0]
    relay.close()
    assert select.select([handle], [], [], 60)[0]
    os.close(handle)
    made = relay._process
    assert made.returncode == -9
    relay.close = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "arguments", [[], ["import"], ["down"], ["--help"], ["start"], "nodes", [1], ["nodes", "a\0b"], None]
)
def test_what_is_not_relayed_is_refused(home: Path, arguments: Any) -> None:
    with pytest.raises(ClusterError, match="Received"):
        Relay(Paths(home), {"arguments": arguments, "columns": 80})
    with pytest.raises(ClusterError, match="columns"):
        Relay(Paths(home), {"arguments": ["nodes"], "columns": -1})


@pytest.mark.parametrize("message", [{}, {"stream": "in", "data": ""}, {"stream": "out", "data": "?"}])
def test_output_that_is_none_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ClusterError):
        parse_output(message)


@pytest.mark.parametrize(
    "arguments",
    [
        ["chaos", "--report", "/home/victim/.bashrc", "-", "/home/victim/.ssh", "id"],
        ["describe", "--config", "/etc/passwd", "CACHE"],
        ["describe", "--config=/etc/passwd", "CACHE"],
        ["describe", "-c", "/etc/passwd", "CACHE"],
        ["describe", "-c/etc/passwd", "CACHE"],
        ["describe", "ignite://10.0.0.9/CACHE"],
        ["describe", "--", "Ignite://10.0.0.9/CACHE"],
    ],
)
def test_no_caller_has_the_head_run_its_program_or_use_files_or_servers(
    start: Callable[..., Relay], arguments: list[str]
) -> None:
    """Chaos starts a job of any folder of the head's machine, and adds text of the caller's to any file."""
    with pytest.raises(ClusterError, match="Received"):
        start(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["logs", "a-1", "worker:0", "-f", "--attempt=2"],
        ["ps", "-a", "--json"],
        ["describe", "-h"],
        ["scale", "a", "3"],
    ],
)
def test_options_that_show_are_relayed(arguments: list[str]) -> None:
    relays.check_relayed(arguments)
