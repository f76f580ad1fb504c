"""Canned estimators give the numbers of the same models, written in Keras by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from keras import layers, ops
from models import in_shards

import insitu
from insitu import estimator as est
from insitu import feature_column as fc
from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.extensions.exports import load_export
from insitu.grid import import_cache
from insitu.train import MultiWorkerMirroredStrategy

# Keras, as it saves
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ROWS = 96
RNG = np.random.default_rng(3)
WORDS = ["a", "b", "c"]
PEOPLE = {
    "age": RNG.normal(size=ROWS).astype("float32"),
    "word": RNG.choice(WORDS, ROWS),
    "weight": RNG.uniform(0.5, 2, ROWS).astype("float32"),
}
LABELS = RNG.integers(0, 2, ROWS)
AGE = fc.numeric_column("age")
WORD = fc.categorical_column_with_vocabulary_list("word", WORDS)


class Batches(keras.utils.PyDataset):
    """3 batches of 32 rows."""

    def __init__(self, labels: Any = LABELS) -> None:
        super().__init__()
        self.labels = labels

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        rows = slice(32 * index, 32 * index + 32)
        return {name: values[rows] for name, values in PEOPLE.items()}, self.labels[rows]


def config(folder: Path, shards: int = 1) -> est.RunConfig:
    strategy = MultiWorkerMirroredStrategy(context=in_shards(tuple(range(shards)), shards))
    return est.RunConfig(folder, train_distribute=strategy)


def hot_words() -> np.ndarray:
    return np.eye(3, dtype="float32")[[WORDS.index(word) for word in PEOPLE["word"]]]


def trained_by_hand(outputs: int, loss: Any, labels: Any, steps: int, rate: float = 0.2) -> Any:
    """A linear model of the age and the words, trained as the estimator is."""
    x = np.concatenate([PEOPLE["age"][:, None], hot_words()], axis=1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(outputs, kernel_initializer="zeros")])
    model.compile(keras.optimizers.Ftrl(rate), loss)
    for step in range(steps):
        rows = slice(32 * (step % 3), 32 * (step % 3) + 32)
        model.train_on_batch(x[rows], labels[rows])
    return model, x


@pytest.mark.parametrize("shards", [1, 2])
def test_a_linear_classifier_is_logistic_regression(tmp_path: Path, shards: int) -> None:
    model = est.LinearClassifier([AGE, WORD], config=config(tmp_path, shards))
    model.train(Batches, max_steps=9)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    plain, x = trained_by_hand(1, loss, LABELS[:, None].astype("float32"), 9)
    logits = plain.predict(x, verbose=0)
    rows = list(model.predict(Batches))
    np.testing.assert_allclose([row["logits"] for row in rows], logits, atol=1e-5)
    chosen = (logits > 0).astype(int)
    assert [row["classes"].tolist() for row in rows] == [[str(each)] for each in chosen[:, 0]]
    scores = model.evaluate(Batches)
    logistic = 1 / (1 + np.exp(-logits))
    auc = keras.metrics.AUC()
    auc.update_state(LABELS[:, None], logistic)
    expected = {
        "accuracy": np.mean(chosen[:, 0] == LABELS),
        "accuracy_baseline": max(LABELS.mean(), 1 - LABELS.mean()),
        "auc": float(auc.result()),
        "average_loss": float(loss(LABELS[:, None].astype("float32"), logits)),
        "label/mean": LABELS.mean(),
        "prediction/mean": logistic.mean(),
        "loss": float(loss(LABELS[:, None].astype("float32"), logits)),
        "global_step": 9,
    }
    assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert set(scores) == {*expected, "auc_precision_recall", "precision", "recall"}


def test_a_cache_is_read_as_the_same_batches(home: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({**PEOPLE, "label": LABELS}), tmp_path / "people.parquet")
    import_cache(Paths.default(), "people", [str(tmp_path / "people.parquet")], partitions=2)
    keys = fc.raw_keys([AGE, WORD])
    data = insitu.dataset("people", features=keys).batch(32)

    class Read(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return list(data)[index]

    found, expected = (
        est.LinearClassifier([AGE, WORD], config=config(tmp_path / name)).train(read, max_steps=6)
        for name, read in (("a", lambda: data), ("b", Read))
    )
    for name in found.get_variable_names():
        one, other = found.get_variable_value(name), expected.get_variable_value(name)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert len(list(found.predict(lambda: data, predict_keys=["logits"]))) == ROWS
    assert found.evaluate(lambda: data)["global_step"] == 6


def test_several_classes_and_texts_as_labels(tmp_path: Path) -> None:
    number = RNG.integers(0, 3, ROWS)
    names = np.array(["x", "y", "z"])
    model = est.LinearClassifier(
        [AGE, WORD], n_classes=3, label_vocabulary=names.tolist(), config=config(tmp_path)
    ).train(lambda: Batches(names[number]), max_steps=6)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    plain, x = trained_by_hand(3, loss, number, 6)
    rows = list(model.predict(Batches, predict_keys=["logits", "classes"]))
    logits = plain.predict(x, verbose=0)
    np.testing.assert_allclose([row["logits"] for row in rows], logits, atol=1e-5)
    assert [row["classes"][0] for row in rows] == names[logits.argmax(axis=1)].tolist()
    scores = model.evaluate(lambda: Batches(names[number]))
    assert scores["accuracy"] == pytest.approx(np.mean(logits.argmax(axis=1) == number))


def test_a_weighted_regressor_divides_by_rows(tmp_path: Path) -> None:
    target = RNG.normal(size=ROWS).astype("float32")
    model = est.LinearRegressor([AGE], weight_column="weight", config=config(tmp_path), optimizer="SGD")
    model.train(lambda: Batches(target), max_steps=3)
    scores = model.evaluate(lambda: Batches(target))
    predicted = np.array([row["predictions"][0] for row in model.predict(Batches)])
    squares, weights = (predicted - target) ** 2, PEOPLE["weight"]
    assert scores["loss"] == pytest.approx(np.mean(squares * weights), rel=1e-4)
    assert scores["average_loss"] == pytest.approx(np.average(squares, weights=weights), rel=1e-4)
    assert scores["label/mean"] == pytest.approx(np.average(target, weights=weights), rel=1e-4)


@pytest.mark.parametrize("shards", [1, 2])
def test_wide_and_deep_is_the_sum_of_its_parts_each_with_its_optimizer(tmp_path: Path, shards: int) -> None:
    deep = [AGE, fc.embedding_column(WORD, 2, initializer=keras.initializers.RandomNormal(seed=1))]
    keras.utils.set_random_seed(1)
    model = est.DNNLinearCombinedRegressor(
        linear_feature_columns=[WORD],
        dnn_feature_columns=deep,
        dnn_hidden_units=[4, 3],
        linear_optimizer=keras.optimizers.SGD(0.1),
        dnn_optimizer=keras.optimizers.Adagrad(0.1),
        config=config(tmp_path, shards),
    )
    target = RNG.normal(size=ROWS).astype("float32")
    model._prepare(lambda: Batches(target), est.ModeKeys.TRAIN)
    start = {name: model.get_variable_value(name) for name in model.get_variable_names()}
    model.train(lambda: Batches(target), max_steps=3)
    for name, value in by_hand(start, target).items():
        np.testing.assert_allclose(model.get_variable_value(name), value, rtol=1e-4, atol=1e-6)


def by_hand(start: dict[str, Any], target: np.ndarray) -> dict[str, Any]:
    """The variables after 3 steps, by NumPy's view of the data and Keras' gradients of a plain model."""
    hot = hot_words()
    words, ages = keras.Input((3,)), keras.Input((1,))
    wide = layers.Dense(1, name="wide")
    table, one = layers.Dense(2, use_bias=False), layers.Dense(4, "relu")
    two, top = layers.Dense(3, "relu"), layers.Dense(1)
    net = ops.concatenate([ages, table(words)], axis=-1)
    model = keras.Model([words, ages], wide(words) + top(two(one(net))))
    places = {
        "linear_word/word_embedding_weights": wide.kernel,
        "linear_bias/bias_weights": wide.bias,
        "dnn_input/word_embedding_weights": table.kernel,
        "dnn_hiddenlayer_0/kernel": one.kernel,
        "dnn_hiddenlayer_0/bias": one.bias,
        "dnn_hiddenlayer_1/kernel": two.kernel,
        "dnn_hiddenlayer_1/bias": two.bias,
        "dnn_logits/kernel": top.kernel,
        "dnn_logits/bias": top.bias,
    }
    assert set(places) == set(start)
    for name, variable in places.items():
        variable.assign(start[name])
    of_wide = {id(wide.kernel), id(wide.bias)}
    pick = {True: keras.optimizers.SGD(0.1), False: keras.optimizers.Adagrad(0.1)}
    model.compile(keras.optimizers.MultiOptimizer(lambda v: pick[id(v) in of_wide]), "mse")
    for step in range(3):
        rows = slice(32 * step, 32 * step + 32)
        model.train_on_batch([hot[rows], PEOPLE["age"][rows, None]], target[rows, None])
    return {name: ops.convert_to_numpy(variable) for name, variable in places.items()}


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="2 at least"):
        est.LinearClassifier([AGE], n_classes=1)
    with pytest.raises(InputError, match="hidden_units are"):
        est.DNNClassifier([], [AGE])
    with pytest.raises(InputError, match="one at least"):
        est.DNNLinearCombinedRegressor()
    with pytest.raises(InputError, match="An optimizer is one of Keras"):
        est.LinearClassifier([AGE], optimizer="Best", config=config(tmp_path)).train(Batches, max_steps=1)
    with pytest.raises(InputError, match=r"Labels are in \[0, 1\].*Received: 7.* in row 0"):
        est.LinearClassifier([AGE], config=config(tmp_path)).train(
            lambda: Batches(np.full(ROWS, 7)), max_steps=1
        )
    with pytest.raises(InputError, match="'nothing' in row 0"):
        est.LinearClassifier([AGE], label_vocabulary=["x", "y"], config=config(tmp_path)).train(
            lambda: Batches(np.full(ROWS, "nothing")), max_steps=1
        )
    with pytest.raises(InputError, match="which is categorical"):
        est.DNNClassifier([3], [WORD], config=config(tmp_path)).train(Batches, max_steps=1)


def test_features_may_be_lists(tmp_path: Path) -> None:
    words = ["x" * 40 + word for word in WORDS] * 16
    rows = [[word] * (1 + place % 2) for place, word in enumerate(words)]
    word, more = (fc.categorical_column_with_hash_bucket(key, 100) for key in ("word", "more"))
    model = est.LinearClassifier([word, more], config=config(tmp_path))
    labels = np.arange(48) % 2
    model.train(lambda: ({"word": words, "more": rows}, labels), steps=3)
    arrays = np.empty(48, object)
    arrays[:] = rows
    expected = list(model.predict(lambda: {"word": np.array(words, object), "more": arrays}))
    found = list(model.predict(lambda: {"word": words, "more": rows}))
    assert [row["logits"].tolist() for row in found] == [row["logits"].tolist() for row in expected]
    assert len(found) == 48 and len({float(row["logits"][0]) for row in found}) == 6


def test_weights_come_by_a_numeric_column_too(tmp_path: Path) -> None:
    target = RNG.normal(size=ROWS).astype("float32")
    halved = fc.numeric_column("weight", normalizer_fn=lambda weights: weights / 2)
    model = est.LinearRegressor([AGE], weight_column=halved, config=config(tmp_path), optimizer="SGD")
    model.train(lambda: Batches(target), max_steps=1)
    scores = model.evaluate(lambda: Batches(target))
    predicted = np.array([row["predictions"][0] for row in model.predict(Batches)])
    expected = np.mean((predicted - target) ** 2 * PEOPLE["weight"] / 2)
    assert scores["loss"] == pytest.approx(expected, rel=1e-4)
    for wrong in (3, fc.numeric_column("weight", shape=(2,))):
        with pytest.raises(InputError, match="name of a feature, or a numeric_column of one number"):
            est.LinearRegressor([AGE], weight_column=wrong)  # type: ignore[arg-type]
    broken = {**PEOPLE, "weight": np.where(np.arange(ROWS) == 5, np.nan, 1.0)}
    with pytest.raises(InputError, match="NaN in row 5 of the batch, in feature 'weight'"):
        model.evaluate(lambda: (broken, target))


def test_predictions_have_all_classes(tmp_path: Path) -> None:
    model = est.LinearClassifier(
        [AGE], n_classes=3, label_vocabulary=["x", "y", "z"], config=config(tmp_path)
    )
    model.train(lambda: Batches(np.array(["x", "y", "z"])[RNG.integers(0, 3, ROWS)]), max_steps=1)
    row = next(model.predict(Batches, predict_keys=["all_class_ids", "all_classes"]))
    assert row["all_class_ids"].tolist() == [0, 1, 2] and row["all_classes"].tolist() == ["x", "y", "z"]
    assert row["all_class_ids"].dtype == np.int32


@pytest.mark.parametrize(("given", "rate"), [("Ftrl", 0.2), (None, 1 / np.sqrt(30)), ("SGD", 0.2)])
def test_rates_of_linear_models_are_those_of_tensorflow(tmp_path: Path, given: Any, rate: float) -> None:
    columns = [fc.numeric_column(f"n{number}") for number in range(30)]
    data = {column.key: np.zeros(2, "float32") for column in columns}, np.zeros(2)
    model = est.LinearRegressor(columns, optimizer=given, config=config(tmp_path))
    model.train(lambda: data, max_steps=1)
    assert float(model.model.optimizer.learning_rate) == pytest.approx(rate)


def test_what_a_canned_estimator_cannot_take_is_told_at_once(tmp_path: Path) -> None:
    for make in (
        lambda: est.DNNClassifier([3], [WORD]),
        lambda: est.DNNLinearCombinedRegressor(dnn_feature_columns=[AGE, WORD], dnn_hidden_units=[3]),
    ):
        with pytest.raises(InputError, match=r"A layer takes dense columns\. Received: 'word'"):
            make()
    model = est.LinearRegressor([AGE], config=config(tmp_path))
    with pytest.raises(InputError, match=r"is trained and evaluated on labels\. Received: features alone"):
        model.train(lambda: PEOPLE, max_steps=1)
    with pytest.raises(
        InputError, match=r"Estimator.train.steps must be a whole number above 0. Received: 0"
    ):
        model.train(Batches, steps=0)


@pytest.mark.filterwarnings("error")
def test_predictions_need_no_weights(tmp_path: Path) -> None:
    model = est.LinearClassifier([AGE], weight_column="weight", config=config(tmp_path))
    held_out = est.EvalSpec(Batches, start_delay_secs=0, throttle_secs=0, exporters=est.FinalExporter())
    _, published = est.train_and_evaluate(model, est.TrainSpec(Batches, max_steps=3), held_out)
    ages = {"age": PEOPLE["age"]}
    rows = list(model.predict(lambda: ages, predict_keys=["logits"]))
    assert [row["logits"] for row in rows] == [row["logits"] for row in model.predict(Batches)]
    served = load_export(published[0])
    assert [value.name for value in served.inputs] == ["age"]
    np.testing.assert_allclose(served.predict(ages)["logits"], [row["logits"] for row in rows], rtol=1e-5)
    with pytest.raises(InputError, match="The data must have the features of all columns"):
        next(model.predict(lambda: {"weight": PEOPLE["weight"]}))
