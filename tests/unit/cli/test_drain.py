"""`insitu drain`: what is refused before a head is asked. tests/process/test_moving_jobs.py drains nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from insitu.base.errors import InputError
from insitu.cli.drain import drain, parse_duration


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("2m", 120.0), ("1.5h", 5400.0)])
def test_a_time_is_a_number_with_its_unit(text: str, seconds: float) -> None:
    assert parse_duration("--deadline", text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-3s", "2 weeks", "nan", "1e3", "2min"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=r"--deadline is a time such as 90s, 2m or 1h\. Received"):
        parse_duration("--deadline", text)


def test_a_home_of_one_machine_has_no_node_that_could_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSITU_HOME", str(tmp_path))
    with pytest.raises(InputError, match="which belongs to none"):
        drain("node-0", "1m", cancel=False)
    with pytest.raises(InputError, match="0 agents in"):
        drain(None, "1m", cancel=True)


@pytest.mark.parametrize(
    ("cancel", "state", "seconds"),
    [(False, "draining", 60.0), (False, "lost", 60.0), (True, "alive", None)],
)
def test_what_was_asked_is_said_as_json(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cancel: bool,
    state: str,
    seconds: float | None,
) -> None:
    asked: list[tuple[object, ...]] = []

    def drain_node(paths: object, *given: object) -> str:
        asked.append(given)
        return state

    monkeypatch.setattr("insitu.cluster.drain_node", drain_node)
    monkeypatch.setattr("insitu.cluster.cancel_draining", lambda paths, node: asked.append((node, None)))
    drain("a", "1m", cancel=cancel, as_json=True)
    said = capsys.readouterr()
    assert json.loads(said.out) == {"node": "a", "seconds": seconds, "lost": state == "lost"}
    assert said.err == "" and asked == [("a", seconds)]
