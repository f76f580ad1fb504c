"""A script says over which rows a loss goes in which the rows of a batch depend on each other."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from insitu.base.errors import InputError, TrainingError
from insitu.train.replica.batch_losses import check_global, find_rows, over_batch

ops = keras.ops


def contrast(pairs: Any, found: Any) -> Any:
    """Each row is to be like its own partner, and unlike those of the other rows."""
    logits = found @ ops.transpose(pairs)
    return keras.losses.sparse_categorical_crossentropy(ops.arange(ops.shape(found)[0]), logits, True)


def contrast_in_halves(pairs: Any, found: Any) -> Any:
    half = ops.shape(found)[0] // 2
    return ops.concatenate([contrast(pairs[:half], found[:half]), contrast(pairs[half:], found[half:])])


def make(loss: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def test_each_replica_takes_its_own_rows(strategy_over: Any) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(24, 4)).astype("float32"), rng.normal(size=(24, 3)).astype("float32")
    options: dict[str, Any] = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    plain = make(contrast_in_halves)
    expected = plain.fit(x, y, **options).history
    with strategy_over(2).scope():
        model = make(over_batch(contrast, rows="replica"))
    np.testing.assert_allclose(model.fit(x, y, **options).history["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(model.get_weights()[0], plain.get_weights()[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        model.evaluate(x, y, batch_size=8, verbose=0),
        plain.evaluate(x, y, batch_size=8, verbose=0),
        rtol=1e-5,
    )


class Pairs(keras.Model):
    """A model whose output has a column for each row of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        found = self.hidden(x)
        return found @ ops.transpose(found)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        return ops.mean(y_pred)

    over_batch(compute_loss, rows="global")


@pytest.mark.parametrize("step", ["fit", "evaluate"])
def test_outputs_for_pairs_of_rows_have_no_rows_of_the_global_batch(strategy_over: Any, step: str) -> None:
    with strategy_over(2).scope():
        model = Pairs()
        model.compile("sgd")
    with pytest.raises(TrainingError, match=r"outputs for pairs of rows.*rows='replica'"):
        getattr(model, step)(np.ones((8, 4)), batch_size=4, verbose=0)


def test_a_mark_is_found_on_losses_and_methods() -> None:
    class Marked(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return contrast(y_true, y_pred)

    model = make(over_batch(Marked(), rows="global"))
    model.fit(np.ones((2, 4)), np.ones((2, 3)), verbose=0)
    assert find_rows(model) == "global" and find_rows(make("mse")) is None
    check_global(model, 2)
    made = make(over_batch(lambda y, p: contrast(y, p), rows="replica"))
    made.fit(np.ones((2, 4)), np.ones((2, 3)), verbose=0)
    check_global(made, 1)
    with pytest.raises(TrainingError, match="all rows of the global batch"):
        check_global(made, 2)

    class Towers(keras.Sequential):
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            return super().compute_loss(*args, **options)

        over_batch(compute_loss, rows="global")

    both = Towers([keras.Input((4,)), keras.layers.Dense(3)])
    both.compile("sgd", over_batch(Marked(), rows="replica"))
    both.fit(np.ones((2, 4)), np.ones((2, 3)), verbose=0)
    with pytest.raises(TrainingError, match="computed over the same rows"):
        find_rows(both)


@pytest.mark.parametrize(("loss", "rows"), [(contrast, "worker"), ("mse", "replica")])
def test_other_rows_and_names_of_losses_are_refused(loss: Any, rows: str) -> None:
    with pytest.raises(InputError):
        over_batch(loss, rows=rows)
