"""`insitu.track`: what it logs of fits, and what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import insitu
from insitu.base.errors import InputError
from insitu.base.tracking import TRACK_ENV
from insitu.extensions.tracking import Track, callback, make_callback_of_job, run_folder, trackers
from insitu.train.fit.callbacks import add_tracker


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home in which runs are written and nobody sends them."""
    monkeypatch.setenv("INSITU_HOME", str(tmp_path))
    monkeypatch.setattr(callback, "find_tracker", lambda name: None)
    monkeypatch.setattr(run_folder, "start_sender", lambda folder, *arguments: _Nobody())
    monkeypatch.setattr(run_folder.atexit, "register", lambda call: None)
    monkeypatch.setattr(callback, "_folders", {})
    monkeypatch.setattr(callback, "_of_job", {})
    yield tmp_path


class _Nobody:
    stdin = None


def read(home: Path, kind: str) -> list[dict[str, Any]]:
    (path,) = home.glob("runs/*/*/outbox.jsonl")
    return [each for each in map(json.loads, path.read_text().splitlines()) if each["kind"] == kind]


def fit(*callbacks: Any, epochs: int = 2, model: Any = None, **more: Any) -> Any:
    """Fits a model on 16 rows in steps of 4."""
    if model is None:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((16, 2), np.float32)
    model.fit(x, x[:, :1], batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks), **more)
    return model


def steps(home: Path, name: str = "loss") -> list[int]:
    return [each["step"] for each in read(home, "metrics") if name in each["values"]]


def test_epochs_are_steps_and_a_second_fit_continues_them(home: Path) -> None:
    tracked = insitu.track("mlflow#x", parameters={"rate": np.float32(0.5), "layers": [1, 2]})
    model = fit(tracked, validation_data=(np.ones((4, 2)), np.ones((4, 1))))
    fit(tracked, model=model, epochs=3)
    assert steps(home) == [0, 1, 2, 3, 4] and steps(home, "val_loss") == [0, 1]
    (parameters,) = read(home, "parameters")
    found = parameters["values"]
    assert (found["rate"], found["layers"], found["model/parameters"]) == (0.5, "1 2", 3)
    assert found["optimizer/name"] == "sgd" and found["epochs"] == 2 and "job/workers" not in found
    usage = read(home, "metrics")[-1]["values"]
    assert usage["system/memory_bytes"] > 1e6 and usage["system/cores"] >= 0


def test_a_fit_that_begins_at_a_later_epoch_keeps_its_number(home: Path) -> None:
    tracked = insitu.track("mlflow")
    model = fit(tracked, epochs=2)
    fit(tracked, model=model, epochs=5, initial_epoch=3)
    assert steps(home) == [0, 1, 3, 4]


def test_with_every_steps_are_updates(home: Path) -> None:
    tracked = insitu.track("mlflow", every=3)
    fit(tracked)
    assert steps(home, "batch/loss") == [3, 6] and steps(home) == [4, 8]
    fit(tracked)  # an optimizer that begins at 0 again
    assert steps(home, "batch/loss") == [3, 6, 11, 14] and steps(home) == [4, 8, 12, 16]


def test_files_that_were_there_before_are_not_the_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    (home / "old.keras").touch()
    os.utime("old.keras", (1, 1))
    fit(insitu.track("mlflow"))
    (home / "new.keras").touch()
    (home / "notes.txt").touch()
    (run,) = callback._folders.values()
    assert run.list_files() == [home / "new.keras"]


def test_a_job_with_track_has_the_callback_unless_the_script_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert add_tracker([]) == []
    monkeypatch.setenv(TRACK_ENV, "mlflow#x")
    (added,) = add_tracker([])
    assert isinstance(added, Track) and added.runs_in_chief_alone
    assert add_tracker([]) == [added], "all fits of a script have one"
    own, other = insitu.track("mlflow#x"), insitu.track("mlflow#y")
    assert add_tracker([own]) == [own]
    assert add_tracker([other]) == [other, added]
    assert make_callback_of_job([own]) is None


def test_what_cannot_be_tracked_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="every is a number of steps"):
        insitu.track("mlflow", every=0)
    with pytest.raises(InputError, match="no password"):
        insitu.track("mlflow:http://a:b@host")
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"as insitu\.trackers: .*mlflow"):
        insitu.track("nobody")
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"without mlflow\. Run `pip install 'insitu\[mlflow\]'`"):
        insitu.track("mlflow")
