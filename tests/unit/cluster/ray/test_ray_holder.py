"""The actor that keeps the agent of a node running, without Ray and with another program for the agent."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from insitu.base.process.processes import identify_process
from insitu.cluster.ray import ray_holder
from insitu.cluster.ray.ray_holder import AgentHolder, HolderAnswer, HolderSettings, read_environment

SETTINGS = HolderSettings("s1", "10.0.0.1:7070", "1.0", "t" * 32)
AGENT = """
import json, os, signal, sys
home, options, ready = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
token = sys.stdin.read().strip()
what = open(os.path.join(home, "what")).read()
said = {"node": "a", "address": "h:1", "host": token, "options": options, "env": dict(os.environ)}
if what != "joins":
    said = {"error": what}
if what != "dies":
    os.write(ready, json.dumps(said).encode() + b"\\n")
if what != "joins":
    sys.exit(1)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
os.close(ready)
signal.pause()
"""


@pytest.fixture
def what(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says what the agent does."""
    home.mkdir(mode=0o700)
    (tmp_path / "fake_agent.py").write_text(AGENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(ray_holder, "AGENT", "fake_agent")
    monkeypatch.setattr(ray_holder.holders, "RETRY_SECONDS", (0.01, 0.01))
    monkeypatch.delenv(ray_holder.RAYLET_ENV, raising=False)
    file = home / "what"
    file.write_text("joins")
    return file


@pytest.fixture
def hold(what: Path) -> Iterator[Callable[[], AgentHolder]]:
    made: list[AgentHolder] = []

    def make() -> AgentHolder:
        made.append(AgentHolder(SETTINGS))
        return made[-1]

    yield make
    for holder in made:
        if holder._process is not None:
            holder._process.kill()
            holder._process.wait()
        if holder._ready >= 0:
            os.close(holder._ready)


def wait_for(holder: AgentHolder, is_so: Callable[[HolderAnswer], bool]) -> HolderAnswer:
    deadline = time.monotonic() + 60
    while not is_so(answer := holder.status()):
        assert time.monotonic() < deadline, answer
        time.sleep(0.01)
    return answer


def test_the_agent_joins_with_the_token_that_no_argument_shows(hold: Callable[[], AgentHolder]) -> None:
    holder = hold()
    assert holder.status().settings == "s1" and "t" * 32 not in repr(SETTINGS)
    joined: dict[str, Any] = wait_for(holder, lambda a: a.state == "joined").joined or {}
    assert joined["host"] == SETTINGS.token and joined["options"]["head"] == SETTINGS.head
    own = identify_process(os.getpid())
    assert own is not None and joined["options"]["tied_to"] == [[own.pid, own.start]]
    assert SETTINGS.token not in json.dumps([joined["env"], joined["options"]])


def test_an_agent_that_is_killed_is_started_again(hold: Callable[[], AgentHolder]) -> None:
    holder = hold()
    wait_for(holder, lambda a: a.state == "joined")
    assert holder._process is not None
    first = holder._process.pid
    os.kill(first, signal.SIGKILL)
    wait_for(holder, lambda a: holder._process is not None and holder._process.pid != first)
    wait_for(holder, lambda a: a.state == "joined")


def test_an_agent_that_was_asked_to_end_is_not_started_again(hold: Callable[[], AgentHolder]) -> None:
    holder = hold()
    wait_for(holder, lambda a: a.state == "joined")
    assert holder._process is not None
    os.kill(holder._process.pid, signal.SIGTERM)
    wait_for(holder, lambda a: a.state == "ended")
    time.sleep(0.05)
    assert holder.status().state == "ended" and holder._process is None
    holder.start_again()
    wait_for(holder, lambda a: a.state == "joined")
    holder.start_again()  # it runs
    assert holder.status().state == "joined"


@pytest.mark.parametrize(
    ("does", "problem"), [("no room", "no room"), ("dies", "the agent ended with code 1")]
)
def test_why_an_agent_cannot_join_is_kept(
    hold: Callable[[], AgentHolder], what: Path, does: str, problem: str
) -> None:
    what.write_text(does)
    holder = hold()
    assert wait_for(holder, lambda a: a.state == "failed").problem == problem
    what.write_text("joins")
    assert wait_for(holder, lambda a: a.state == "joined").problem == ""


def test_two_stores_in_one_home_are_named(hold: Callable[[], AgentHolder], home: Path) -> None:
    for node in ("a", "b"):
        (home / "nodes" / node).mkdir(parents=True)
        (home / "nodes" / node / "store-id").write_text("x")
    answer = hold().status()
    assert answer.state == "failed" and "An agent owns one store" in answer.problem


def test_the_environment_is_that_of_the_raylet(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor's own hides GPUs and gives libraries one thread."""
    at_start = read_environment(identify_process(os.getppid()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("RAY_JOB_ID", "1")
    monkeypatch.setenv("MINE", "1")
    assert at_start.get("PATH") and "MINE" not in at_start
    own = read_environment(None)
    assert own["MINE"] == "1" and not {"CUDA_VISIBLE_DEVICES", "RAY_JOB_ID"} & own.keys()
