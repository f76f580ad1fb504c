"""`insitu export` of a job's models. That of rows is tested in tests/unit/grid/caches."""

from __future__ import annotations

import functools
from pathlib import Path

import command_line
import pytest
from published_models import publish_models, publish_saved_model

from insitu.base.errors import InputError, UnknownJob
from insitu.base.paths import JobPaths, Paths

run = functools.partial(command_line.run, "export")


@pytest.fixture
def job(home: Path) -> JobPaths:
    return publish_models(home)


def test_the_newest_model_the_best_one_and_that_of_an_exporter_are_copied(
    job: JobPaths, tmp_path: Path
) -> None:
    text = run("people", str(tmp_path / "a.keras")).stderr
    assert (tmp_path / "a.keras").read_text() == "final 300"
    assert "final of people-aa11 at step 300" in text
    run("people", str(tmp_path), "--best")
    assert (tmp_path / "00000200.keras").read_text() == "best 200"
    run("people", str(tmp_path / "b.keras"), "--exporter", "best")
    assert (tmp_path / "b.keras").read_text() == "best 200"
    publish_saved_model(job)
    run("people", str(tmp_path / "c.keras"))  # the newest of its format
    assert (tmp_path / "c.keras").read_text() == "final 300"
    run("people", str(tmp_path / "served"))
    assert (tmp_path / "served" / "variables" / "data").read_text() == "latest 400"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("people", "there.keras"), "replaces nothing"),
        (("people", "model"), r"ends with \.keras"),
        (("people", "none/model.keras"), "folder that is there"),
        (("people", "a.keras", "--exporter", "latest"), "are best, final"),
        (("people", "a.keras", "--exporter", "best", "--best"), "Leave one out"),
        (("people", "a.keras", "--key", "id"), "--key is said of"),
        (("people", "ignite://grid/A", "--best"), "--best is said of"),
    ],
)
def test_what_can_not_be_copied_is_told(
    job: JobPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.keras").write_text("mine")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=error):
        run(*arguments)
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "there.keras").read_text() == "mine"


def test_a_job_without_models_and_an_unknown_one_are_told(home: Path, tmp_path: Path) -> None:
    Paths(home).job("empty-bb22").root.mkdir(parents=True)
    with pytest.raises(InputError, match="Models of a job are those that its script saves"):
        run("empty", str(tmp_path))
    with pytest.raises(UnknownJob):
        run("nothing", str(tmp_path))
