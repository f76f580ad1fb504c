"""The entry of task processes runs a script as `python SCRIPT` would, and records how it failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from insitu.base.paths import Paths
from insitu.base.spec import TaskId
from insitu.cluster.task.failure import read_failure


def run(tmp_path: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(script)
    Paths(tmp_path).job("j-1").task(TaskId("worker", 0)).mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [sys.executable, "-P", "-m", "insitu.cluster.task.entry", "train.py", *arguments],
        cwd=tmp_path,
        env={**os.environ, "INSITU_HOME": str(tmp_path), "INSITU_JOB_ID": "j-1", "INSITU_TASK": "worker:0"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_script_sees_its_arguments_its_folder_and_its_name(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("answer = 42")
    done = run(
        tmp_path,
        "import json, sys, helper\nprint(json.dumps([sys.argv, __name__, __file__, helper.answer]))\n",
        "--epochs",
        "3",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["train.py", "--epochs", "3"],
        "__main__",
        str(tmp_path / "train.py"),
        42,
    ]


@pytest.mark.parametrize(
    ("ending", "code", "failure"),
    [
        ("raise ValueError('no')", 1, ("ValueError", "no")),
        ("import sys; sys.exit(3)", 3, ("SystemExit", "")),
        ("import sys; sys.exit('no data')", 1, ("SystemExit", "no data")),
        ("import sys; sys.exit(0)", 0, None),
        ("import sys; sys.exit()", 0, None),
        ("raise KeyboardInterrupt", 130, ("KeyboardInterrupt", "")),
    ],
)
def test_the_way_a_script_ends_is_recorded(
    tmp_path: Path, ending: str, code: int, failure: tuple[str, str] | None
) -> None:
    done = run(tmp_path, f"def main():\n    {ending}\nmain()")
    assert done.returncode == code, done.stderr
    found = read_failure(Paths(tmp_path).job("j-1").failure(TaskId("worker", 0)))
    assert (found and (found.type, found.message)) == failure
    if failure and failure[0] == "ValueError":
        assert "in main" in done.stderr and "insitu" not in done.stderr


@pytest.mark.parametrize("ending", ["", "import sys; sys.exit(0)", "raise SystemExit"])
def test_what_is_to_be_done_behind_a_script_may_fail_its_task(tmp_path: Path, ending: str) -> None:
    begin = """
from insitu.base.errors import Unpublished
from insitu.base.process.script_end import call_at_script_end, runs_script
def fail():
    raise Unpublished("files wait")
assert runs_script()
call_at_script_end(fail)
"""
    done = run(tmp_path, begin + ending)
    assert done.returncode == 1 and "files wait" in done.stderr
    found = read_failure(Paths(tmp_path).job("j-1").failure(TaskId("worker", 0)))
    assert found is not None and (found.type, found.final) == ("Unpublished", True)
    assert run(tmp_path, begin + "import sys; sys.exit(3)").returncode == 3


def test_a_script_that_cannot_be_read_shows_its_line_alone(tmp_path: Path) -> None:
    done = run(tmp_path, "import os\ndef f(:\n    pass\n")
    script = tmp_path / "train.py"
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (plain.returncode, plain.stderr)
    found = read_failure(Paths(tmp_path).job("j-1").failure(TaskId("worker", 0)))
    assert found is not None and found.type == "SyntaxError"


def test_a_command_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "insitu.cluster.task.entry", "missing.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "no script 'missing.py'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_of_tensorflow_alone_is_not_run_between_hosts_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = {"worker": ["10.0.0.1:1", "10.0.0.2:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    done = run(tmp_path, "print('it ran')")
    assert done.returncode == 1 and "TensorFlow's gRPC has no authentication" in done.stderr
    assert "it ran" not in done.stdout
    found = read_failure(Paths(tmp_path).job("j-1").failure(TaskId("worker", 0)))
    assert found is not None and found.type == "InputError"
    monkeypatch.setenv("INSITU_ALLOW_UNAUTHENTICATED", "1")
    assert run(tmp_path, "print('it ran')").stdout == "it ran\n"
