"""`insitu repair` in the home of a head: what it says about files of `insitu://`, asks, and does."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import command_line
import pytest

from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cli import repair_names
from insitu.cluster import NamesReport
from insitu.cluster.files import FoundFile
from insitu.grid.shared_files import Entry, NamesState, Origin

AT = 1_700_000_000.0
LOST = NamesReport(
    NamesState(None, has_names=False, is_rebuilding=False),
    found=[FoundFile("v", "d/x", Entry(3_000_000, AT)), FoundFile("v", "late", Entry(5, AT + 60))],
    unconfirmed=[("v", "late")],
    conflicts=[("v", "late", "another version was passed over")],
    as_of={"v": AT + 30},
    missing={"v": 0},
    unnamed={"v": 0},
    generation=3,
)
INCOMPLETE = replace(
    LOST,
    incomplete=[("v", "half", "No node that answers has 1 of 2 blocks")],
    missing={"v": 7},
    unnamed={"v": 9},
    unreachable=[NodeId("c")],
    problems=["manifest 12 of v on a: damaged"],
)
KNOWN = replace(LOST, state=NamesState(Origin("01234567"), has_names=True, is_rebuilding=False), as_of={})
NOTHING = replace(KNOWN, found=[], unconfirmed=[], conflicts=[])


class Cluster:
    """What the command finds, and what it has done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.report: NamesReport | None = LOST
        self.done: list[str] = []
        monkeypatch.setattr("insitu.cluster.find_lost_names", lambda paths: self.report)
        for name in ("put_names_back", "forget_lost_names"):
            monkeypatch.setattr(f"insitu.cluster.{name}", self._note(name))

    def _note(self, name: str) -> Any:
        def note(paths: Paths, report: NamesReport) -> None:
            assert report is self.report
            self.done.append(name)

        return note

    def run(self, *arguments: str, given: str | None = None) -> Any:
        return command_line.run("repair", *arguments, input=given)


@pytest.fixture
def cluster(home: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_it_shows_what_it_believes_and_asks_on_a_terminal(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair_names, "is_terminal", lambda: True)
    refused = cluster.run(given="n\n")
    assert refused.exit_code == 1 and not cluster.done
    assert "insitu://v/d/x" in refused.stdout and "Put these files back?" in refused.stderr
    (line,) = [each for each in refused.stdout.splitlines() if "late" in each and "passed" not in each]
    assert "may not be its last version" in line
    assert "another version was passed over" in refused.stdout
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(AT + 30))
    assert f"names are as they were {when}" in " ".join(refused.stderr.split())
    agreed = cluster.run(given="y\n")
    assert agreed.exit_code == 0 and cluster.done == ["put_names_back"]
    assert "2 files of insitu:// were put back" in agreed.stderr


def test_nothing_is_done_without_a_terminal_or_yes(cluster: Cluster) -> None:
    asked = cluster.run()
    assert asked.exit_code == 1 and "Give --yes" in asked.stderr and not cluster.done
    assert cluster.run("--yes").exit_code == 0 and cluster.done == ["put_names_back"]


def test_a_dry_run_does_nothing(cluster: Cluster) -> None:
    dry = cluster.run("--dry-run", "--yes")
    assert dry.exit_code == 0 and not cluster.done and "would be put back" in dry.stdout
    assert cluster.run("--dry-run", "--forget-files", "--yes").exit_code == 0 and not cluster.done


def test_what_is_incomplete_or_unknown_is_named_with_exit_code_1(cluster: Cluster) -> None:
    cluster.report = INCOMPLETE
    result = cluster.run("--yes")
    said = " ".join(result.stderr.split())
    assert result.exit_code == 1 and cluster.done == ["put_names_back"]
    assert "incomplete: No node that answers has 1 of 2 blocks" in " ".join(result.stdout.split())
    for text in (
        "7 more files were there",
        "9 blocks belong to no file",
        "c can't be asked",
        "12 of v on a",
    ):
        assert text in said


def test_all_of_it_is_json(cluster: Cluster) -> None:
    cluster.report = INCOMPLETE
    result = cluster.run("--json", "--yes")
    assert result.exit_code == 1
    files = json.loads(result.stdout)["files"]
    assert files == {
        "empty": True,
        "done": True,
        "found": [
            {"url": "insitu://v/d/x", "bytes": 3_000_000, "modified": AT},
            {"url": "insitu://v/late", "bytes": 5, "modified": AT + 60},
        ],
        "unconfirmed": ["insitu://v/late"],
        "incomplete": [{"url": "insitu://v/half", "reason": INCOMPLETE.incomplete[0][2]}],
        "conflicts": [{"url": "insitu://v/late", "reason": "another version was passed over"}],
        "as_of": {"v": AT + 30},
        "missing": {"v": 7},
        "unnamed": {"v": 9},
        "unreachable": ["c"],
        "problems": INCOMPLETE.problems,
    }
    cluster.report = None
    assert json.loads(cluster.run("--json").stdout)["files"] is None


def test_a_head_with_names_gets_none_and_files_can_be_given_up(cluster: Cluster) -> None:
    cluster.report = KNOWN
    result = cluster.run("--yes")
    assert result.exit_code == 1 and not cluster.done
    assert "not known to the head" in " ".join(result.stdout.split()) and "--forget-files" in result.stderr
    result = cluster.run("--forget-files", "--yes")
    assert result.exit_code == 0 and cluster.done == ["forget_lost_names"]
    assert "were given up" in result.stderr
    cluster.report = NOTHING
    result = cluster.run()
    assert result.exit_code == 0 and "insitu://" not in result.stdout + result.stderr


def test_blocks_without_any_name_can_only_be_given_up(cluster: Cluster) -> None:
    cluster.report = replace(LOST, found=[], unconfirmed=[], conflicts=[], as_of={}, unnamed={"v": 4})
    result = cluster.run("--yes")
    assert (
        result.exit_code == 1 and not cluster.done and "No file of insitu:// can be put back" in result.stderr
    )
