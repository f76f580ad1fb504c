"""Mistyped commands, and those without what they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from insitu.cli import build_app


def test_a_command_is_suggested_once() -> None:
    app: Any = build_app()
    result = CliRunner().invoke(app, ["scael"])
    assert result.exit_code == 2
    assert result.output.count("Did you mean") == 1 and "'scale'" in result.output


@pytest.mark.parametrize(
    ("given", "missing", "example"),
    [
        ((), "CACHE, JOB_DIR, JOB_CMD", "insitu start digits/train ./my_job train.py"),
        (("--workers", "2", "cats"), "JOB_DIR, JOB_CMD", "insitu start cats ./my_job train.py"),
        (("cats", "job"), "JOB_CMD", "insitu start cats job train.py"),
        (("folder", "fit.py"), "CACHE", "insitu start digits/train folder fit.py"),
        (("job.zip", "fit.py"), "CACHE", "insitu start digits/train job.zip fit.py"),
        (("cats", "fit.py"), "JOB_DIR", "insitu start cats ./my_job fit.py"),
        (("folder",), "CACHE, JOB_CMD", "insitu start digits/train folder train.py"),
        (("fit.py",), "CACHE, JOB_DIR", "insitu start digits/train ./my_job fit.py"),
    ],
)
def test_a_start_without_its_arguments_says_by_example_what_is_missing(
    given: tuple[str, ...],
    missing: str,
    example: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    app: Any = build_app()
    result = CliRunner().invoke(app, ["start", *given], env={"COLUMNS": "400", "NO_COLOR": "1"})
    assert result.exit_code == 2
    shown = " ".join(result.output.split())
    assert f"Received: {' '.join(given) or 'none of them'}. Missing: {missing}. Example: {example}" in shown
