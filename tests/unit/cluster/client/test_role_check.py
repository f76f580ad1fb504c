"""Roles that the strategies of insitu don't know are refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from job_runs import Insitu

from insitu.cluster import Request, list_job_ids, submit
from insitu.cluster.client import submission
from insitu.cluster.client.role_check import check_roles
from insitu.cluster.task import resolve_command
from insitu.errors import JobSpecError


def check(folder: Path, *command: str, **roles: bool) -> None:
    resolved = resolve_command(folder, command or ("train.py",), sys.executable)
    check_roles(folder, resolved, **{"chief": False, "evaluator": False, **roles})


@pytest.mark.parametrize(
    "files",
    [
        {"train.py": "import insitu"},
        {"train.py": "def main():\n    from insitu import layers"},
        {"train.py": "import insitu.parameters as parameters"},
        {"train.py": "import models.net", "models/__init__.py": "", "models/net.py": "import insitu"},
        {"train.py": "from models import net", "models/__init__.py": "", "models/net.py": "import insitu"},
        {
            "train.py": "import models",
            "models/__init__.py": "from .net import *",
            "models/net.py": "from .. import x\nimport insitu",
        },
    ],
)
@pytest.mark.parametrize("role", ["chief", "evaluator"])
def test_code_that_imports_insitu_has_no_chief_and_no_evaluator(
    tmp_path: Path, files: dict[str, str], role: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(JobSpecError, match=f"imports insitu.*worker 0 is the chief.*Received: --{role}"):
        check(tmp_path, **{role: True})
    check(tmp_path)


def test_scripts_of_tensorflow_alone_have_every_role(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import tensorflow, mine  # not: import insitu\nprint('import insitu')"
    )
    (tmp_path / "mine.py").write_text("import insitus, train\nfrom .... import far\nfrom .insitu import mine")
    (tmp_path / "other.py").write_text("import insitu")
    (tmp_path / "broken.py").write_text("import")
    check(tmp_path, chief=True, evaluator=True)
    check(tmp_path, "broken.py", chief=True)
    # A program may run any of the files.
    with pytest.raises(JobSpecError, match=r"other\.py imports insitu"):
        check(tmp_path, "python", "-m", "train", chief=True)


def test_nothing_is_left_of_a_job_that_was_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    insitu = Insitu(tmp_path)
    insitu.script("import insitu")
    with pytest.raises(JobSpecError, match="--evaluator"):
        submit(insitu.paths, Request("data/train", insitu.folder, ("train.py",), workers=1, evaluator=True))
    assert list_job_ids(insitu.paths) == []


@pytest.mark.parametrize("signs", [2_000, 100_000])
def test_a_file_too_deep_for_the_parser_is_left_alone(tmp_path: Path, signs: int) -> None:
    (tmp_path / "train.py").write_text("import mine")
    (tmp_path / "mine.py").write_text("x = " + "-" * signs + "1")
    check(tmp_path, chief=True)
