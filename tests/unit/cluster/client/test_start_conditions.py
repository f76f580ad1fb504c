from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from insitu.base.errors import JobSpecError
from insitu.base.paths import JobPaths
from insitu.cluster.client import start_conditions
from insitu.cluster.client.start_conditions import find_changes, read_keras_settings
from insitu.cluster.job_files import JobEnvironment

DEFAULTS = {
    "backend": "tensorflow",
    "floatx": "float32",
    "epsilon": "1e-07",
    "image_data_format": "channels_last",
}


def test_the_settings_of_keras_are_those_of_its_file_or_its_defaults(tmp_path: Path) -> None:
    assert read_keras_settings({"HOME": str(tmp_path)}) == DEFAULTS
    (tmp_path / ".keras").mkdir()
    file = tmp_path / ".keras" / "keras.json"
    file.write_text('{"floatx": "float16", "more": 1}')
    assert read_keras_settings({"HOME": str(tmp_path)}) == {**DEFAULTS, "floatx": "float16"}
    assert read_keras_settings({"HOME": "/none", "KERAS_HOME": str(file.parent)})["floatx"] == "float16"
    for broken in ("[]", "{"):
        file.write_text(broken)
        assert read_keras_settings({"HOME": str(tmp_path)}) == DEFAULTS


def test_what_has_changed_since_the_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, theirs = JobPaths(tmp_path / "job"), tmp_path / "theirs"
    for folder in (job.code / "inner", theirs / "inner"):
        folder.mkdir(parents=True)
        (folder / "a.py").write_text("1")
        (folder.parent / "train.py").write_text("1")
        (folder.parent / "rows.csv").write_text(str(folder))
    monkeypatch.setattr(start_conditions, "read_versions", lambda: {"python": "3.11", "keras": "3.15"})
    kept = JobEnvironment(
        {}, versions={"python": "3.11", "keras": "3.15"}, keras=DEFAULTS, job_dir=str(theirs)
    )
    own = {"HOME": str(tmp_path)}
    assert find_changes(job, kept, own) == []
    (theirs / "inner" / "a.py").write_text("2")
    (theirs / "train.py").unlink()
    monkeypatch.setattr(
        start_conditions, "read_versions", lambda: {"python": "3.12", "keras": "3.15", "jax": "1"}
    )
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    found = find_changes(job, kept, {"KERAS_HOME": str(tmp_path)})
    assert [line.partition(": ")[2] for line in found[:2]] == [
        "jax none, here 1, python 3.11, here 3.12",
        "backend tensorflow, here torch",
    ]
    assert found[2].endswith(f"differs from: {theirs}/inner/a.py")


@pytest.mark.parametrize(("limit", "refused"), [(None, False), (16 << 20, False), (12 << 10, True)])
def test_files_must_be_allowed_to_become_as_large_as_those_of_a_job(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, refused: bool
) -> None:
    monkeypatch.setattr(start_conditions, "read_file_size_limit", lambda: limit)
    with (
        pytest.raises(JobSpecError, match=r"limit of 12 KiB a file.*ulimit -f 16384")
        if refused
        else contextlib.nullcontext()
    ):
        start_conditions.check_file_size_limit()
