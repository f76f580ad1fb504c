"""Models with parts of the user's own are planned by what these do."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from insitu.base.errors import TrainingError
from insitu.train.replica.batch_losses import over_batch
from insitu.train.replica.building import build_to_train
from insitu.train.replica.combination import Operation
from insitu.train.replica.plan import CombinationPlan
from insitu.train.replica.probe import plan_combination
from insitu.train.replica.probe.observer import Observer

ops = keras.ops
EXAMPLE = (np.zeros((1, 3), "float32"), np.zeros((1, 1), "float32"))


def plan(model: Any, example: Any = EXAMPLE, **options: Any) -> CombinationPlan:
    model.compile(keras.optimizers.SGD(0.1), **{"loss": "mse", **options})
    build_to_train(model, example)
    return plan_combination(model, example, 2)


def dense(*layers: Any, kind: Any = keras.Sequential) -> Any:
    return kind([keras.Input((3,)), keras.layers.Dense(2, "tanh"), *layers, keras.layers.Dense(1)])


class Stepping(keras.Sequential):
    def changed(self, gradients):
        return gradients

    def loss_of(self, y, p):
        return ops.mean(ops.square(y - p))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        variables = self.trainable_variables
        gradients = self.changed(tape.gradient(loss, variables))
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.after()
        return {"loss": loss}

    def after(self):
        """Do nothing."""


class Clipping(Stepping):
    def changed(self, gradients):
        return tf.clip_by_global_norm(gradients, 1e-2)[0]


class Decaying(Stepping):
    def changed(self, gradients):
        return [0.5 * g + 0.01 * v for g, v in zip(gradients, self.trainable_variables, strict=True)]


class Summing(Stepping):
    def loss_of(self, y, p):
        return ops.sum(ops.square(y - p)) / 8


class Penalty(Stepping):
    """A gradient of a gradient, as of a critic."""

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                p = self(x, training=True)
            slopes = inner.gradient(p, x)
            loss = ops.mean(p) + ops.mean(ops.square(ops.norm(slopes, axis=-1) - 1))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class PastKeras(Stepping):
    """Reads the native variables after their update."""

    def train_step(self, data):
        native = [v.value for v in self.trainable_variables]
        logs = super().train_step(data)
        return {**logs, "size": tf.add_n([tf.reduce_sum(tf.square(v)) for v in native])}


class Noisy(Stepping):
    def loss_of(self, y, p):
        noise = np.random.default_rng().normal(size=()).astype("float32")
        return (1 + noise) * super().loss_of(y, p) + ops.sum(p) * noise


@pytest.mark.parametrize("kind", [Stepping, Decaying, Penalty, Noisy])
def test_steps_whose_gradient_is_a_mean_pass(kind: Any) -> None:
    found = plan(dense(kind=kind))
    found.check_train()
    found.check_test()
    assert not found.operations


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Clipping, "not clip or normalize.*clipnorm="),
        (Summing, "a loss that sums over rows"),
        (PastKeras, "depend on updated weights"),
    ],
)
def test_steps_that_can_not_be_combined_are_refused(kind: Any, message: str) -> None:
    found = plan(dense(kind=kind))
    with pytest.raises(TrainingError, match=message):
        found.check_train()
    found.check_test()


def test_losses() -> None:
    for loss in (
        "mse",
        lambda y, p: ops.mean(ops.abs(y - p), axis=-1),
        lambda y, p: ops.mean(ops.abs(y - p)),
    ):
        plan(dense(), loss=loss).check_train()
    with pytest.raises(TrainingError, match="sums over rows"):
        plan(dense(), loss=lambda y, p: ops.sum(ops.abs(y - p))).check_train()
    with pytest.raises(TrainingError, match=r"rows of a batch depend on each other: .* % from the mean"):
        plan(dense(), loss=lambda y, p: ops.mean(ops.square(y - ops.transpose(p)))).check_train()
    plan(dense(), loss=keras.losses.MeanSquaredError(reduction="sum")).check_train()
    with pytest.raises(TrainingError, match="'mean_squared_error' with 'none'"):
        plan(dense(), loss=keras.losses.MeanSquaredError(reduction="none"))


def left_out(missing):
    """Return a loss that leaves out labels of some value, and divides by how many are left."""

    def loss(y, p):
        kept = ops.cast(ops.logical_not(missing(y)), "float32")
        kept_y = ops.where(missing(y), 0.0, ops.cast(y, "float32"))
        return ops.sum(ops.square(kept_y - p) * kept) / ops.maximum(ops.sum(kept), 1.0)

    return loss


@pytest.mark.parametrize(
    ("value", "missing"),
    [(-1, lambda y: y == -1), (np.nan, ops.isnan), (255, lambda y: y == 255), (7, lambda y: y > 6)],
)
def test_a_loss_that_leaves_out_labels_by_their_value_is_refused(value: float, missing: Any) -> None:
    y = np.where(np.arange(12) % 3 == 0, value, 1.0)[:, None]
    rows = (np.random.default_rng(0).normal(size=(12, 3)).astype("float32"), y.astype("float32"))
    with pytest.raises(TrainingError, match="rows of a batch depend on each other"):
        plan(dense(), rows, loss=left_out(missing)).check_train()
    plan(dense(), rows, loss=lambda y, p: ops.mean(ops.square(ops.nan_to_num(y) - p))).check_train()


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_labels_of_minus_one_are_tried_where_no_row_of_the_data_is_known(dtype: str) -> None:
    rows = (EXAMPLE[0], np.zeros((1, 1), dtype))
    with pytest.raises(TrainingError, match="rows of a batch depend on each other"):
        plan(dense(), rows, loss=left_out(lambda y: y < 0)).check_train()


def test_a_metric_that_leaves_out_labels_by_their_value_is_refused() -> None:
    def error(y, p):
        kept = ops.cast(y >= 0, "float32")
        return ops.sum(ops.abs(y - p) * kept) / ops.maximum(ops.sum(kept), 1.0)

    found = plan(dense(), metrics=[error])
    for check in (found.check_train, found.check_test):
        with pytest.raises(TrainingError, match="of the metric 'error'"):
            check()


@pytest.mark.parametrize(
    "bound",
    [lambda mean: ops.maximum(mean, 0.2), lambda mean: ops.abs(mean - 0.05) + 0.05],
    ids=["clipped", "flooded"],
)
def test_a_bound_for_the_loss_of_a_batch_is_refused(bound: Any) -> None:
    with pytest.raises(TrainingError, match="rows of a batch depend on each other"):
        plan(dense(), loss=lambda y, p: bound(ops.mean(ops.square(y - p)))).check_train()
    plan(dense(), loss=lambda y, p: bound(ops.mean(ops.square(y - p), axis=-1))).check_train()


WEIGHTED = (*EXAMPLE, np.zeros(1, "float32"))


def test_gradients_of_rounding_errors_are_no_sums() -> None:
    """The cosine of two numbers is a sign, and its gradient 0 but for rounding."""

    def cosine(y, p):
        return keras.losses.cosine_similarity(y, p)

    found = plan(dense(), loss=cosine)
    assert found.train_refusal is None
    assert found.unchecked == ("Gradients of made-up rows are nothing but rounding errors",)
    rows = (np.zeros((1, 3), "float32"), np.zeros((1, 2), "float32"))
    summed = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "tanh")])
    found = plan(summed, rows, loss=lambda y, p: ops.sum(cosine(y, p)))
    assert "sums over rows" in str(found.train_refusal)


@pytest.mark.parametrize("columns", range(1, 9))
def test_a_ratio_of_sums_is_refused_whatever_rows_are_drawn(columns: int) -> None:
    model = keras.Sequential([keras.Input((columns,)), keras.layers.Dense(1, "sigmoid")])
    example = (np.zeros((1, columns), "float32"), np.zeros((1, 1), "float32"))
    assert "rows of a batch depend on each other" in str(plan(model, example, loss="tversky").train_refusal)


def test_losses_with_weights() -> None:
    def weighed(y, p):
        return ops.mean(ops.square(y - p))

    class Weighing(keras.losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return ops.mean(ops.square(y_true - y_pred)) * ops.mean(sample_weight)

    plan(dense(), WEIGHTED, loss=weighed).check_train()
    with pytest.raises(TrainingError, match="rows of a batch depend on each other"):
        plan(dense(), WEIGHTED, loss=Weighing()).check_train()


def test_losses_of_keras_over_outputs_without_columns() -> None:
    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(1)(inputs)[:, 0]
    example = (EXAMPLE[0], np.zeros(1, "float32"))
    plan(keras.Model(inputs, outputs), example, loss="mse").check_train()
    with pytest.raises(TrainingError, match="sums over rows"):
        plan(keras.Model(inputs, outputs), example, loss="kl_divergence").check_train()


def test_sums_on_servers() -> None:
    model = dense()
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
    build_to_train(model, EXAMPLE)
    with pytest.raises(TrainingError, match="'mean_squared_error' with 'sum'"):
        plan_combination(model, EXAMPLE, 2, weights_on_servers=True)


class Adds(keras.layers.Layer):
    def __init__(self, reduce: Any) -> None:
        super().__init__()
        self.reduce = reduce

    def call(self, x):
        self.add_loss(0.01 * self.reduce(ops.square(x)))
        return x


def test_losses_that_layers_add() -> None:
    plan(dense(Adds(ops.mean))).check_train()
    with pytest.raises(TrainingError, match="add_loss"):
        plan(dense(Adds(ops.sum))).check_train()


class Norms(keras.layers.Layer):
    """A batch normalization of the user's own."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if not training:
            return x
        self.seen.assign(0.9 * self.seen + 0.1 * ops.var(x))
        return (x - ops.mean(x, axis=0)) / (0.1 + ops.std(x, axis=0))


def test_a_model_that_couples_rows_itself_normalizes_them_in_each_replica() -> None:
    found = plan(dense(Norms()), metrics=[Kept("max")])
    found.check_train()
    assert list(found.operations.values()) == [Operation.LARGEST]


class Codebook(keras.layers.Layer):
    """Gives the nearest row of a book as it was, and moves the book by sums over the batch."""

    def build(self, shape):
        self.counts = self.add_weight(shape=(3,), initializer="ones", trainable=False, name="counts")
        self.sums = self.add_weight(shape=(3, 2), initializer="uniform", trainable=False, name="sums")
        self.book = self.add_weight(shape=(3, 2), initializer="uniform", trainable=False, name="book")

    def call(self, x, training=False):
        book = self.book + 0.0
        nearest = ops.one_hot(ops.argmin(ops.sum((x[:, None] - book) ** 2, -1), 1), 3)
        if training:
            self.counts.assign(0.9 * self.counts + 0.1 * ops.sum(nearest, 0))
            self.sums.assign(0.9 * self.sums + 0.1 * ops.transpose(nearest) @ x)
            self.book.assign(self.sums / self.counts[:, None])
        return x + ops.stop_gradient(nearest @ book - x)


def test_a_weight_that_the_output_of_the_next_step_depends_on_is_judged() -> None:
    with pytest.raises(TrainingError, match=r"Received: '.*codebook.*/counts'.*aggregation='sum'"):
        plan(dense(Codebook())).check_train()


def test_what_differs_is_named_where_the_model_couples_rows() -> None:
    told = plan(dense(Norms(), Codebook())).unchecked
    assert any(
        re.search(r"depends on the other rows.*codebook.*/counts', .*/book' may differ", t) for t in told
    )


def test_a_loss_over_pairs_of_rows_is_refused_unless_its_rows_are_said() -> None:
    class Pairs(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.rows = keras.layers.Dense(2)

        def call(self, x):
            found = self.rows(x)
            return found @ ops.transpose(found)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return ops.mean(y_pred)

    with pytest.raises(TrainingError, match=r"rows of a batch depend on each other.*rows='replica'"):
        plan(Pairs(), loss=None).check_train()
    over_batch(Pairs.compute_loss, rows="replica")
    found = plan(Pairs(), loss=None)
    found.check_train()
    assert not found.unchecked
    over_batch(Pairs.compute_loss, rows="global")
    model = Pairs()
    plan(model, loss=None).check_train()
    with pytest.raises(TrainingError, match="on parameter servers"):
        plan_combination(model, EXAMPLE, 2, weights_on_servers=True).check_train()


def test_a_step_over_the_global_batch_is_refused() -> None:
    class Own(Stepping):
        pass

    Own.train_step = over_batch(lambda self, data: Stepping.train_step(self, data), rows="global")
    with pytest.raises(TrainingError, match=r"Received: insitu.over_batch\(train_step, rows='global'\)"):
        plan(dense(kind=Own)).check_train()


class Counter(keras.layers.Layer):
    def __init__(self, move: Any, dtype: str = "float32", **options: Any) -> None:
        super().__init__()
        self.move, self.kind, self.options = move, dtype, options

    def build(self, shape):
        self.kept = self.add_weight(
            shape=(), initializer="zeros", trainable=False, dtype=self.kind, **self.options
        )

    def call(self, x, training=False):
        if training:
            self.kept.assign(ops.cast(self.move(self.kept, x), self.kept.dtype))
        return x


@pytest.mark.parametrize(
    ("move", "dtype", "operation"),
    [
        (lambda kept, x: kept + 1, "int32", None),
        (lambda kept, x: kept + ops.shape(x)[0], "int32", Operation.SUM_OF_CHANGES),
        (lambda kept, x: kept + ops.cast(ops.shape(x)[0], "float32"), "float32", Operation.SUM_OF_CHANGES),
        (lambda kept, x: 0.9 * kept + 0.1 * ops.mean(x), "float32", None),
        (lambda kept, x: ops.maximum(kept, ops.max(x)), "float32", Operation.LARGEST),
        (lambda kept, x: ops.minimum(kept, ops.min(x) - 9), "float32", Operation.SMALLEST),
    ],
    ids=["steps", "rows", "rows in float", "average", "largest", "smallest"],
)
def test_weights_that_a_step_moves(move: Any, dtype: str, operation: Any) -> None:
    layer = Counter(move, dtype)
    found = plan(dense(layer))
    found.check_train()
    assert found.operations == ({id(layer.kept): operation} if operation else {})


def test_a_weight_without_an_operation_is_refused_unless_it_is_declared() -> None:
    def move(kept, x):
        return kept + ops.sum(x) ** 2

    with pytest.raises(TrainingError, match=r"Received: '.*counter.*aggregation='sum'"):
        plan(dense(Counter(move))).check_train()
    plan(dense(Counter(move, aggregation="mean"))).check_train()
    plan(dense(Counter(move, aggregation="only_first_replica"))).check_train()


def test_a_mean_of_the_positive_rows_is_refused() -> None:
    """A ratio of sums is the mean while all rows are positive."""

    def move(kept, x):
        positive = ops.cast(x[:, 0] > 0, "float32")
        mean = ops.sum(positive * x[:, 0]) / ops.maximum(ops.sum(positive), 1.0)
        return 0.9 * kept + 0.1 * mean

    for first in ([], [keras.layers.Dense(3)]):
        model = keras.Sequential([keras.Input((3,)), *first, Counter(move), keras.layers.Dense(1)])
        with pytest.raises(TrainingError, match=r"Received: '.*counter"):
            plan(model).check_train()


class Kept(keras.metrics.Metric):
    def __init__(self, how: str) -> None:
        super().__init__(name="kept")
        self.how = how
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y, p, sample_weight=None):
        errors = ops.abs(y - p)
        values = {
            "sum": lambda: self.value + ops.sum(errors),
            "max": lambda: ops.maximum(self.value, ops.max(errors)),
            "moving": lambda: 0.8 * self.value + 0.2 * ops.mean(errors),
            "batches": lambda: self.value + 1,
            "last": lambda: ops.mean(errors),
            "norm": lambda: ops.norm(errors),
        }
        self.value.assign(values[self.how]())

    def result(self):
        return ops.convert_to_tensor(self.value)


@pytest.mark.parametrize(
    ("how", "operation"),
    [
        ("sum", None),
        ("max", Operation.LARGEST),
        ("moving", Operation.MEAN),
        ("batches", Operation.MEAN),
        ("last", Operation.MEAN),
    ],
)
def test_metrics_combine_as_they_move(how: str, operation: Any) -> None:
    found = plan(dense(), metrics=["mae", Kept(how)])
    found.check_train()
    found.check_test()
    assert list(found.operations.values()) == ([operation] if operation else [])


def test_a_metric_without_an_operation_is_refused_in_both_steps() -> None:
    found = plan(dense(), metrics=[Kept("norm")])
    for check in (found.check_train, found.check_test):
        with pytest.raises(TrainingError, match=r"'value' of the metric 'kept' \(Kept\)"):
            check()


def test_a_log_that_is_made_of_metrics_is_refused() -> None:
    class Doubles(keras.Sequential):
        def test_step(self, data):
            logs = super().test_step(data)
            return {**logs, "twice": 2 * logs["loss"]}

    found = plan(dense(kind=Doubles))
    found.check_train()
    with pytest.raises(TrainingError, match="'twice' of test_step"):
        found.check_test()


def test_what_can_not_be_probed_is_planned_by_default() -> None:
    class Fails(Stepping):
        def train_step(self, data):
            if data[0].shape[0] == 5:
                raise RuntimeError("no such rows")
            return super().train_step(data)

    found = plan(dense(kind=Fails))
    assert (found.operations, found.train_refusal, found.test_refusal) == ({}, None, None)
    assert found.unchecked == ("train_step fails on made-up rows (RuntimeError: no such rows)",)
    texts = (np.array([["a"]]), np.zeros((1, 1), "float32"))
    model = dense(kind=Summing)
    model.compile("sgd", "mse")
    assert plan_combination(model, texts, 2) == CombinationPlan()
    assert plan_combination(model, EXAMPLE, 1) == CombinationPlan()


def test_models_of_keras_parts_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Observer, "__init__", None)
    assert plan(dense(keras.layers.BatchNormalization()), metrics=["mae"]) == CombinationPlan(loss_exponent=1)


def test_embeddings_and_labels_get_numbers_in_range() -> None:
    """Keys of a table with two rows are 0 and 1: larger ones, tried first, are out of its range."""

    class Own(keras.layers.Layer):
        def call(self, x):
            return x

    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), layers.Embedding(2, 4), Own(), layers.Flatten()]
    )
    model.add(layers.Dense(2))
    example = (np.zeros((1, 3), "int32"), np.zeros((1,), "int64"))
    loss = lambda y, p: ops.sum(ops.sparse_categorical_crossentropy(y, p, from_logits=True))  # noqa: E731
    with pytest.raises(TrainingError, match="sums over rows"):
        plan(model, example, loss=loss).check_train()


def test_a_test_step_is_judged_on_rows_of_which_all_is_a_number() -> None:
    """On JAX a key beyond a table is NaN, and a test has no gradients that would tell."""

    class Lookup(keras.layers.Layer):
        def call(self, x):
            return ops.where(x > 1, float("nan"), ops.cast(x, "float32"))

    model = keras.Sequential([keras.Input((3,), dtype="int32"), Lookup(), keras.layers.Dense(1)])
    example = (np.zeros((1, 3), "int32"), np.zeros((1, 1), "float32"))
    found = plan(model, example, metrics=[lambda y, p: ops.mean(ops.abs(y - p), axis=-1)])
    assert not found.unchecked and found.train_refusal is None and found.test_refusal is None


def test_weights_on_servers_can_only_be_means() -> None:
    model = dense(Counter(lambda kept, x: ops.maximum(kept, ops.max(x))))
    model.compile("sgd", "mse")
    build_to_train(model, EXAMPLE)
    found = plan_combination(model, EXAMPLE, 2, weights_on_servers=True)
    with pytest.raises(TrainingError, match=r"On parameter servers a weight .* is a mean by rows"):
        found.check_train()


def test_half_precision_is_probed_too() -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        plan(dense(kind=Stepping)).check_train()
        found = plan(dense(), loss=lambda y, p: ops.sum(ops.square(y - p)))
    finally:
        keras.config.set_dtype_policy(before)
    with pytest.raises(TrainingError, match="sums over rows"):
        found.check_train()


class Failing(Stepping):
    def loss_of(self, y, p):
        if p.shape[0] == 5:
            raise ValueError("rows in fours only, please\nand more")
        return super().loss_of(y, p)


class Infinite(Stepping):
    def loss_of(self, y, p):
        return super().loss_of(y, p) / ops.zeros(())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Failing, r"train_step fails on made-up rows \(ValueError: rows in fours only, please\)"),
        (Infinite, "Gradients of made-up rows are not finite"),
        (Noisy, "train_step gives other numbers each time"),
    ],
)
def test_what_was_not_found_out_is_told(kind: Any, message: str) -> None:
    assert any(re.fullmatch(f".*{message}.*", each) for each in plan(dense(kind=kind)).unchecked)


def test_plans_have_a_number() -> None:
    sums, refused = (plan(dense(kind=kind)) for kind in (Stepping, Summing))
    assert not sums.unchecked and sums.number == plan(dense(kind=Stepping)).number != refused.number
