"""A script that runs again after a failure ends with the bits of an undisturbed run."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import pytest
from models import image_model, image_rows, in_shards, same_bits, weights

from insitu.base.errors import CheckpointError, TrainingError
from insitu.train import BackupAndRestore, MultiWorkerMirroredStrategy
from insitu.train.checkpoint import store
from insitu.train.fit.trainer import trainer_of


class Heard(list[tuple[int, int]]):
    """No plain value, so that it tells what one process has heard."""


class FailAt(keras.callbacks.Callback):
    """Raises once, after a step of an epoch, and notes all steps that callbacks hear of."""

    def __init__(self, epoch: int, step: int) -> None:
        super().__init__()
        self._at = (epoch, step)
        self._epoch = 0
        self.heard = Heard()
        self.told: list[tuple[int, int]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.heard.append((self._epoch, batch))
        self.told.append((self._epoch, batch))
        if (self._epoch, batch) == self._at:
            raise ZeroDivisionError("injected")


def run(strategy: Any, rows: Any, *callbacks: Any, epochs: int = 3) -> tuple[Any, Any]:
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = image_model()
    history = model.fit(
        *rows,
        batch_size=32,
        epochs=epochs,
        verbose=0,
        validation_data=(rows[0][:51], rows[1][:51]),
        callbacks=list(callbacks),
    )
    return model, history.history


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Any, Any]:
    """The weights and the history of a run over two shards in which nothing fails."""
    model, history = run(MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)), image_rows())
    return weights(model), history


@pytest.mark.parametrize(
    ("save_freq", "fail_at"),
    [("epoch", (0, 1)), ("epoch", (1, 4)), (2, (1, 4)), (2, (2, 0)), (1, (0, 1)), (1, (2, 0))],
)
def test_a_second_run_ends_like_an_undisturbed_one(
    rows, strategy_over, tmp_path, undisturbed, save_freq, fail_at
):
    expected, history = undisturbed
    failure = FailAt(*fail_at)
    with pytest.raises(ZeroDivisionError):
        run(strategy_over(2), rows, BackupAndRestore(tmp_path, save_freq=save_freq), failure)
    assert failure.heard[-1] == fail_at
    again = FailAt(-1, -1)
    model, resumed = run(strategy_over(2), rows, BackupAndRestore(tmp_path, save_freq=save_freq), again)
    assert same_bits(weights(model), expected)
    assert resumed["loss"][-1] == history["loss"][-1]
    assert resumed["val_accuracy"][-1] == history["val_accuracy"][-1]
    # Callbacks hear of each step once, from where the last checkpoint stood.
    assert again.heard == [(e, s) for e in range(3) for s in range(7)][-len(again.heard) :]
    # What they remember continues from there too, as do the epochs' results.
    assert again.told == [(e, s) for e in range(3) for s in range(7)]
    assert resumed == history
    steps_done = fail_at[0] * 7 + fail_at[1] + 1
    assert len(again.heard) <= 21 - (steps_done if save_freq == 1 else 0) + (1 if save_freq == 1 else 0)


def test_a_script_that_is_started_again_says_from_where_it_goes_on(
    tmp_path: Path, rows: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(incarnation: int) -> str:
        context = replace(in_shards((0, 1), 2), incarnation=incarnation)
        strategy = MultiWorkerMirroredStrategy(context=context)
        run(strategy, rows, BackupAndRestore(tmp_path / "saved"), epochs=1)
        return capsys.readouterr().err

    assert "[insitu]" not in train(1), "nobody expects a checkpoint"
    assert "continues from the checkpoint of epoch 1, step 0" in train(2)
    for state in (tmp_path / "saved").rglob("state.json"):
        state.write_text("{")
    assert f"starts from its beginning: {tmp_path / 'saved'}" in train(2)


def test_a_second_run_waits_for_what_the_first_still_writes(
    rows, strategy_over, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    write = store.write_pages

    def write_slowly(path: Path, pages: memoryview, size: int) -> None:
        threading.Event().wait(0.3)
        write(path, pages, size)

    monkeypatch.setattr(store, "write_pages", write_slowly)
    with pytest.raises(ZeroDivisionError):
        run(strategy_over(1), rows, BackupAndRestore(tmp_path, save_freq=1), FailAt(1, 4))
    again = FailAt(-1, -1)
    run(strategy_over(1), rows, BackupAndRestore(tmp_path, save_freq=1), again)
    assert again.heard[0] == (1, 4)


def test_a_finished_fit_is_not_repeated_and_the_next_one_runs(rows, strategy_over, tmp_path):
    strategy = strategy_over(1)
    first, _ = run(strategy, rows, BackupAndRestore(tmp_path), epochs=2)
    heard = FailAt(-1, -1)
    strategy = strategy_over(1)
    model, _ = run(strategy, rows, BackupAndRestore(tmp_path), heard, epochs=2)
    assert heard.heard == []
    assert same_bits(weights(model), weights(first))
    model.fit(*rows, batch_size=32, epochs=1, verbose=0, callbacks=[BackupAndRestore(tmp_path), heard])
    assert len(heard.heard) == 7
    assert sorted(p.name for p in Path(tmp_path).glob("fit-*")) == ["fit-00000", "fit-00001"]


def test_early_stopping_is_final(rows, strategy_over, tmp_path):
    class StopAfterFirst(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    model, _ = run(strategy_over(1), rows, BackupAndRestore(tmp_path), StopAfterFirst(), epochs=5)
    heard = FailAt(-1, -1)
    again, _ = run(strategy_over(1), rows, BackupAndRestore(tmp_path), heard, epochs=5)
    assert heard.heard == []
    assert same_bits(weights(model), weights(again))


def test_another_model_is_refused_before_anything_changes(rows, strategy_over, tmp_path):
    run(strategy_over(1), rows, BackupAndRestore(tmp_path), epochs=1)
    with strategy_over(1).scope():
        other = image_model(batch_norm=False)
    before = weights(other)
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*is of another model.*must have the model"):
        other.fit(*rows, batch_size=32, verbose=0, callbacks=[BackupAndRestore(tmp_path)])
    assert same_bits(before, weights(other))


def test_outside_a_job_nothing_is_saved_by_default(rows, strategy_over, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(strategy_over(1), rows, BackupAndRestore(), epochs=1)
    assert list(tmp_path.iterdir()) == []


def test_bad_use_is_named(rows):
    with pytest.raises(TrainingError, match="save_freq"):
        BackupAndRestore(save_freq=0)
    model = image_model()
    assert trainer_of(model) is None
    with pytest.raises(TrainingError, match="scope"):
        model.fit(*rows, verbose=0, callbacks=[BackupAndRestore()])
