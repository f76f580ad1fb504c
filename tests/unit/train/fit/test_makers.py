"""A model belongs to the strategy in whose scope it was made."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import insitu
from insitu.base.errors import TrainingError
from insitu.base.paths import Paths
from insitu.grid import import_cache
from insitu.train.fit.keras_patch import maker_of, record_maker
from insitu.train.fit.trainer import trainer_of
from tests.support.descriptors import find_new_descriptors, list_descriptors

X = np.random.default_rng(0).normal(size=(13, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


class MadeAndCompiledInside(keras.Model):
    """Has its own way to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x: Any) -> Any:
        return self.dense(x)


def make_model(kind: str) -> Any:
    if kind == "subclassed":
        return MadeAndCompiledInside()
    layers = [keras.layers.Dense(1, kernel_initializer="ones")]
    return keras.Sequential([keras.Input((3,)), *layers] if kind == "functional" else layers)


def trained(model: Any) -> list[Any]:
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    history = model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
    return [*model.get_weights(), history["loss"], history["mae"]]


@pytest.mark.parametrize("kind", ["functional", "sequential", "subclassed"])
def test_a_model_that_was_made_in_a_scope_is_trained_by_it_wherever_it_is_compiled(strategy_over, kind):
    wanted = trained(make_model(kind))
    strategy = strategy_over(2)
    with strategy.scope():
        model = make_model(kind)
    found = trained(model)
    assert trainer_of(model).strategy is strategy
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_keras_alone_does_not_train_layers_of_a_strategy(strategy_over):
    with strategy_over(2).scope():
        inner = make_model("functional")
    outer = keras.Sequential([inner])
    outer.compile("sgd", "mse")
    with pytest.raises(TrainingError, match=r"the layer 'sequential.*MultiWorkerMirroredStrategy.*too"):
        outer.fit(X, Y, verbose=0)
    with pytest.raises(TrainingError, match="made and compiled outside"):
        outer.train_on_batch(X, Y)
    assert np.isfinite(outer.evaluate(X, Y, verbose=0))  # changes nothing
    with strategy_over(1).scope():  # Keras' own business
        inner = make_model("functional")
    trained(keras.Sequential([inner]))


def test_makers_are_forgotten_with_what_they_made():
    class Unhashable:
        def __eq__(self, other: object) -> bool:
            return True

    layer, strategy = Unhashable(), SimpleNamespace()
    record_maker(layer, strategy)
    assert maker_of(layer) is strategy and maker_of(Unhashable()) is None


@pytest.mark.parametrize("name", ["OneDeviceStrategy", "MirroredStrategy", "ParameterServerStrategy"])
def test_model_and_strategy_are_freed_together(name: str) -> None:
    def train() -> tuple[weakref.ref[Any], weakref.ref[Any]]:
        strategy = getattr(insitu, name)()
        with strategy.scope():
            model = make_model("functional")
            model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=5, verbose=0)
        return weakref.ref(strategy), weakref.ref(model)

    before = list_descriptors()
    freed = train()
    gc.collect()
    assert [reference() for reference in freed] == [None, None]
    assert find_new_descriptors(before, "socket:", "pipe:") == [], "its parameter server is still there"


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="tf.distribute")
def test_a_model_of_tf_distribute_takes_no_dataset_of_insitu(home: Path, tmp_path: Path) -> None:
    import tensorflow as tf

    np.savez(tmp_path / "rows.npz", x=X, y=Y)
    import_cache(Paths.default(), "rows", [str(tmp_path / "rows.npz")], partitions=1)
    with tf.distribute.MirroredStrategy(["cpu:0"]).scope():
        model = make_model("functional")
        model.compile("sgd", "mse")
    with pytest.raises(TrainingError, match=r"of a strategy of tf\.distribute"):
        model.fit(insitu.dataset("rows", label="y").batch(5), verbose=0)
