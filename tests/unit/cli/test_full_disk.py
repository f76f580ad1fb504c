"""A command that follows a job says that its disk is full, once."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from insitu.base.paths import Paths
from insitu.cli.logs import watch_disk

ROOM = {"f_bavail": 9, "f_bfree": 9, "f_files": 9, "f_favail": 9, "f_ffree": 9}


@pytest.mark.parametrize(
    ("user", "state", "is_full"),
    [
        (1, {}, False),
        (1, {"f_bavail": 0}, True),
        (0, {"f_bavail": 0}, False),  # what is left is root's
        (0, {"f_bfree": 0}, True),
        (1, {"f_favail": 0}, True),
        (0, {"f_ffree": 0}, True),
        (1, {"f_files": 0, "f_favail": 0}, False),  # a file system without such a limit
    ],
)
def test_a_full_disk_is_told_once_while_the_job_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    user: int,
    state: dict[str, int],
    is_full: bool,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**ROOM | state))
    over = False
    look = watch_disk(Paths(tmp_path).job("digits-1"), lambda: over)
    assert not look() and not look()
    said = capsys.readouterr().err
    assert said.count("is full") == is_full
    assert ("insitu stop digits-1" in said) is is_full
    over = True
    assert look() and not capsys.readouterr().err


def test_a_job_that_is_gone_has_no_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not watch_disk(Paths(tmp_path).job("digits-1"), lambda: False)()
    assert not capsys.readouterr().err
