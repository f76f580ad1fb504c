"""The verdict of `insitu chaos`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from insitu import service
from insitu.base.paths import JobPaths, Paths
from insitu.cli import chaos
from insitu.cluster import InjectedFault
from insitu.cluster.chaos.injector import parse_fault
from insitu.options import JobOptions

REPORT: dict[str, Any] = {
    "attempt": 1,
    "ledger": [{"lost": 0, "repeated": 0, "clean": True}],
    "recoveries": [{"seconds": 2.0}, {"seconds": 0.5}, {"seconds": None}],
}


def job(folder: Path, *results: str) -> JobPaths:
    folder.mkdir()
    (folder / "output.log").write_text("".join(f"[worker:0] RESULT {r}\n" for r in results))
    return JobPaths(folder)


def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0, **change: Any) -> tuple[str, bool]:
    monkeypatch.setattr(service, "build_job_report", lambda *_, **__: {**REPORT, **change})
    done = [InjectedFault(parse_fault("kill worker:1 2.5"), (2, 5), True, "worker:1")]
    first, second = job(tmp_path / "first-1", "a"), job(tmp_path / "second-1", "a")
    return chaos._judge(Paths(tmp_path), first, second, done, code, 2)


def test_a_job_that_ended_as_without_faults_is_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, good = judge(tmp_path, monkeypatch)
    assert good and "1 of 2 faults injected, 0 restarts" in verdict
    assert "recoveries: 2, next step of all after 0.50 s at best, 2.00 s in the middle" in verdict


@pytest.mark.parametrize(
    ("code", "change"),
    [(1, {}), (0, {"ledger": [{"lost": 1, "repeated": 0, "clean": False}]})],
)
def test_one_thing_that_does_not_hold_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, change: dict[str, Any]
) -> None:
    verdict, good = judge(tmp_path, monkeypatch, code, **change)
    assert not good and "NO" in verdict


def test_a_script_that_prints_no_result_is_told_what_to_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "build_job_report", lambda *_, **__: REPORT)
    first, second = job(tmp_path / "first-1"), job(tmp_path / "second-1")
    verdict, good = chaos._judge(Paths(tmp_path), first, second, [], 0, 0)
    assert not good and "have the script print one" in verdict


def test_a_report_names_the_faults(tmp_path: Path) -> None:
    request = JobOptions("c", tmp_path, ("train.py", "--x"), workers=2, stall_timeout=30.0)
    done = [
        InjectedFault(parse_fault("kill"), None, True, ""),
        InjectedFault(parse_fault("disk"), None, False, ""),
    ]
    section = chaos._format_section(request, done, "VERDICT")
    assert "### `train.py --x`: 2 workers, on loss replace, stall timeout 30 s" in section
    assert "Injected: 1 kill." in section and "VERDICT" in section
