"""Who hears of a batch: those that do something then, and nobody where nobody does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from models import in_shards

import insitu
from insitu.base.errors import TrainingError
from insitu.train import MultiWorkerMirroredStrategy
from insitu.train.fit.callback_list import flatten_callbacks, own_callbacks
from insitu.train.fit.meetings import FitMeetings
from insitu.train.fit.trainer import trainer_of

tf = pytest.importorskip("tensorflow")

X, Y = np.ones((10, 3), "float32"), np.ones((10, 1), "float32")


def model_in_scope() -> Any:
    with MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def fit(model: Any, *callbacks: Any, x: Any = X, y: Any = Y, verbose: int = 0) -> Any:
    batch_size = None if y is None else 2
    options = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": verbose}
    return model.fit(x, y, validation_data=(X, Y), callbacks=list(callbacks), **options)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of Keras' own list about batches."""
    made: list[str] = []
    for event in ("train_batch_begin", "train_batch_end", "test_batch_begin", "test_batch_end"):
        original = getattr(keras.callbacks.CallbackList, f"on_{event}")

        def noted(self: Any, batch: int, logs: Any = None, event: str = event, call: Any = original) -> None:
            made.append(event)
            call(self, batch, logs)

        monkeypatch.setattr(keras.callbacks.CallbackList, f"on_{event}", noted)
    return made


class OfEpochs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        pass


class OldName(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[int, Any]] = []

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.heard.append((batch, logs))


class MadeLate(OfEpochs):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.on_train_batch_begin = lambda batch, logs=None: self.heard.append(batch)


def test_nobody_is_called_where_nobody_does_anything(calls: list[str], tmp_path: Any):
    fit(model_in_scope(), OfEpochs(), keras.callbacks.EarlyStopping(), insitu.BackupAndRestore(tmp_path))
    assert calls == []


def test_who_does_something_is_called_with_numbers(calls: list[str]):
    old, late, tests = OldName(), MadeLate(), []
    tested = keras.callbacks.LambdaCallback()
    tested.on_test_batch_end = lambda batch, logs=None: tests.append(batch)
    fit(model_in_scope(), old, late, tested)
    assert [batch for batch, _ in old.heard] == [0, 1, 2, 3, 4] * 2
    assert all(type(logs["loss"]) is float for _, logs in old.heard)
    assert late.heard == tests == [0, 1, 2, 3, 4] * 2
    assert "test_batch_begin" not in calls


def test_a_line_for_an_epoch_counts_steps_of_data_without_length(capsys: pytest.CaptureFixture[str]):
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(2).filter(lambda x, y: True)
    with pytest.warns(UserWarning, match="ran out of data"):
        fit(model_in_scope(), x=batches, y=None, verbose=2)
    assert capsys.readouterr().out.count("5/5 -") == 2


# Of NumPy, about how Keras reads a variable that it saves.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_what_the_chief_restores_is_shared_as_the_training_begins(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    model, shared = model_in_scope(), []
    monkeypatch.setattr(FitMeetings, "share_restored", lambda self: shared.append(1))
    fit(model, OfEpochs())
    assert shared == []
    fit(model, OfEpochs(), keras.callbacks.BackupAndRestore(tmp_path / "backup"))
    assert shared == [1]


def test_callbacks_are_taken_out_of_lists():
    one, other = OfEpochs(), OldName()
    assert flatten_callbacks(None) == []
    assert flatten_callbacks(one) == [one]
    assert flatten_callbacks([one, [other]]) == [one, other]
    of_keras = keras.callbacks.CallbackList([one, other], add_history=True, add_progbar=True)
    assert flatten_callbacks(of_keras) == [one, other]


def test_two_callbacks_that_restore_a_training_are_refused(tmp_path: Path) -> None:
    both = insitu.BackupAndRestore(tmp_path / "a"), keras.callbacks.BackupAndRestore(tmp_path / "b")
    with pytest.raises(TrainingError, match=r"Leave keras.callbacks.BackupAndRestore out"):
        fit(model_in_scope(), *both)


def test_only_the_chief_runs_callbacks_that_write_files(tmp_path: Path) -> None:
    class Mine(keras.callbacks.ModelCheckpoint):
        pass

    writers = [
        keras.callbacks.BackupAndRestore(tmp_path),
        keras.callbacks.ModelCheckpoint(tmp_path / "a.keras"),
        keras.callbacks.CSVLogger(tmp_path / "a.csv"),
        keras.callbacks.TensorBoard(tmp_path),
        Mine(tmp_path / "b.keras"),
    ]
    others = [keras.callbacks.EarlyStopping(), keras.callbacks.History()]
    assert own_callbacks([*writers, *others], True) == [*writers, *others]
    assert own_callbacks([*writers, *others], False) == others


class Equal(OldName):
    """A callback that is equal to any other, as a class of the user's may be."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_callbacks_are_told_apart_by_identity() -> None:
    model, one, other = model_in_scope(), Equal(), Equal()
    found: list[Any] = []
    watching = keras.callbacks.LambdaCallback()
    watching.on_train_batch_begin = lambda batch, logs=None: found.append(
        [callback for callback in trainer_of(model).callbacks._batch_callbacks if type(callback) is Equal]
    )
    fit(model, one, watching, other)
    assert len(one.heard) == len(other.heard) == 10
    assert all(a is one and b is other for a, b in found)


class Stops(Exception):
    """Ends a script."""


class Listing(keras.callbacks.Callback):
    """Remembers what it has heard; fails at one event."""

    def __init__(self, fails_at: str = "") -> None:
        super().__init__()
        self.fails_at = fails_at
        self.heard: list[str] = []

    def _hear(self, event: str) -> None:
        if event == self.fails_at:
            raise Stops
        self.heard.append(event)

    def on_train_begin(self, logs: Any = None) -> None:
        self._hear("train")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.opened = object()
        self._hear(f"epoch {epoch}")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._hear(f"batch {batch}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._hear(f"batch end {batch}")

    def on_test_begin(self, logs: Any = None) -> None:
        self._hear(f"tests {self.heard.count('tests 0')}")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._hear(f"test {batch}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._hear(f"end {epoch}")

    def on_train_end(self, logs: Any = None) -> None:
        self._hear("train end")


@pytest.mark.parametrize("fails_at", ["end 0", "train end"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("options", [{}, {"initial_epoch": 1, "epochs": 3}, {"validation_freq": 2}])
def test_a_script_that_goes_on_hears_each_event_once(
    tmp_path: Path, stride: int, options: dict[str, Any], fails_at: str
) -> None:
    """Epochs have five steps, so that the last execution may have fewer than Keras counts."""

    def run(folder: Path, fails_at: str = "") -> list[str]:
        model, listing = model_in_scope(), Listing(fails_at)
        model.steps_per_execution = stride
        kept = insitu.BackupAndRestore(folder, save_freq=stride)
        whole = {"batch_size": 2, "epochs": 2, "verbose": 0, "validation_data": (X, Y), **options}
        model.fit(X, Y, callbacks=[listing, kept], shuffle=False, **whole)
        return listing.heard

    expected = run(tmp_path / "whole")
    initial = options.get("initial_epoch", 0)
    fails_at = {"end 0": f"end {initial}"}.get(fails_at, fails_at)
    assert fails_at in expected
    with pytest.raises(Stops):
        run(tmp_path / "again", fails_at)
    assert run(tmp_path / "again") == expected
