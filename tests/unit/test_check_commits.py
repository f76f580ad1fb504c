"""The check of commit subjects that `make check` runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import check_commits
import pytest


@pytest.mark.parametrize(
    "subject",
    [
        "exchange: refuse arrays of another byte order",
        "exchange: Rename Meeting to ShmBarrier",
        "train/fit: split the trainer from the patching of Keras",
        "exchange, train: pass the group by name",
        "docs: address what newcomers stumble over",
        "parameters: seed rows by table",
        "build: bring the lock file up to date",
        "grid: x" + "y" * 65,
        "Merge branch 'docs'",
        'Revert "grid: name the row of an empty cell, a subject that is as long as git makes it"',
    ],
)
def test_good_subjects_pass(subject: str):
    assert check_commits.problem_of(subject) is None


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("grid: x" + "y" * 66, "73 characters"),
        ("Refuse arrays of another byte order", "form"),
        ("exchange:refuse arrays", "form"),
        ("exchange: ", "form"),
        ("Exchange: refuse arrays", "form"),
        ("fixup! exchange: refuse arrays", "form"),
        ("kitchen: add a door", "'kitchen'"),
        ("grid, kitchen: add a door", "'kitchen'"),
        ("grid: added a door", "'added'"),
        ("grid: adds a door", "'adds'"),
        ("grid: Adding a door", "'Adding'"),
    ],
)
def test_bad_subjects_are_told_why(subject: str, problem: str):
    assert problem in (check_commits.problem_of(subject) or "")


def test_the_prefixes_cover_every_room():
    source = check_commits.ROOT / "src" / "insitu"
    rooms = {path.parent.name for path in source.glob("*/__init__.py")}
    assert rooms
    assert rooms <= set(check_commits.ROOMS)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    commit(tmp_path, "Everything before the rule")
    return tmp_path


def git(repository: Path, *arguments: str) -> str:
    # Whatever the user has set for git, such as signing, is left out.
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(repository), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(repository: Path, subject: str) -> str:
    git(repository, "commit", "--quiet", "--allow-empty", "--no-verify", "--message", subject)
    return git(repository, "rev-parse", "HEAD")


def run_main(repository: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(check_commits, "ROOT", repository)
    monkeypatch.setattr(check_commits, "BASE", base)
    return check_commits.main()


def test_commits_after_the_base_are_checked(repository, monkeypatch, capsys):
    base = git(repository, "rev-parse", "HEAD")
    commit(repository, "grid: name the row of an empty cell")
    assert run_main(repository, base, monkeypatch) == 0
    assert "checked: 1." in capsys.readouterr().out
    bad = commit(repository, "A subject of the old kind")
    assert run_main(repository, base, monkeypatch) == 1
    errors = capsys.readouterr().err
    assert bad[:7] in errors
    assert "Reword" in errors


@pytest.mark.parametrize("where", ["shallow", "archive", "no git"])
def test_a_history_without_the_base_passes_and_says_so(where, repository, tmp_path, monkeypatch, capsys):
    base = git(repository, "rev-parse", "HEAD")
    commit(repository, "A subject of the old kind")
    checkout = tmp_path / "checkout"
    if where == "shallow":
        git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repository}", str(checkout))
    else:
        checkout.mkdir()
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    if where == "no git":
        monkeypatch.setenv("PATH", str(checkout))
    assert run_main(checkout, base, monkeypatch) == 0
    assert f"{base[:7]} is not in the history" in capsys.readouterr().out
