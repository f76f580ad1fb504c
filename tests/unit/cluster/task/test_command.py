"""What JOB_CMD means in a job's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from insitu.base.errors import JobSpecError
from insitu.cluster.task.command import ResolvedCommand, fill_placeholders, resolve_command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    (folder / "lib").mkdir(parents=True)
    for name in ("train.py", "lib/more.py", "run.sh", "notes.txt"):
        (folder / name).write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    return folder


@pytest.mark.parametrize("before", [(), ("python",), ("python3",), ("python3.11",)])
@pytest.mark.parametrize("script", ["train.py", "./train.py", "lib/more.py"])
def test_a_script_is_run_by_this_interpreter(folder: Path, before: tuple[str, ...], script: str) -> None:
    resolved = resolve_command(folder, (*before, script, "--x", "1"), "/py")
    assert resolved == ResolvedCommand(True, (str(folder / script), "--x", "1"))


def test_python_with_options_is_executed(folder: Path) -> None:
    assert resolve_command(folder, ("python", "-m", "m"), "/py") == ResolvedCommand(False, ("/py", "-m", "m"))


def test_a_program_is_found_in_the_folder_first_then_on_the_path(folder: Path) -> None:
    assert resolve_command(folder, ("run.sh", "a"), "/py") == ResolvedCommand(
        False, (str(folder / "run.sh"), "a")
    )
    assert resolve_command(folder, ("./run.sh",), "/py").arguments == (str(folder / "run.sh"),)
    assert resolve_command(folder, ("sh",), "/py").arguments[0].endswith("/sh")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("gone.py",), r"no script 'gone.py'. It holds: lib/, notes.txt, run.sh, train.py"),
        (("python", "gone.py"), "no script 'gone.py'"),
        (("python",), "runs nothing"),
        (("notes.txt",), "not executable"),
        (("--workers", "2", "train.py"), "Options of insitu start come before the cache.*'--workers' behind"),
        (("no-such-program",), "neither a file of JOB_DIR nor a program"),
        (("./no-such-file",), "neither a file"),
        (("python train.py",), "without quotes"),
        (("train.py --epochs 3",), "without quotes"),
        (("../outside.py",), "no script"),
        (("lib",), "neither a file"),
    ],
)
def test_what_cannot_be_run_is_refused(folder: Path, command: tuple[str, ...], message: str) -> None:
    (folder.parent / "outside.py").write_text("")
    with pytest.raises(JobSpecError, match=message):
        resolve_command(folder, command, "/py")


def test_an_empty_folder_is_called_empty(tmp_path: Path) -> None:
    with pytest.raises(JobSpecError, match="It is empty"):
        resolve_command(tmp_path, ("train.py",), "/py")


def test_a_classic_script_gets_its_flags() -> None:
    cluster = {"worker": ["h:1", "h:2"], "ps": ["h:3", "g:4"]}
    given = ("train.py", "--job_name={job_name}", "--task_index", "{task_index}", "--ps_hosts={ps_hosts}")
    given += ("--worker_hosts={worker_hosts}", "--chief={chief_hosts}", '{"a": {b}}', "{job_names}")
    environ = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 1}})}
    assert fill_placeholders(given, environ) == (
        *("train.py", "--job_name=ps", "--task_index", "1", "--ps_hosts=h:3,g:4"),
        *("--worker_hosts=h:1,h:2", "--chief=", '{"a": {b}}', "{job_names}"),
    )
    # One worker has no cluster.
    assert fill_placeholders(("{job_name}:{task_index}{ps_hosts}",), {}) == ("worker:0",)
