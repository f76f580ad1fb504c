"""What a chief and an evaluator are depends on whether the script imports insitu."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from job_runs import Insitu

from insitu.base.errors import PlacementError
from insitu.base.spec import JobSpec
from insitu.cluster import read_spec, submit
from insitu.cluster.client import submission
from insitu.cluster.client.submission import SCORING_GRACE, imports_insitu
from insitu.cluster.decide import EVALUATOR_GRACE
from insitu.cluster.job_files.records import read_placement
from insitu.cluster.task import resolve_command
from insitu.options import JobOptions


def knows(folder: Path, *command: str) -> bool:
    return imports_insitu(folder, resolve_command(folder, command or ("train.py",), sys.executable))


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
def test_code_that_imports_insitu_is_found(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert knows(tmp_path)


def test_scripts_of_tensorflow_alone_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import tensorflow, mine  # not: import insitu\nprint('import insitu')"
    )
    (tmp_path / "mine.py").write_text("import insitus, train\nfrom .... import far\nfrom .insitu import mine")
    (tmp_path / "other.py").write_text("import insitu")
    (tmp_path / "broken.py").write_text("import")
    assert not knows(tmp_path) and not knows(tmp_path, "broken.py")
    # A program may run any of the files.
    assert knows(tmp_path, "python", "-m", "train")


@pytest.mark.parametrize("signs", [2_000, 100_000])
def test_a_file_too_deep_for_the_parser_is_left_alone(tmp_path: Path, signs: int) -> None:
    (tmp_path / "train.py").write_text("import mine")
    (tmp_path / "mine.py").write_text("x = " + "-" * signs + "1")
    assert not knows(tmp_path)


def make(root: Path, script: str, monkeypatch: pytest.MonkeyPatch, **options: object) -> tuple[JobSpec, list]:
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    monkeypatch.setattr(submission.os, "sched_getaffinity", lambda _: set(range(12)))
    insitu = Insitu(root)
    insitu.script(script)
    request = JobOptions("data/train", insitu.folder, ("train.py",), **options)  # type: ignore[arg-type]
    job = insitu.job(submit(insitu.paths, request))
    placement, _ = read_placement(job)
    return read_spec(job), [(str(t.task), t.shards) for t in placement.tasks]


def test_a_chief_is_one_more_worker_with_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"workers": 2, "chief": True, "evaluator": True}
    spec, tasks = make(tmp_path / "a", "import insitu", monkeypatch, **options)
    assert tasks == [("worker:0", (0,)), ("worker:1", (1,)), ("worker:2", (2,)), ("evaluator:0", ())]
    assert (spec.workers, spec.shards, spec.chief, spec.threads) == (3, 3, False, 3)
    spec, tasks = make(tmp_path / "b", "import tensorflow", monkeypatch, **options)
    assert [name for name, _ in tasks] == ["chief:0", "worker:0", "worker:1", "evaluator:0"]
    assert (spec.workers, spec.chief, spec.threads) == (2, True, 4)
    spec, _ = make(tmp_path / "c", "import insitu", monkeypatch, chief=True, workers=1, shards=4, threads=5)
    assert (spec.workers, spec.shards, spec.threads) == (2, 4, 5)


def test_a_chief_too_many_is_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlacementError, match="fewer than the 5 shards"):
        make(tmp_path, "import insitu", monkeypatch, workers=4, chief=True)
    assert [p.name for p in (tmp_path / "home" / "jobs").iterdir()] == []


def test_an_evaluator_has_time_to_score_if_it_knows_insitu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make(tmp_path / "a", "import insitu", monkeypatch)[0].evaluator_grace == SCORING_GRACE
    assert make(tmp_path / "b", "import os", monkeypatch)[0].evaluator_grace == EVALUATOR_GRACE
    assert make(tmp_path / "c", "import os", monkeypatch, evaluator_grace=5.0)[0].evaluator_grace == 5.0
