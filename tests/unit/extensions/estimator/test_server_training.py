"""Training by global steps on parameter servers: its end, its bits, its checkpoints, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from models import Batches, image_model, image_rows, in_shards, same_bits, weights

import insitu
from insitu.base.errors import CheckpointError, InputError, TrainingError
from insitu.base.paths import Paths
from insitu.extensions.estimator import (
    DNNLinearCombinedClassifier,
    Estimator,
    EstimatorSpec,
    EvalSpec,
    ModeKeys,
    RunConfig,
    SessionRunHook,
    TrainOp,
    TrainSpec,
    stop_if_higher_hook,
    train_and_evaluate,
)
from insitu.extensions.estimator.evaluations import evaluate_model
from insitu.extensions.estimator.hooks import LoggingTensorHook, StepCounterHook, read_global_step
from insitu.extensions.estimator.server_training import check_tables, load_newest, open_store
from insitu.grid import import_cache
from insitu.train import HybridStrategy, MultiWorkerMirroredStrategy, ParameterServerStrategy
from insitu.train.evaluation import find_checkpoints, load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
X, Y = image_rows()


class Heard(SessionRunHook):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.steps.append(self.global_step)


def on_servers(mode: Any, shards: int = 2) -> Any:
    return ParameterServerStrategy(mode=mode, context=in_shards(tuple(range(shards)), shards))


def model_in(strategy: Any) -> Any:
    keras.utils.set_random_seed(7)
    with strategy.scope():
        return image_model()


def run(model: Any, folder: Path | None, max_steps: int | None, *hooks: Any, interval: int = 4) -> Any:
    eval_spec = EvalSpec(lambda: (X[:51], Y[:51]), start_delay_secs=0, throttle_secs=0)
    config = None if folder is None else RunConfig(folder, save_checkpoints_steps=interval)
    return train_and_evaluate(model, TrainSpec(Batches, max_steps, hooks), eval_spec, config=config)


def test_in_mode_sync_weights_and_scores_are_those_of_fit(tmp_path: Path) -> None:
    plain = model_in(MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)))
    plain.fit(Batches(), epochs=2, shuffle=False, verbose=0)  # 14 steps
    model, heard = model_in(on_servers("sync")), Heard()
    scores, _ = run(model, tmp_path, 10, heard)
    run(model, tmp_path, 14, heard)  # continues in the next fit, at the beginning of the data
    assert heard.steps == list(range(1, 15)) and read_global_step(model) == 14
    other = model_in(on_servers("sync"))
    scores, _ = run(other, tmp_path / "whole", 14)
    assert same_bits(weights(other), weights(plain))
    expected = plain.evaluate(X[:51], Y[:51], verbose=0, return_dict=True)
    assert scores == pytest.approx({**expected, "global_step": 14}, rel=1e-6)


def test_where_pushes_are_updates_they_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, heard = model_in(on_servers("async")), Heard()
    run(model, tmp_path, 14, heard, LoggingTensorHook(["loss"], 5), StepCounterHook(5))
    assert heard.steps == [2, 4, 6, 8, 10, 12, 14]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if "loss = " in line and "evaluation" not in line] == [
        "6:",
        "10:",
    ]
    assert len([line for line in lines if "steps/s" in line]) == 2
    assert [line.split()[4] for line in lines if "evaluation of" in line] == ["4", "8", "12", "14"]


def test_a_later_run_goes_on_from_the_weights_and_the_count(tmp_path: Path) -> None:
    model = model_in(on_servers("async", 1))
    run(model, tmp_path, 6)
    trained = [w.copy() for w in weights(model)]
    again, heard = model_in(on_servers("async", 1)), Heard()
    run(again, tmp_path, 6, heard)
    assert heard.steps == [] and same_bits(weights(again), trained) and read_global_step(again) == 6
    more, heard = model_in(on_servers("async", 1)), Heard()
    run(more, tmp_path, 9, heard)
    assert heard.steps == [7, 8, 9]
    # Workers that hold the model themselves continue from there too.
    held, heard = model_in(MultiWorkerMirroredStrategy()), Heard()
    run(held, tmp_path, 11, heard)
    assert heard.steps == [10, 11], "what hooks of another call remember is theirs"


@pytest.mark.parametrize("scales", [False, True])
def test_evaluators_and_later_runs_read_the_count_of_updates(tmp_path: Path, scales: bool) -> None:
    def make() -> Any:
        sgd = keras.optimizers.SGD(0.01)
        return image_model(optimizer=keras.optimizers.LossScaleOptimizer(sgd) if scales else sgd)

    def make_on_servers() -> Any:
        with on_servers("async", 1).scope():
            return make()

    run(make_on_servers(), tmp_path, 6)
    scored, (_, newest) = make(), find_checkpoints(tmp_path, None)[-1]
    assert load_checkpoint(tmp_path, None, newest, scored) and read_global_step(scored) == 6
    more, heard = make_on_servers(), Heard()
    run(more, tmp_path, 8, heard)
    assert heard.steps == [7, 8]


def test_a_job_that_is_started_again_takes_its_servers_state(tmp_path: Path) -> None:
    model = model_in(on_servers("async", 1))
    run(model, tmp_path, 4)
    trainer = SimpleNamespace(
        membership=SimpleNamespace(context=SimpleNamespace(job_id="job-1")), state=None, fit_index=-1
    )
    found = SimpleNamespace(more={"job": "job-1"}, values={})
    store = SimpleNamespace(positions=lambda: [(4, 0)], load=lambda position: found)
    assert load_newest(trainer, store) == 0  # type: ignore[arg-type]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run(model_in(on_servers("async", 1)), tmp_path, 2)
    strategy = on_servers("async", 1)
    with strategy.scope():
        other = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(3)])
        other.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(CheckpointError, match="Build the model that was saved"):
        run(other, tmp_path, 5)


def test_scores_end_it_for_all_at_the_step_that_comes_next(tmp_path: Path) -> None:
    for mode, end in (("sync", 8), ("async", 8)):  # scored behind 4 steps, looked at behind 7, and 8
        model = model_in(on_servers(mode))
        run(model, tmp_path / mode, None, stop_if_higher_hook("loss", 0.0, min_steps=1))
        assert read_global_step(model) == end


def test_an_estimator_trains_on_servers(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        logits = keras.layers.Dense(3)(keras.layers.Flatten()(features))
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, logits)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)
        return EstimatorSpec(mode, logits, loss, TrainOp(keras.optimizers.SGD(0.1), loss))

    found = []
    for name, strategy in (("sync", on_servers("sync")), ("held", held_by_workers())):
        config = RunConfig(tmp_path / name, save_checkpoints_steps=4, train_distribute=strategy)
        keras.utils.set_random_seed(7)
        model = Estimator(model_fn, config=config)
        scores, _ = run(model, None, 9)
        assert model.evaluate(lambda: (X[:51], Y[:51]))["global_step"] == 9
        found.append((scores, [w.copy() for w in weights(model.model)]))
        model.train(Batches, max_steps=11)
        assert read_global_step(model.model) == 11
    assert found[0][0] == found[1][0] and same_bits(found[0][1], found[1][1])


def held_by_workers() -> Any:
    return MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2))


def test_the_chief_evaluates_in_turn_on_all_rows_of_a_dataset(tmp_path: Path) -> None:
    """Its part of a dataset was refused when all steps were done: "The dataset's shards must be ..."."""
    np.savez(tmp_path / "rows.npz", x=X, label=Y)
    paths = Paths(tmp_path / "home")
    import_cache(paths, "rows", [str(tmp_path / "rows.npz")], partitions=4)
    context = replace(in_shards((0,), 2), paths=paths)
    held = insitu.dataset("rows", context=context, paths=paths).batch(64)
    assert held.shards == (0,) and held.rows == len(X)
    model = model_in(on_servers("async", 1))
    expected = model.evaluate(X, Y, verbose=0, return_dict=True)
    scores = evaluate_model(model, EvalSpec(lambda: held))
    assert scores == pytest.approx(expected, rel=1e-5)
    if keras.backend.backend() == "tensorflow":  # a part of the rows, as any other worker has one
        part = held.as_tf_dataset().map(lambda x, y: (x, y)).prefetch(2)
        with pytest.raises(InputError, match=r"alone, on all rows. Received: .* of 1 of 2 shards."):
            evaluate_model(model, EvalSpec(lambda: part))


# On JAX, Keras makes 32-bit numbers of an input. The keys of a table are looked up before.
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")
def test_tables_are_evaluated_in_turn_alone(tmp_path: Path) -> None:
    with HybridStrategy().scope():
        keys = keras.Input((2,), dtype="int64")
        rows = keras.layers.Flatten()(insitu.layers.Embedding(2, name="table")(keys))
        model = keras.Model(keys, keras.layers.Dense(1)(rows))
        model.compile("sgd", "mse")
    x, y = np.arange(80).reshape(40, 2) % 7 << 40, np.arange(40.0)[:, None]
    spec = TrainSpec(lambda: (x, y), 6)
    config = RunConfig(tmp_path, save_checkpoints_steps=3)
    eval_spec = EvalSpec(lambda: (x, y), start_delay_secs=0, throttle_secs=0)
    scores, _ = train_and_evaluate(model, spec, eval_spec, config=config)
    assert scores is not None and np.isfinite(scores["loss"]) and read_global_step(model) == 6
    one, other = model.predict(np.array([[0, 0], [1 << 40, 1 << 40]]), verbose=0)
    assert one != other  # keys are whole on each backend
    trainer = insitu.train.fit.trainer_of(model)
    with pytest.raises(TrainingError, match=r"--evaluator. Start it without"):
        check_tables(trainer, None, True)
    with HybridStrategy().scope():
        again = keras.models.clone_model(model)
        again.compile("sgd", "mse")
    with pytest.raises(TrainingError, match="another model_dir"):
        train_and_evaluate(again, spec, eval_spec, config=config)
    assert open_store(trainer, tmp_path, 0, 5) is not None


def test_a_wide_and_deep_estimator_has_each_parts_optimizer_on_servers(tmp_path: Path) -> None:
    age = insitu.feature_column.numeric_column("age")
    ages = {"age": np.linspace(-1, 1, 64, dtype="float32")}, (np.arange(64) % 3 == 0).astype("int64")
    found = []
    for name, strategy in (("sync", on_servers("sync")), ("held", held_by_workers())):
        keras.utils.set_random_seed(7)
        trained = DNNLinearCombinedClassifier(
            linear_feature_columns=[age],
            dnn_feature_columns=[age],
            dnn_hidden_units=[4],
            config=RunConfig(tmp_path / name, train_distribute=strategy),
        )
        trained.train(lambda: ages, max_steps=5)
        found.append({n: trained.get_variable_value(n) for n in trained.get_variable_names()})
    weights_of = [n for n in found[0] if n.startswith(("linear", "dnn"))]
    assert len(weights_of) >= 6
    for name in weights_of:
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-6, atol=1e-7, err_msg=name)
