"""What the tests of the command line share."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from job_runs import Insitu

from insitu.cluster.client import submission

with warnings.catch_warnings():
    # Typer takes from Click what Click calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer.testing  # noqa: F401


@pytest.fixture
def insitu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Insitu:
    """A home in which jobs are submitted and no supervisor starts."""
    insitu = Insitu(tmp_path)
    insitu.script("print('greeting')")
    monkeypatch.setenv("INSITU_HOME", str(insitu.paths.home))
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    return insitu
