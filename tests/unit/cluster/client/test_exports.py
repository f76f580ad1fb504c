"""Models of a job are found and copied."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from published_models import publish_models, publish_saved_model

from insitu.base.errors import InputError
from insitu.base.paths import JobPaths
from insitu.cluster.client.exports import copy_export, find_export


@pytest.fixture
def job(home: Path) -> JobPaths:
    return publish_models(home)


def test_a_copy_has_the_mode_that_the_umask_leaves(job: JobPaths, tmp_path: Path) -> None:
    """A server of another user reads it."""
    publish_saved_model(job)
    os.chmod(job.exports / "final" / "00000300.keras", 0o600)
    umask = os.umask(0o022)
    try:
        copy_export(find_export(job, exporter="final"), tmp_path / "a.keras")
    finally:
        os.umask(umask)
    assert (tmp_path / "a.keras").stat().st_mode & 0o777 == 0o644


def test_best_means_one_exporter(job: JobPaths) -> None:
    (job.exports / "final" / "best.json").write_text("{}")
    with pytest.raises(InputError, match="with best, final of the exporters best, final"):
        find_export(job, best=True)
    for name in ("best", "final"):
        (job.exports / name / "best.json").unlink()
    with pytest.raises(InputError, match="with none of the exporters"):
        find_export(job, best=True)


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_model_that_its_exporter_removes_meanwhile_leaves_nothing(
    job: JobPaths, tmp_path: Path, is_folder: bool
) -> None:
    if is_folder:
        publish_saved_model(job)
    model = find_export(job)
    assert (model.format == "tf_saved_model") == is_folder
    shutil.rmtree(job.exports)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match="removed while it was copied"):
        copy_export(model, tmp_path / ("model" if is_folder else "model.keras"))
    assert sorted(tmp_path.iterdir()) == before
