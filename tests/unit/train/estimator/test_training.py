"""Training by global steps gives the bits of plain Keras, and what was saved goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from models import image_model, image_rows, in_shards, same_bits, weights

from insitu.errors import TrainingError
from insitu.paths import Paths
from insitu.roster import Member, Roster, write_roster
from insitu.spec import TaskId
from insitu.train import MultiWorkerMirroredStrategy, OneDeviceStrategy
from insitu.train.estimator import (
    BestExporter,
    EvalSpec,
    FinalExporter,
    NanLossDuringTrainingError,
    NanTensorHook,
    RunConfig,
    SessionRunHook,
    TrainSpec,
    train_and_evaluate,
)
from insitu.train.estimator.hooks import read_global_step
from insitu.train.estimator.training import _has_evaluator

# Keras, as it saves
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X, Y = image_rows()


class Batches(keras.utils.PyDataset):
    """7 batches of 29 rows."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return X[29 * index : 29 * index + 29], Y[29 * index : 29 * index + 29]


def model_in(strategy: Any) -> Any:
    keras.utils.set_random_seed(7)
    with strategy.scope():
        return image_model()


def run(model: Any, folder: Path, max_steps: int, interval: int = 5, **more: Any) -> Any:
    hooks = more.pop("hooks", ())
    eval_spec = EvalSpec(lambda: (X[:51], Y[:51]), **{"start_delay_secs": 0, "throttle_secs": 0, **more})
    config = RunConfig(folder, save_checkpoints_steps=interval)
    return train_and_evaluate(model, TrainSpec(Batches, max_steps, hooks), eval_spec, config=config)


class Heard(SessionRunHook):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.steps.append(self.global_step)


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_and_scores_are_those_of_fit(tmp_path: Path, shards: int) -> None:
    def strategy() -> Any:
        return MultiWorkerMirroredStrategy(context=in_shards(tuple(range(shards)), shards))

    plain = model_in(strategy()) if shards > 1 else image_model_plain()
    plain.fit(Batches(), epochs=2, shuffle=False, verbose=0)  # 14 steps
    model, heard = model_in(strategy()), Heard()
    scores, exports = run(model, tmp_path, 14, hooks=[heard])
    assert heard.steps == list(range(1, 15)) and exports == []
    assert same_bits(weights(model), weights(plain))
    expected = plain.evaluate(X[:51], Y[:51], verbose=0, return_dict=True)
    assert scores == pytest.approx(expected, rel=1e-6)


def image_model_plain() -> Any:
    keras.utils.set_random_seed(7)
    return image_model()


def test_evaluations_come_behind_checkpoints_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(model_in(OneDeviceStrategy()), tmp_path, 12)
    lines = [line for line in capsys.readouterr().out.splitlines() if "evaluation of" in line]
    assert [line.split()[4] for line in lines] == ["5", "7", "12"]
    run(model_in(OneDeviceStrategy()), tmp_path / "b", 12, throttle_secs=1e6)
    lines = [line for line in capsys.readouterr().out.splitlines() if "evaluation of" in line]
    assert [line.split()[4] for line in lines] == ["5", "12"]


@pytest.mark.parametrize("batches", [4, 5])
def test_data_of_unknown_length_is_read_again(tmp_path: Path, batches: int) -> None:
    tf = pytest.importorskip("tensorflow")
    signature = (tf.TensorSpec((16, 8, 8, 1)), tf.TensorSpec((16,), tf.int64))

    def read() -> Any:
        yield from (
            (X[16 * index : 16 * index + 16], Y[16 * index : 16 * index + 16]) for index in range(batches)
        )

    def data() -> Any:
        return tf.data.Dataset.from_generator(read, output_signature=signature)

    model, heard = model_in(OneDeviceStrategy()), Heard()
    spec = EvalSpec(data, None, start_delay_secs=0, throttle_secs=0)
    config = RunConfig(tmp_path, save_checkpoints_steps=2)
    train_and_evaluate(model, TrainSpec(data, 11, [heard]), spec, config=config)
    assert heard.steps == list(range(1, 12))


def test_evaluations_change_nothing_of_the_training(tmp_path: Path) -> None:
    often, never = (model_in(MultiWorkerMirroredStrategy()) for _ in range(2))
    run(often, tmp_path / "a", 9, interval=2)
    run(never, tmp_path / "b", 9, interval=2, start_delay_secs=1e6)
    assert same_bits(weights(often), weights(never))


class FailAt(SessionRunHook):
    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if self.global_step == self._step:
            raise ZeroDivisionError("injected")


def test_a_training_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    whole = model_in(MultiWorkerMirroredStrategy())
    run(whole, tmp_path / "whole", 12)
    with pytest.raises(ZeroDivisionError):
        run(model_in(MultiWorkerMirroredStrategy()), tmp_path / "failed", 12, hooks=[FailAt(9)])
    again, heard = model_in(MultiWorkerMirroredStrategy()), Heard()
    run(again, tmp_path / "failed", 12, hooks=[heard])
    assert heard.steps == [8, 9, 10, 11, 12]
    assert same_bits(weights(again), weights(whole))


def test_max_steps_is_the_only_stop_and_may_be_raised(tmp_path: Path) -> None:
    model = model_in(MultiWorkerMirroredStrategy())
    run(model, tmp_path, 6)
    assert read_global_step(model) == 6
    before = [w.copy() for w in weights(model)]
    run(model, tmp_path / "other", 6)  # this model has had them
    later = model_in(MultiWorkerMirroredStrategy())
    run(later, tmp_path, 4)  # the checkpoint has had more
    assert same_bits(weights(model), before) and same_bits(weights(later), before)
    more, heard = model_in(MultiWorkerMirroredStrategy()), Heard()
    run(more, tmp_path, 9, hooks=[heard])
    assert heard.steps == [7, 8, 9] and read_global_step(more) == 9


def test_exports_predict_as_the_model_that_was_scored(tmp_path: Path) -> None:
    model = model_in(MultiWorkerMirroredStrategy())
    _, published = run(model, tmp_path, 7, exporters=[BestExporter(), FinalExporter()])
    assert published[-1] == tmp_path / "export" / "final" / "00000007.keras"
    loaded = keras.models.load_model(published[-1])
    assert np.allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    assert (tmp_path / "export" / "best" / "best.json").exists()


def test_what_cannot_be_trained_so_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"compiled in a strategy's scope. Received: "):
        run(image_model(), tmp_path, 3)
    with OneDeviceStrategy().scope():
        model = image_model(steps_per_execution=2)
    with pytest.raises(TrainingError, match="steps_per_execution=2"):
        run(model, tmp_path, 3)
    spec = EvalSpec(Batches)
    with pytest.raises(TrainingError, match="Received: a generator"):
        model = model_in(OneDeviceStrategy())
        train_and_evaluate(model, TrainSpec(lambda: (row for row in X), 3), spec, config=RunConfig(tmp_path))


# In the evaluator of a job


def test_the_evaluator_scores_what_the_workers_save_and_exports_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    trained = model_in(MultiWorkerMirroredStrategy())
    _, alone = run(trained, folder, 6, exporters=FinalExporter("alone"))
    job = Paths(home).job("j-1")
    job.root.mkdir(parents=True)
    job.secret.write_bytes(b"s" * 32)
    evaluator = Member(TaskId("evaluator", 0), 1, "localhost:3")
    write_roster(job.roster, Roster(2, (), (evaluator,), training_over=True))
    config = {"cluster": {"worker": ["localhost:1"]}, "task": {"type": "evaluator", "index": 0}}
    for name, value in {"JOB_ID": "j-1", "TASK": "evaluator:0", "SHARDS": "/1"}.items():
        monkeypatch.setenv(f"INSITU_{name}", value)
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    from insitu.context import context

    assert _has_evaluator(context())
    for _ in range(2):  # the second incarnation exports again what the first may not have
        scored = model_in(MultiWorkerMirroredStrategy())
        scores, published = run(scored, folder, 6, exporters=FinalExporter())
        assert [path.name for path in published] == ["00000006.keras"] == [path.name for path in alone]
    expected = trained.evaluate(X[:51], Y[:51], verbose=0, return_dict=True)
    assert scores == pytest.approx(expected, rel=1e-6)


def test_no_checkpoint_is_written_of_a_loss_that_isnt_finite(tmp_path: Path) -> None:
    class Broken(Batches):
        is_broken = True

        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return (x * np.nan if index == 6 and self.is_broken else x), y

    def make() -> Any:
        with OneDeviceStrategy().scope():  # without relu, which may take NaN for 0
            model = keras.Sequential(
                [keras.Input(X.shape[1:]), keras.layers.Flatten(), keras.layers.Dense(3)]
            )
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    data = Broken()
    eval_spec = EvalSpec(lambda: (X[:51], Y[:51]), start_delay_secs=0, throttle_secs=0)
    config = RunConfig(tmp_path, save_checkpoints_steps=5)
    with pytest.raises(NanLossDuringTrainingError, match=r"up to step 7\. No checkpoint"):
        train_and_evaluate(make(), TrainSpec(lambda: data, 20), eval_spec, config=config)
    data.is_broken = False  # mended: it goes on from the checkpoint before
    heard = Heard()
    model = make()
    spec = TrainSpec(lambda: data, 20, [heard])
    scores, _ = train_and_evaluate(model, spec, eval_spec, config=config)
    assert np.isfinite(scores["loss"]) and read_global_step(model) == 20
    # Who asks for an end without an error gets it.
    data.is_broken = True
    spec = TrainSpec(lambda: data, 30, [NanTensorHook(fail_on_nan_loss=False)])
    train_and_evaluate(model, spec, eval_spec, config=config)
    assert read_global_step(model) < 30
