"""Training without labels: refused where Keras would fail on them, and left alone everywhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import insitu
from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.grid import Dataset, import_cache
from insitu.train.fit.sources import check_labels


@pytest.fixture
def cache(home: Path, tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 3)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=(x.sum(axis=1) > 0).astype(np.int64))
    import_cache(Paths(home), "comp", [str(tmp_path / "a.npz")])
    return "comp"


def model_under_a_strategy(make: Any = keras.Sequential, loss: Any = "mse", **options: Any) -> Any:
    with insitu.OneDeviceStrategy().scope():
        model = make([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", loss, **options)
    return model


@pytest.mark.parametrize("method", ["fit", "evaluate"])
@pytest.mark.parametrize("loss", ["mse", keras.losses.MeanSquaredError(), lambda y, p: p])
def test_a_missing_label_names_the_columns_and_what_to_write(cache: str, method: str, loss: Any):
    data = insitu.dataset(cache, features="x").batch(8)
    model = model_under_a_strategy(loss=loss)
    with pytest.raises(
        InputError, match=rf"{method} needs labels.*columns x, y: .*dataset\('comp', label='y'\)"
    ):
        getattr(model, method)(data)
    model.fit(insitu.dataset(cache, label="y").batch(8), verbose=0)


def test_a_map_that_drops_the_label_is_named(cache: str):
    data = insitu.dataset(cache, label="y").batch(8).map(lambda x, y: x)
    with pytest.raises(InputError, match=r"given to \.map return \(features, label\)"):
        model_under_a_strategy().fit(data)


def test_a_map_may_make_the_labels(cache: str):
    data = insitu.dataset(cache, features="x").batch(8).map(lambda x: (x, x[:, :1]))
    model_under_a_strategy().fit(data, verbose=0)


def test_prediction_needs_no_labels(cache: str):
    assert model_under_a_strategy().predict(
        insitu.dataset(cache, features="x").batch(8), verbose=0
    ).shape == (32, 1)


class OwnLoss(keras.Sequential):
    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y_pred))


def test_a_model_may_compute_its_loss_without_labels(cache: str):
    data = insitu.dataset(cache, features="x").batch(8)
    check_labels(model_under_a_strategy(OwnLoss), data, "fit")
    with pytest.raises(InputError):
        check_labels(model_under_a_strategy(), data, "fit")


class Shrink(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


def test_a_model_may_learn_by_added_losses_alone(cache: str):
    data: Dataset = insitu.dataset(cache, features="x").batch(8)
    with insitu.OneDeviceStrategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), Shrink()])
        model.compile("sgd")
    model.fit(data, verbose=0)
