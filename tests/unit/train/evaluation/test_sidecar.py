"""An evaluator scores what a training has saved, as plain Keras scores it, and knows when to end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import pytest
from models import image_model, image_rows, in_shards

import insitu
from insitu.base.context import Context, context, read_context
from insitu.base.errors import TrainingError
from insitu.base.evaluations import read_evaluations
from insitu.base.paths import Paths
from insitu.base.roster import Roster, write_roster
from insitu.base.spec import TaskId
from insitu.train import BackupAndRestore, MultiWorkerMirroredStrategy, SidecarEvaluator
from insitu.train.evaluation import sidecar


def train(directory: Path, epochs: int = 2, more: Sequence[Any] = (), **options: Any) -> Any:
    strategy = MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2))
    with strategy.scope():
        model = image_model()
    x, y = image_rows()
    backup = BackupAndRestore(directory, keep=9)
    model.fit(x, y, batch_size=64, epochs=epochs, verbose=0, callbacks=[backup, *more], **options)
    return model


class StopAfter(keras.callbacks.Callback):
    """Ends a training behind its first epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = True


def refuse_to_wait(seconds: float) -> None:
    raise AssertionError("nothing is to be waited for")


def test_the_last_checkpoint_is_scored_as_keras_scores_the_trained_model(tmp_path: Path) -> None:
    trained = train(tmp_path / "checkpoints")
    x, y = image_rows()
    expected = trained.evaluate(x[:51], y[:51], verbose=0, return_dict=True)
    evaluator = SidecarEvaluator(
        image_model(), (x[:51], y[:51]), tmp_path / "checkpoints", log_dir=tmp_path / "events"
    )
    evaluator.start(refuse_to_wait)
    [found] = evaluator.evaluations
    assert (found.checkpoint, found.epoch, found.step, found.iterations) == ("epoch 2", 2, 0, 8)
    assert found.metrics == pytest.approx(expected, rel=1e-6)
    assert list((tmp_path / "events").iterdir())


def test_an_evaluator_takes_what_comes_and_passes_over_what_it_missed(tmp_path: Path) -> None:
    x, y = image_rows()
    waited = []

    def train_on(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:  # first there is nothing at all
            train(tmp_path, epochs=1)
        if len(waited) == 3:
            train(tmp_path / "more", epochs=4)
            (tmp_path / "more" / "fit-00000").rename(tmp_path / "fit-00001")

    evaluator = SidecarEvaluator(
        image_model(), (x, y), tmp_path, max_evaluations=2, steps=1, poll_seconds=0.5
    )
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr(sidecar.SidecarEvaluator, "_is_last", lambda self, _: len(self.evaluations) == 2)
        evaluator.start(train_on)
    assert waited == [0.5] * 3
    assert [e.checkpoint for e in evaluator.evaluations] == ["epoch 1", "fit 2, epoch 4"]


def test_a_training_that_ended_early_is_named_by_where_it_was(tmp_path: Path) -> None:
    train(tmp_path, epochs=800, more=[StopAfter()])
    evaluator = SidecarEvaluator(image_model(), image_rows(), tmp_path)
    evaluator.start(refuse_to_wait)
    [found] = evaluator.evaluations
    assert (found.checkpoint, found.epoch, found.step) == ("epoch 1, where the fit ended", 1, 0)
    assert found.iterations == 4 and found.identity in {c.name for c in evaluator._source.find()}


def test_a_checkpoint_that_cannot_be_read_is_tried_again_and_then_passed_over(tmp_path: Path) -> None:
    train(tmp_path)
    newest = sorted(tmp_path.glob("*/epoch-*"))[-1] / "arrays.bin"
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-8])
    evaluator = SidecarEvaluator(image_model(), image_rows(), tmp_path)
    evaluator.start(lambda _: newest.write_bytes(whole) and None)
    assert [e.checkpoint for e in evaluator.evaluations] == ["epoch 2"]
    newest.write_bytes(whole[:-8])
    evaluator = SidecarEvaluator(image_model(), image_rows(), tmp_path, max_evaluations=1)
    evaluator.start(lambda _: None)
    assert [e.checkpoint for e in evaluator.evaluations] == ["epoch 1"]


def test_a_model_is_built_by_its_data(tmp_path: Path) -> None:
    x, y = image_rows()
    options = {"optimizer": "adam", "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}

    def make() -> Any:
        model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(2)])
        model.compile(**options)
        return model

    with MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)).scope():
        trained = make()
    trained.fit(x, y, verbose=0, callbacks=[BackupAndRestore(tmp_path)])
    evaluator = SidecarEvaluator(make(), (x, y), tmp_path)
    evaluator.start(refuse_to_wait)
    assert evaluator.evaluations[0].metrics["loss"] == pytest.approx(trained.evaluate(x, y, verbose=0))


# In a job


@pytest.fixture
def evaluator_task(home: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """This process is the evaluator of a job of two shards."""
    job = Paths(home).job("j-1")
    job.root.mkdir(parents=True)
    job.secret.write_bytes(b"s" * 32)
    cluster = {"worker": ["localhost:1", "localhost:2"], "evaluator": ["localhost:3"]}
    config = {"cluster": cluster, "task": {"type": "evaluator", "index": 0}}
    environment = {"JOB_ID": "j-1", "TASK": "evaluator:0", "SHARDS": "/2", "CACHE": ""}
    for name, value in environment.items():
        monkeypatch.setenv(f"INSITU_{name}", value)
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    return context()


def end_training(here: Context) -> None:
    assert here.job is not None
    write_roster(here.job.roster, Roster(2, (), training_over=True))


def test_a_strategy_in_an_evaluator_is_alone_and_trains_nothing(evaluator_task: Context) -> None:
    assert evaluator_task.role == "evaluator" and evaluator_task.shards == ()
    makers: list[Callable[[], Any]] = [
        insitu.MultiWorkerMirroredStrategy,
        insitu.MirroredStrategy,
        insitu.OneDeviceStrategy,
        lambda: insitu.ParameterServerStrategy(mode="sync", replicas_to_aggregate=2),
        insitu.HybridStrategy,
    ]
    x, y = image_rows()
    for make in makers:
        strategy = make()
        assert strategy.membership.is_alone and strategy.delegates_to_keras
        with strategy.scope():
            model = image_model()
        assert len(model.evaluate(x[:8], y[:8], verbose=0)) == 3
        with pytest.raises(TrainingError, match="An evaluator scores checkpoints and trains nothing"):
            model.fit(x, y)


def test_an_evaluator_of_a_cluster_by_hand_is_alone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"cluster": {"worker": ["localhost:1"]}, "task": {"type": "evaluator", "index": 0}}
    here = read_context({"TF_CONFIG": json.dumps(config)})
    assert insitu.MultiWorkerMirroredStrategy(context=here).membership.is_alone


def test_the_job_is_over_for_the_evaluator_once_the_last_checkpoint_is_scored(
    evaluator_task: Context, capsys: pytest.CaptureFixture[str]
) -> None:
    here = evaluator_task
    job = here.job
    assert job is not None
    trained: list[Any] = []

    def train_on(seconds: float) -> None:
        directory = job.root / "made"
        trained.append(train(directory, epochs=len(trained) + 1))
        if len(trained) == 2:
            end_training(here)

    x, y = image_rows()
    evaluator = SidecarEvaluator(image_model(), (x, y), job.root / "made")
    evaluator.start(train_on)
    assert [e.checkpoint for e in evaluator.evaluations] == ["epoch 1", "epoch 2"]
    assert read_evaluations(job.evaluations) == evaluator.evaluations
    assert list(job.summaries(TaskId("evaluator", 0)).iterdir())
    printed = capsys.readouterr().out
    assert "[insitu] evaluation of epoch 2 (8 updates): " in printed
    # Another incarnation scores nothing twice.
    again = SidecarEvaluator(image_model(), (x, y), job.root / "made")
    again.start(refuse_to_wait)
    assert again.evaluations == []


def test_checkpoints_of_the_jobs_own_folder_are_read_with_the_jobs_key(evaluator_task: Context) -> None:
    from insitu.train.checkpoint import Checkpoint, CheckpointStore, checkpoint_key
    from insitu.train.replica import read_state, views

    here, model = evaluator_task, image_model()
    model.optimizer.build(model.trainable_variables)
    values = {name: value.copy() for name, value in views(read_state(model)).items()}
    assert here.checkpoint_dir is not None
    CheckpointStore(here.checkpoint_dir, 0, key=checkpoint_key(here)).save(Checkpoint(1, 0, values, {}))
    end_training(here)
    evaluator = SidecarEvaluator(model, image_rows())
    evaluator.start(refuse_to_wait)
    assert [e.checkpoint for e in evaluator.evaluations] == ["epoch 1"]


def test_a_training_without_checkpoints_is_told(
    evaluator_task: Context, caplog: pytest.LogCaptureFixture
) -> None:
    end_training(evaluator_task)
    SidecarEvaluator(image_model(), image_rows()).start(refuse_to_wait)
    assert "No checkpoint was scored" in caplog.text


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    rows = image_rows()
    with pytest.raises(TrainingError, match="isn't compiled"):
        SidecarEvaluator(keras.Sequential([keras.layers.Dense(1)]), rows, tmp_path)
    with pytest.raises(TrainingError, match="Received: a generator"):
        SidecarEvaluator(image_model(), (row for row in rows), tmp_path)
    with pytest.raises(TrainingError, match="no checkpoint_dir, outside a job"):
        SidecarEvaluator(image_model(), rows)
    with pytest.raises(TrainingError, match=r"above 0, or None. Received: 0"):
        SidecarEvaluator(image_model(), rows, tmp_path, max_evaluations=0)


def test_numbers_of_a_context_stay_in_the_evaluator(evaluator_task: Context) -> None:
    alone = dataclasses.replace(evaluator_task, seed=9).for_strategy()
    assert (alone.seed, alone.num_shards, alone.shards, alone.workers) == (9, 1, (0,), ())
    assert alone.job is None and alone.evaluates and alone.for_strategy() is alone
