"""An Estimator gives the numbers of the same model in plain Keras, and continues from its folder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from models import image_rows, in_shards, weights

from insitu import estimator as est
from insitu.base.context import Context
from insitu.base.errors import InputError, TrainingError
from insitu.base.paths import Paths
from insitu.train import MultiWorkerMirroredStrategy
from insitu.train.fit import trainer_of

# Keras, as it saves
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X, Y = image_rows()


class Batches(keras.utils.PyDataset):
    """7 batches of 29 rows."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        rows = slice(29 * index, 29 * index + 29)
        return {"image": X[rows]}, Y[rows]


def start(seed: int) -> Any:
    return keras.initializers.GlorotUniform(seed)


def stack(x: Any) -> Any:
    x = layers.Conv2D(4, 3, activation="relu", kernel_initializer=start(1))(x)
    x = layers.BatchNormalization()(x)
    return layers.Dense(2, kernel_initializer=start(2), kernel_regularizer="l2")(layers.Flatten()(x))


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> est.EstimatorSpec:
    logits = stack(features["image"])
    if mode == est.ModeKeys.TRAIN:
        logits = layers.Dropout(0.0)(logits)  # in one mode alone
    predictions = {"class": ops.argmax(logits, axis=-1), "probability": ops.softmax(logits)}
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)
    accuracy = keras.metrics.Accuracy()
    accuracy.update_state(labels, predictions["class"])
    optimizer = keras.optimizers.Adam(params["learning_rate"])
    return est.EstimatorSpec(
        mode, predictions, loss, est.TrainOp(optimizer, loss), eval_metric_ops={"accuracy": accuracy}
    )


def make(folder: Path | None, shards: int = 1, interval: int = 5, **more: Any) -> est.Estimator:
    strategy = MultiWorkerMirroredStrategy(context=in_shards(tuple(range(shards)), shards))
    config = est.RunConfig(save_checkpoints_steps=interval, train_distribute=strategy)
    function = more.pop("model_fn", model_fn)
    return est.Estimator(function, folder, config, {"learning_rate": 1e-2}, **more)


def plain_model() -> Any:
    image = keras.Input((8, 8, 1), name="image")
    model = keras.Model({"image": image}, stack(image))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return model


def predict(model: est.Estimator) -> np.ndarray:
    return np.stack([row["probability"] for row in model.predict(lambda: {"image": X})])


@pytest.mark.parametrize("shards", [1, 2])
def test_numbers_are_those_of_the_same_model_in_keras(tmp_path: Path, shards: int) -> None:
    plain = plain_model()
    if shards > 1:
        with MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)).scope():
            plain = plain_model()
    plain.fit(Batches(), epochs=2, shuffle=False, verbose=0)
    model = make(tmp_path, shards).train(Batches, max_steps=14)
    for one, other in zip(weights(model.model), weights(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    expected = plain.evaluate({"image": X}, Y, verbose=0, return_dict=True)
    scores = model.evaluate(lambda: ({"image": X}, Y))
    assert scores == pytest.approx({**expected, "global_step": 14}, rel=1e-4)
    logits = plain.predict({"image": X}, verbose=0)
    np.testing.assert_allclose(predict(model), ops.convert_to_numpy(ops.softmax(logits)), atol=1e-5)


def test_another_process_goes_on_from_the_folder(tmp_path: Path) -> None:
    whole = make(tmp_path / "a", interval=7).train(Batches, max_steps=21)
    make(tmp_path / "b", interval=7).train(Batches, max_steps=7)
    again = make(tmp_path / "b", interval=7)
    assert again.latest_checkpoint() is not None
    assert again.evaluate(Batches)["global_step"] == 7
    again.train(Batches, steps=7).train(Batches, steps=7)
    np.testing.assert_array_equal(predict(again), predict(whole))
    last = make(tmp_path / "b").train(Batches, max_steps=14)  # it has had more
    assert last.evaluate(Batches)["global_step"] == 21


class Fails(est.SessionRunHook):
    def after_run(self, run_context: Any, run_values: Any) -> None:
        if self.global_step == 17:
            raise ZeroDivisionError


def test_scores_are_those_of_the_newest_checkpoint(tmp_path: Path) -> None:
    trained, reader = make(tmp_path, interval=7).train(Batches, max_steps=7), make(tmp_path)
    first = reader.latest_checkpoint()
    assert reader.evaluate(Batches)["global_step"] == 7
    trained.train(Batches, max_steps=14)  # as another process may
    assert reader.evaluate(Batches)["global_step"] == 14
    assert trained.evaluate(Batches, checkpoint_path=first)["global_step"] == 7
    assert trained.train(Batches, max_steps=7).evaluate(Batches)["global_step"] == 14
    with pytest.raises(ZeroDivisionError):
        trained.train(Batches, max_steps=21, hooks=[Fails()])
    assert trained.evaluate(Batches)["global_step"] == 14


def test_estimators_of_one_job_have_a_folder_each(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("insitu.extensions.estimator.estimator")
    monkeypatch.setattr(module, "read_context", lambda: Context(Paths(home), job_id="j-1"))
    monkeypatch.setattr(module, "_TRAINS_IN_JOB", [])
    first, second, third = make(None), make(None), make(tmp_path)
    first.train(Batches, max_steps=1).train(Batches, max_steps=2)
    with pytest.raises(InputError, match=r"a second one that trains in this job. Pass a model_dir to each"):
        second.train(Batches, max_steps=1)
    third.train(Batches, max_steps=1)


def test_data_of_tensorflow_is_read(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    rows = 203 // 29 * 29
    data = tf.data.Dataset.from_tensor_slices(({"image": X[:rows]}, Y[:rows])).batch(29)
    found = make(tmp_path / "a").train(lambda: data, max_steps=9)
    expected = make(tmp_path / "b").train(Batches, max_steps=9)
    np.testing.assert_allclose(predict(found), predict(expected), rtol=1e-4)
    batches = list(found.predict(lambda: data, ["class"], yield_single_examples=False))
    assert [len(batch["class"]) for batch in batches] == [29] * 7
    assert found.evaluate(lambda: data, steps=2)["global_step"] == 9


def test_a_mode_that_model_fn_lacks_is_named_where_it_is_used(tmp_path: Path) -> None:
    def trains_alone(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        if mode != est.ModeKeys.TRAIN:
            raise NotImplementedError("no such mode")
        loss = ops.mean(ops.square(layers.Dense(1)(layers.Flatten()(features["image"]))))
        return est.EstimatorSpec(mode, loss=loss, train_op=keras.optimizers.SGD(0.1))

    model = make(tmp_path, model_fn=trains_alone).train(Batches, max_steps=1)
    for call in (lambda: model.evaluate(Batches), lambda: list(model.predict(Batches))):
        with pytest.raises(InputError, match="NotImplementedError: no such mode"):
            call()


def test_train_and_evaluate_scores_and_exports(tmp_path: Path) -> None:
    model = make(tmp_path)
    held_out = est.EvalSpec(
        lambda: ({"image": X[:51]}, Y[:51]), exporters=est.FinalExporter(), start_delay_secs=0
    )
    scores, exports = est.train_and_evaluate(model, est.TrainSpec(Batches, 14), held_out)
    expected = model.evaluate(held_out.input_fn)
    assert scores == pytest.approx(expected, rel=1e-6)
    loaded = keras.models.load_model(exports[0])
    found = loaded.predict({"image": X}, verbose=0)
    np.testing.assert_allclose(found["probability"], predict(model), atol=1e-6)
    assert model.export(tmp_path / "served").name == "00000014.keras"


def test_parts_have_their_own_optimizers(tmp_path: Path) -> None:
    def two_parts(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        frozen = layers.Dense(2, kernel_initializer=start(1), name="frozen")
        moved = layers.Dense(2, kernel_initializer=start(2), name="moved")
        x = layers.Flatten()(features["image"])
        logits = frozen(x) + moved(x)
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, logits)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)
        parts = ((0.0, frozen), (0.1, moved))
        op = [est.TrainOp(keras.optimizers.SGD(rate), loss, part.trainable_weights) for rate, part in parts]
        return est.EstimatorSpec(mode, logits, loss, op if mode == est.ModeKeys.TRAIN else None)

    model = make(tmp_path, 2, model_fn=two_parts).train(Batches, max_steps=3)
    assert model.get_variable_names()[:2] == ["frozen/kernel", "frozen/bias"]
    initial = ops.convert_to_numpy(start(1)((64, 2)))
    np.testing.assert_array_equal(model.get_variable_value("frozen/kernel"), initial)
    moved = model.get_variable_value("moved/kernel")
    assert not np.array_equal(moved, ops.convert_to_numpy(start(2)((64, 2))))


def with_optimizer(make_optimizer: Callable[[], Any]) -> Callable[..., est.EstimatorSpec]:
    def other_optimizer(features: Any, labels: Any, mode: str, params: Any) -> est.EstimatorSpec:
        spec = model_fn(features, labels, mode, params)
        return (
            spec
            if spec.train_op is None
            else replace(spec, train_op=est.TrainOp(make_optimizer(), spec.loss))
        )

    return other_optimizer


def test_steps_are_counted_by_the_optimizer_within_one_that_scales_losses(tmp_path: Path) -> None:
    other = with_optimizer(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    make(tmp_path / "a", model_fn=other).train(Batches, max_steps=4)
    assert make(tmp_path / "a", model_fn=other).evaluate(Batches)["global_step"] == 4
    warm = make(tmp_path / "b", model_fn=other, warm_start_from=tmp_path / "a")
    warm.train(Batches, max_steps=1)
    assert warm.evaluate(Batches)["global_step"] == 1


def test_an_optimizer_that_accumulates_gradients_is_refused(tmp_path: Path) -> None:
    other = with_optimizer(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    with pytest.raises(
        TrainingError, match=r"one update for each batch. Received: .*gradient_accumulation_steps=2"
    ):
        make(tmp_path / "a", model_fn=other).train(Batches, max_steps=4)


def test_a_choice_of_variables_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a regular expression. Received: 'dense\['"):
        est.WarmStartSettings(tmp_path / "a.keras", "dense[")
    with pytest.raises(InputError, match=r"of a model_dir all are taken. Received: 'dense/\.\*' for"):
        est.WarmStartSettings(tmp_path / "a", "dense/.*")
    assert est.WarmStartSettings(tmp_path / "a").vars_to_warm_start == ".*"


def test_warm_start_takes_weights_and_no_steps(tmp_path: Path) -> None:
    trained = make(tmp_path / "a").train(Batches, max_steps=3)
    warm = make(tmp_path / "b", warm_start_from=tmp_path / "a")
    warm.train(Batches, max_steps=1)
    assert warm.evaluate(Batches)["global_step"] == 1
    exported = trained.export(tmp_path / "served")
    settings = est.WarmStartSettings(exported, "conv2d/.*")
    warm = make(tmp_path / "c", warm_start_from=settings)
    warm._prepare(Batches, est.ModeKeys.TRAIN)
    name = "conv2d/kernel"
    np.testing.assert_array_equal(warm.get_variable_value(name), trained.get_variable_value(name))
    settings = est.WarmStartSettings(exported, "other/.*")
    with pytest.raises(InputError, match="no such variable"):
        make(tmp_path / "d", warm_start_from=settings, model_fn=other)._prepare(Batches, est.ModeKeys.TRAIN)


def other(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
    x = layers.Flatten()(features["image"])
    logits = layers.Dense(2, name="other")(x)
    loss = None if labels is None else ops.mean(ops.square(logits))
    return est.EstimatorSpec(mode, logits, loss, keras.optimizers.SGD(0.1))


def refused(function: Any, message: str, folder: Path, shards: int = 1) -> None:
    with pytest.raises((InputError, TrainingError), match=message):
        model = make(folder, shards, model_fn=function).train(Batches, max_steps=2)
        model.evaluate(Batches)
        list(model.predict(Batches))


def test_what_model_fn_must_not_return_is_refused(tmp_path: Path) -> None:
    refused(lambda features: None, "returns an insitu.estimator.EstimatorSpec", tmp_path)
    lacking = r"none for loss and train_op\. Return EstimatorSpec\(mode, loss=\.\.\., train_op=\.\.\.\)"
    refused(lambda features: est.EstimatorSpec("train"), lacking, tmp_path)
    refused(lambda features: est.EstimatorSpec("eval"), "has the mode", tmp_path)

    def of_rows(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        rows = ops.mean(layers.Dense(1)(layers.Flatten()(features["image"])), axis=1)
        return est.EstimatorSpec(mode, rows, rows, keras.optimizers.SGD(0.1))

    refused(of_rows, "is one number", tmp_path)

    def own_variable(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        loss = ops.mean(features["image"] * keras.Variable(1.0))
        return est.EstimatorSpec(mode, loss, loss, keras.optimizers.SGD(0.1))

    refused(own_variable, "belong to layers", tmp_path)

    def by_mode(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        units = 2 if mode == est.ModeKeys.TRAIN else 3
        loss = ops.mean(ops.square(layers.Dense(units)(layers.Flatten()(features["image"]))))
        return est.EstimatorSpec(mode, loss, loss, keras.optimizers.SGD(0.1))

    refused(by_mode, "are the same in all modes", tmp_path / "by_mode")

    def more_in_evaluation(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        x = layers.Dense(2)(layers.Flatten()(features["image"]))
        if mode == est.ModeKeys.EVAL:
            x = layers.Dense(2)(x)
        loss = ops.mean(ops.square(x))
        return est.EstimatorSpec(mode, loss, loss, keras.optimizers.SGD(0.1))

    refused(more_in_evaluation, "no training would change", tmp_path / "more")


def test_a_loss_that_sums_over_rows_is_refused_for_several_replicas(tmp_path: Path) -> None:
    def sums(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        loss = ops.sum(ops.square(layers.Dense(2)(layers.Flatten()(features["image"]))))
        return est.EstimatorSpec(mode, loss, loss, keras.optimizers.SGD(0.001))

    refused(sums, "a loss that sums over rows", tmp_path, shards=2)


def test_arguments_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ends after `steps`"):
        make(tmp_path).train(Batches)
    with pytest.raises(TrainingError, match="Weights come from training"):
        make(tmp_path).evaluate(Batches)
    with pytest.raises(TrainingError, match="has seen no labels"):
        list(make(tmp_path).predict(lambda: {"image": X}))
    with pytest.raises(InputError, match="gets numbers"):
        make(tmp_path).train(lambda: ({"image": np.array(["a"])}, Y[:1]), max_steps=1)
    model = make(tmp_path).train(Batches, max_steps=1)
    with pytest.raises(InputError, match="predict_keys"):
        model.predict(Batches, predict_keys=["nothing"])
    with pytest.raises(InputError, match="All batches have the same features"):
        model.evaluate(lambda: ({"other": X}, Y))


def test_a_feature_that_the_data_lacks_is_named() -> None:
    from insitu.extensions.estimator.model_function import call_model_fn

    def asks(features: Any) -> Any:
        return features["age"]

    def fails(features: Any) -> Any:
        return {}["height"] if "height" in features else {}["weight"]

    with pytest.raises(InputError, match=r"has: height. Received: it asks for 'age'"):
        call_model_fn(asks, {"height": None}, None, "train", {}, None)
    with pytest.raises(KeyError, match="height"):  # of a dict of its own
        call_model_fn(fails, {"height": None}, None, "train", {}, None)


def test_metrics_of_rows_of_one_number_are_means_over_rows(tmp_path: Path) -> None:
    x = np.arange(40, dtype="float32")
    weights = np.linspace(0, 2, 40, dtype="float32")

    def model_fn(features: Any, labels: Any, mode: str) -> est.EstimatorSpec:
        found = keras.layers.Dense(1, kernel_initializer="ones")(features["x"])[:, 0]
        mae, weighted, same = keras.metrics.MeanAbsoluteError(), keras.metrics.MeanSquaredError(), None
        mae.update_state(labels, found)
        weighted.update_state(y_true=labels, y_pred=found, sample_weight=features["w"])
        same = keras.metrics.Accuracy()
        same.update_state(labels, labels, sample_weight=features["w"])
        loss = keras.ops.mean(keras.ops.square(found - labels))
        metrics = {"mae": mae, "mse": weighted, "same": same}
        return est.EstimatorSpec(mode, found, loss, keras.optimizers.SGD(0.0), metrics)

    def data() -> Any:
        return {"x": x[:, None], "w": weights}, x * 2

    for name, shards in (("one", 1), ("two", 2)):
        strategy = MultiWorkerMirroredStrategy(context=in_shards(tuple(range(shards)), shards))
        config = est.RunConfig(tmp_path / name, train_distribute=strategy)
        scores = (
            est.Estimator(model_fn, config=config).train(data, max_steps=1).evaluate(data)
        )  # 32 and 8 rows
        assert scores["mae"] == pytest.approx(x.mean(), rel=1e-5)
        assert scores["mse"] == pytest.approx(np.average(x**2, weights=weights), rel=1e-5)
        assert scores["same"] == 1


class Heard(est.SessionRunHook):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def begin(self) -> None:
        self.heard.append("begin")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.heard.append(f"step {self.global_step}")

    def end(self) -> None:
        self.heard.append("end")


class HeardTests(keras.callbacks.Callback):
    batches = 0

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1


def test_hooks_of_model_fn_are_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook, of_chief, tests = Heard(), Heard(), HeardTests()
    seen: list[tuple[str, Any]] = []

    def input_fn(mode: str, params: Any, config: Any) -> Any:
        seen.append((mode, (params["learning_rate"], config.save_checkpoints_steps)))
        return Batches()

    def with_hooks(features: Any, labels: Any, mode: str, params: Any) -> est.EstimatorSpec:
        spec = model_fn(features, labels, mode, params)
        logged = est.LoggingTensorHook({"lost": spec.loss}, every_n_iter=2)
        if mode == est.ModeKeys.TRAIN:
            return replace(spec, training_hooks=[hook, logged], training_chief_hooks=[of_chief])
        return replace(spec, evaluation_hooks=[tests]) if mode == est.ModeKeys.EVAL else spec

    made = make(tmp_path, model_fn=with_hooks)
    made.train(input_fn, max_steps=3)
    assert hook.heard == of_chief.heard == ["begin", "step 1", "step 2", "step 3", "end"]
    assert "step 2: lost = " in capsys.readouterr().out
    made.evaluate(input_fn, name="holdout")
    assert tests.batches == 7
    next(made.predict(input_fn))
    assert {mode for mode, _ in seen} == {"train", "eval", "infer"}
    assert {given for _, given in seen} == {(0.01, 5)}
    spec = est.EvalSpec(input_fn, name="holdout", start_delay_secs=0, throttle_secs=0)
    scores, _ = est.train_and_evaluate(made, est.TrainSpec(input_fn, 6), spec)
    assert scores is not None and scores["global_step"] == 6
    assert "evaluation of holdout, step 6" in capsys.readouterr().out


def test_hooks_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match=r"training_hooks are hooks of insitu.estimator .* Received: str"):
        est.EstimatorSpec("train", training_hooks=["hook"])
    with pytest.raises(InputError, match=r"Received: Heard in EstimatorSpec.evaluation_hooks"):
        est.EstimatorSpec("eval", evaluation_hooks=[Heard()])


def test_estimators_without_a_strategy_share_one(tmp_path: Path) -> None:
    """A task of a job has one address."""
    pair = [est.Estimator(model_fn, tmp_path / name, params={"learning_rate": 0.01}) for name in "ab"]
    for each in pair:
        each.train(Batches, max_steps=1)
    first, second = (trainer_of(each.model).strategy for each in pair)
    assert first is second
