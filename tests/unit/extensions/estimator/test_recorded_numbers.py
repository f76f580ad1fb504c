"""Linear estimators give the numbers that tf.estimator of TensorFlow 2.15.1 gave on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from insitu import estimator as est
from insitu import feature_column as fc
from insitu.train import OneDeviceStrategy

RNG = np.random.default_rng(11)
ROWS = 64
FEATURES = {
    "age": RNG.normal(30, 10, ROWS).astype("float32"),
    "hours": RNG.uniform(10, 60, ROWS).astype("float32"),
    "edu": RNG.choice(["hs", "ba", "ma", "phd"], ROWS).astype(object),
    "job": RNG.choice(["x", "y", "z"], ROWS).astype(object),
    "zip": RNG.integers(0, 500, ROWS),
    "w": RNG.uniform(0, 3, ROWS).astype("float32"),
}
FEATURES["w"][::7] = 0
NAMES = ["lo", "mid", "hi"]
OF_THREE = RNG.choice(NAMES, ROWS).astype(object)
OF_TWO = RNG.integers(0, 2, ROWS)
PARTS = RNG.uniform(0, 1, ROWS).astype("float32")
NUMBERS = (FEATURES["age"] * 0.1 + RNG.normal(size=ROWS)).astype("float32")
PAIRS = np.stack([NUMBERS, -NUMBERS], 1)

AGE, HOURS = fc.numeric_column("age"), fc.numeric_column("hours")
RANGES = fc.bucketized_column(AGE, [20, 30, 40])
WIDE = [
    RANGES,
    fc.categorical_column_with_vocabulary_list("edu", ["hs", "ba", "ma"], num_oov_buckets=2),
    fc.categorical_column_with_hash_bucket("job", 7),
    fc.categorical_column_with_hash_bucket("zip", 50, dtype="int64"),
    fc.crossed_column([RANGES, "edu", "job"], 30),
]
THREE = {"n_classes": 3, "label_vocabulary": NAMES, "weight_column": "w"}
CASES: list[tuple[Callable[..., est.Estimator], Any, dict[str, float]]] = [
    (
        lambda **more: est.LinearClassifier([*WIDE, HOURS], weight_column="w", **more),
        OF_TWO,
        {
            "accuracy": 0.75288326,
            "accuracy_baseline": 0.57577765,
            "auc": 0.87050056,
            "auc_precision_recall": 0.8337599,
            "average_loss": 0.53411925,
            "label/mean": 0.42422235,
            "loss": 0.68053114,
            "precision": 0.81998163,
            "prediction/mean": 0.4261998,
        },
    ),
    (
        lambda **more: est.LinearClassifier(WIDE, **more),
        PARTS,
        {
            "accuracy": 0.0,
            "accuracy_baseline": 0.5136272,
            "auc": 0.0,
            "auc_precision_recall": 1.0,
            "average_loss": 0.6578243,
            "label/mean": 0.4863728,
            "precision": 1.0,
            "prediction/mean": 0.48622066,
            "recall": 0.40625,
        },
    ),
    (
        lambda **more: est.LinearClassifier(WIDE, **THREE, **more),
        OF_THREE,
        {"accuracy": 0.78228766, "average_loss": 0.66776985, "loss": 0.8508178},
    ),
    (
        lambda **more: est.LinearRegressor([*WIDE, AGE], **more),
        NUMBERS,
        {"average_loss": 0.59240746, "label/mean": 2.9079766, "prediction/mean": 2.8224082},
    ),
    (
        lambda **more: est.LinearRegressor(WIDE, label_dimension=2, weight_column="w", **more),
        PAIRS,
        {"average_loss": 0.81467617, "label/mean": 0.0, "loss": 1.0379938, "prediction/mean": 0.0},
    ),
    (
        lambda **more: est.LinearClassifier(WIDE, optimizer="Adagrad", **more),
        OF_TWO,
        {"auc": 0.86035156, "average_loss": 0.5835491, "prediction/mean": 0.5078101, "recall": 0.78125},
    ),
    (
        lambda **more: est.LinearClassifier(WIDE, optimizer="Adam", **more),
        OF_TWO,
        {"auc": 0.97998047, "average_loss": 0.2526409, "prediction/mean": 0.46232423, "recall": 0.875},
    ),
]


class Batches(keras.utils.PyDataset):
    """16 rows a batch, of which the first comes twice: tf.estimator had trained in two calls."""

    def __init__(self, labels: Any) -> None:
        super().__init__()
        self._labels = labels

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        start = 16 * (max(0, index - 1) % 4)
        rows = slice(start, start + 16)
        return {name: values[rows] for name, values in FEATURES.items()}, self._labels[rows]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_scores_are_those_that_tensorflow_gave(tmp_path: Path, number: int) -> None:
    make, labels, expected = CASES[number]
    config = est.RunConfig(train_distribute=OneDeviceStrategy())
    model = make(model_dir=tmp_path, config=config).train(lambda: Batches(labels), max_steps=20)
    scores = model.evaluate(lambda: (FEATURES, labels))
    assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=5e-5, abs=2e-5)
