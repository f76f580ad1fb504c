"""What a task saves is published whole, and nothing of it stays that a killed process has begun."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from insitu.base.disk import written_once
from insitu.base.disk.written_once import WrittenFiles
from insitu.train.files import whole_saves
from insitu.train.files.whole_saves import _replace, _whole


def test_a_task_takes_away_what_its_killed_process_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSITU_TASK", "worker:0")
    monkeypatch.setenv("INSITU_JOB_ID", "rows-1")
    target = tmp_path / "best[1].keras"
    with _whole(target) as place:
        place.write_text("first")
        name = place.parent.name
    own = f"-{os.getpid()}-"
    mine = tmp_path / name.replace(own, "-0-")
    others = tmp_path / name.replace(own, "-0-").replace("worker-0", "worker-1")
    thread = tmp_path / name.replace(own, f"{own}of-another-thread")
    for folder in (mine, others, thread):
        folder.mkdir()
        (folder / target.name).write_text("half")
    with _whole(target) as place:
        place.write_text("second")
    assert target.read_text() == "second"
    assert sorted(tmp_path.iterdir()) == sorted([others, thread, target])


def test_a_folder_takes_the_place_of_one_that_another_task_publishes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, there, left = tmp_path / "new", tmp_path / "there", tmp_path / "left"
    for folder, text in ((new, "new"), (there, "old"), (left, "")):
        folder.mkdir()
        (folder / "file").write_text(text)
    rename, published = os.rename, []

    def rename_as_another_publishes(source: Path, target: str) -> None:
        rename(source, target)
        if not published:
            published.append(source)
            Path(source).mkdir()
            (Path(source) / "file").write_text("of another task")

    monkeypatch.setattr(os, "rename", rename_as_another_publishes)
    _replace(new, there, left)
    assert published == [there]
    assert (there / "file").read_text() == "new"


def test_a_task_loads_what_it_has_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tf = pytest.importorskip("tensorflow")
    code = tmp_path / "code"
    files = WrittenFiles(
        (str(code),), str(tmp_path / "written"), str(tmp_path / "tasks"), str(tmp_path / "own")
    )
    monkeypatch.setattr(written_once, "_installed", [files])
    defined: Any = importlib.import_module("tensorflow.python.saved_model.load")
    loaded: list[str] = []
    monkeypatch.setattr(defined, "load", loaded.append)
    monkeypatch.setattr(tf, "saved_model", tf.saved_model)
    monkeypatch.setattr(tf.saved_model, "load", loaded.append)
    for name in ("tensorflow.saved_model", "tensorflow.saved_model.experimental"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    own = tmp_path / "own" / "exports"
    own.mkdir(parents=True)

    whole_saves._load_own_exports()
    tf.saved_model.load(str(code / "exports"))
    # Keras imports this as it exports. It makes another module `tf.saved_model`.
    importlib.import_module("tensorflow.saved_model.experimental")
    tf.saved_model.load(str(code / "exports"))
    assert loaded == [str(own), str(own)]
