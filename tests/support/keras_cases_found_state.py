"""Cases of public reports: layers with moving state, metrics and losses over the rows of a batch."""

from __future__ import annotations

from typing import Any, ClassVar

import keras
from keras_case_tools import BATCH, FIT, SEVERAL, Run, case, compiled, dense, numbers, outcome, regress
from keras_cases_metrics import measured
from keras_cases_models import stack, trained

ops = keras.ops


# Layers with moving state


@case(strategies=SEVERAL)
def spectral_normalization(run: Run) -> dict[str, Any]:
    layers = keras.layers
    make = lambda: stack((4,), layers.SpectralNormalization(layers.Dense(3)), layers.Dense(1))  # noqa: E731
    return trained(run, make, *run.rows())


class Kept(keras.layers.Layer):
    """A layer whose weights are moved by `move(self, x)` in training, and which gives `give(self, x)`."""

    move: Any = None
    give: Any = staticmethod(lambda layer, x: x)
    shapes: ClassVar[dict[str, Any]] = {}

    def build(self, shape: Any) -> None:
        for name, (size, first) in self.shapes.items():
            setattr(self, name, self.add_weight(name=name, shape=size, initializer=first, trainable=False))

    def call(self, x: Any, training: bool = False) -> Any:
        given = type(self).give(self, x)
        if training:
            type(self).move(self, x)
        return given


def kept(run: Run, kind: Any, count: int = 40) -> dict[str, Any]:
    x, y = run.rows(count)
    with run.scope():
        model = compiled(stack((4,), keras.layers.Dense(3), kind(), keras.layers.Dense(1)))
    return outcome(model, model.fit(x, y, **FIT))


BOOK = keras.initializers.RandomNormal(seed=3)


class Codebook(Kept):
    """A codebook that follows the vectors next to its entries, by sums over the batch."""

    shapes: ClassVar = {"counts": ((5,), "ones"), "sums": ((5, 3), BOOK), "book": ((5, 3), BOOK)}

    @staticmethod
    def chosen(layer: Any, x: Any) -> Any:
        distance = ops.sum(ops.square(x[:, None] - layer.book), axis=-1)
        return ops.one_hot(ops.argmin(distance, axis=-1), 5)

    @staticmethod
    def give(layer: Any, x: Any) -> Any:
        near = ops.matmul(Codebook.chosen(layer, x), layer.book)
        return x + ops.stop_gradient(near - x)

    @staticmethod
    def move(layer: Any, x: Any) -> None:
        chosen = Codebook.chosen(layer, x)
        layer.counts.assign(0.9 * layer.counts + 0.1 * ops.sum(chosen, axis=0))
        layer.sums.assign(0.9 * layer.sums + 0.1 * ops.matmul(ops.transpose(chosen), x))
        layer.book.assign(layer.sums / layer.counts[:, None])


@case(strategies=SEVERAL)
def codebook_that_moves_by_sums(run: Run) -> dict[str, Any]:
    return kept(run, Codebook)


class Revived(Codebook):
    """A codebook whose rarely used entries become rows of the batch."""

    @staticmethod
    def move(layer: Any, x: Any) -> None:
        Codebook.move(layer, x)
        dead = ops.cast(layer.counts < 0.9, "float32")[:, None]
        layer.book.assign(dead * x[:1] + (1 - dead) * layer.book)


@case(strategies=SEVERAL)
def codebook_with_entries_that_are_revived(run: Run) -> dict[str, Any]:
    return kept(run, Revived)


class FirstRange(Kept):
    """The range of what has passed, for quantized values."""

    shapes: ClassVar = {"low": ((), "zeros"), "high": ((), "zeros")}

    @staticmethod
    def give(layer: Any, x: Any) -> Any:
        return ops.clip(x, layer.low - 0.5, layer.high + 0.5)

    @staticmethod
    def move(layer: Any, x: Any) -> None:
        layer.low.assign(ops.minimum(layer.low, ops.min(x)))
        layer.high.assign(ops.maximum(layer.high, ops.max(x)))


@case(strategies=SEVERAL)
def range_that_grows_and_is_used(run: Run) -> dict[str, Any]:
    return kept(run, FirstRange)


class MovingRange(FirstRange):
    @staticmethod
    def move(layer: Any, x: Any) -> None:
        layer.low.assign(0.9 * layer.low + 0.1 * ops.min(x))
        layer.high.assign(0.9 * layer.high + 0.1 * ops.max(x))


@case(strategies=SEVERAL)
def range_that_moves_by_averages(run: Run) -> dict[str, Any]:
    """An average of extremes over batches is no average of those of parts."""
    return kept(run, MovingRange)


class Steps(Kept):
    """A counter of steps that the output depends on."""

    shapes: ClassVar = {"steps": ((), "zeros")}

    @staticmethod
    def give(layer: Any, x: Any) -> Any:
        return x * ops.minimum(1.0, (layer.steps + 1) / 8)

    @staticmethod
    def move(layer: Any, x: Any) -> None:
        layer.steps.assign_add(1.0)


@case(strategies=SEVERAL)
def output_that_depends_on_the_count_of_steps(run: Run) -> dict[str, Any]:
    return kept(run, Steps)


class Once(Kept):
    """A layer that takes its scale from the first batch, and keeps it."""

    shapes: ClassVar = {"known": ((), "zeros"), "scale": ((), "ones")}

    @staticmethod
    def give(layer: Any, x: Any) -> Any:
        return x / layer.scale

    @staticmethod
    def move(layer: Any, x: Any) -> None:
        found = ops.mean(ops.abs(x))
        layer.scale.assign(ops.where(layer.known > 0, layer.scale, found))
        layer.known.assign(1.0)


@case(strategies=SEVERAL)
def scale_of_the_first_batch(run: Run) -> dict[str, Any]:
    return kept(run, Once)


class Deviation(Kept):
    """Mean and deviation of each batch, averaged, such as those of running normalization by hand."""

    shapes: ClassVar = {"mean": ((3,), "zeros"), "deviation": ((3,), "ones")}

    @staticmethod
    def give(layer: Any, x: Any) -> Any:
        return (x - layer.mean) / layer.deviation

    @staticmethod
    def move(layer: Any, x: Any) -> None:
        layer.mean.assign(0.9 * layer.mean + 0.1 * ops.mean(x, axis=0))
        layer.deviation.assign(0.9 * layer.deviation + 0.1 * ops.std(x, axis=0))


@case(strategies=SEVERAL)
def deviation_of_batches_averaged(run: Run) -> dict[str, Any]:
    return kept(run, Deviation)


class Squares(Kept):
    """Sums of values and squares and their number, of which mean and variance follow."""

    shapes: ClassVar = {"number": ((), "ones"), "total": ((3,), "zeros"), "squares": ((3,), "ones")}

    @staticmethod
    def give(layer: Any, x: Any) -> Any:
        mean = layer.total / layer.number
        return (x - mean) / ops.sqrt(layer.squares / layer.number - ops.square(mean) + 1.0)

    @staticmethod
    def move(layer: Any, x: Any) -> None:
        layer.number.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        layer.total.assign_add(ops.sum(x, axis=0))
        layer.squares.assign_add(ops.sum(ops.square(x), axis=0))


@case(strategies=SEVERAL)
def statistics_of_sums_and_counts(run: Run) -> dict[str, Any]:
    return kept(run, Squares)


class Welford(Kept):
    """The running mean and sum of squared distances, brought up to date batch by batch."""

    shapes: ClassVar = {"number": ((), "zeros"), "mean": ((3,), "zeros"), "distance": ((3,), "zeros")}

    @staticmethod
    def move(layer: Any, x: Any) -> None:
        rows = ops.cast(ops.shape(x)[0], "float32")
        mean, total = ops.mean(x, axis=0), layer.number + rows
        delta = mean - layer.mean
        spread = ops.sum(ops.square(x - mean), axis=0)
        layer.distance.assign(layer.distance + spread + ops.square(delta) * layer.number * rows / total)
        layer.mean.assign(layer.mean + delta * rows / total)
        layer.number.assign(total)


@case(strategies=SEVERAL)
def statistics_brought_up_to_date(run: Run) -> dict[str, Any]:
    return kept(run, Welford)


class Memory(Kept):
    """A queue of the last rows, as for contrastive losses."""

    shapes: ClassVar = {"queue": ((6, 3), "zeros")}

    @staticmethod
    def give(layer: Any, x: Any) -> Any:
        return x + 0.1 * ops.mean(layer.queue, axis=0)

    @staticmethod
    def move(layer: Any, x: Any) -> None:
        layer.queue.assign(ops.concatenate([x, layer.queue])[:6])


@case(strategies=SEVERAL)
def queue_of_the_last_rows(run: Run) -> dict[str, Any]:
    return kept(run, Memory)


class Center(Kept):
    """A center that moves by the mean of the batch; its first step is another one."""

    shapes: ClassVar = {"center": ((3,), "zeros"), "seen": ((), "zeros")}

    @staticmethod
    def give(layer: Any, x: Any) -> Any:
        return x - layer.center

    @staticmethod
    def move(layer: Any, x: Any) -> None:
        rate = ops.where(layer.seen > 0, 0.1, 1.0)
        layer.center.assign(layer.center + rate * (ops.mean(x, axis=0) - layer.center))
        layer.seen.assign_add(1.0)


@case(strategies=SEVERAL)
def center_that_moves_with_a_first_step(run: Run) -> dict[str, Any]:
    return kept(run, Center)


class Rarely(Kept):
    """A weight that moves at every second step only."""

    shapes: ClassVar = {"steps": ((), "zeros"), "mean": ((3,), "zeros")}

    @staticmethod
    def give(layer: Any, x: Any) -> Any:
        return x - layer.mean

    @staticmethod
    def move(layer: Any, x: Any) -> None:
        layer.steps.assign_add(1.0)
        moved = 0.5 * layer.mean + 0.5 * ops.mean(x, axis=0)
        layer.mean.assign(ops.where(ops.equal(layer.steps % 2, 0), moved, layer.mean))


@case(strategies=SEVERAL)
def weight_that_moves_at_every_second_step(run: Run) -> dict[str, Any]:
    return kept(run, Rarely)


class Seen(Kept):
    """How many rows have had a positive value: a part of them, by their values."""

    shapes: ClassVar = {"positive": ((), "zeros"), "share": ((), "zeros")}

    @staticmethod
    def move(layer: Any, x: Any) -> None:
        positive = ops.cast(x[:, 0] > 0, "float32")
        layer.positive.assign_add(ops.sum(positive))
        layer.share.assign(0.9 * layer.share + 0.1 * ops.mean(positive))


@case(strategies=SEVERAL)
def counts_of_rows_by_their_values(run: Run) -> dict[str, Any]:
    return kept(run, Seen)


class Conditional(Kept):
    """A mean over those rows of the batch that are positive: a ratio of two sums."""

    shapes: ClassVar = {"mean": ((), "zeros")}

    @staticmethod
    def move(layer: Any, x: Any) -> None:
        positive = ops.cast(x[:, 0] > 0, "float32")
        mean = ops.sum(positive * x[:, 0]) / ops.maximum(ops.sum(positive), 1.0)
        layer.mean.assign(0.9 * layer.mean + 0.1 * mean)


@case(strategies=SEVERAL)
def mean_of_some_rows_averaged(run: Run) -> dict[str, Any]:
    return kept(run, Conditional)


@case(strategies=SEVERAL, apart=["weights", "history", "evaluated", "predicted"])
def batch_normalization_with_a_mask(run: Run) -> dict[str, Any]:
    """Steps that are masked count in no average."""
    norm = keras.layers.BatchNormalization(momentum=0.0)
    x = run.rng().normal(size=(40, 4, 3)).astype("float32")
    x[:, 2:] = 0
    layers = keras.layers
    pool = layers.GlobalAveragePooling1D()
    result = trained(
        run, lambda: stack((4, 3), layers.Masking(), norm, pool, layers.Dense(1)), x, x.sum((1, 2))
    )
    # The last batch of eight rows, whole.
    return {**result, "mean": numbers(norm.moving_mean)}


# Metrics


class Own(keras.metrics.Metric):
    """A metric with weights of these shapes, moved by `move(self, errors)`; `show(self)` is its value."""

    shapes: ClassVar[dict[str, Any]] = {}
    dtypes = "float32"

    def __init__(self, name: str = "own") -> None:
        super().__init__(name=name)
        for part, (shape, first) in self.shapes.items():
            setattr(self, part, self.add_variable(shape, first, dtype=self.dtypes, name=part))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.move(ops.abs(ops.cast(y_true, "float32") - y_pred)[:, 0])


class RowsSeen(Own):
    """Counts rows as integers."""

    shapes: ClassVar = {"count": ((), "zeros")}
    dtypes = "int32"

    def move(self, errors: Any) -> None:
        self.count.assign_add(ops.shape(errors)[0])

    def result(self) -> Any:
        return ops.cast(self.count, "float32")


@case(strategies=SEVERAL)
def metric_of_integers(run: Run) -> dict[str, Any]:
    return measured(run, RowsSeen())


class Histogram(Own):
    """A table of counts, and of it several numbers."""

    shapes: ClassVar = {"table": ((4,), "zeros")}

    def move(self, errors: Any) -> None:
        place = ops.clip(ops.cast(errors * 2, "int32"), 0, 3)
        self.table.assign_add(ops.sum(ops.one_hot(place, 4), axis=0))

    def result(self) -> Any:
        return {"small": self.table[0], "share": self.table[0] / ops.maximum(ops.sum(self.table), 1.0)}


@case(strategies=SEVERAL)
def metric_with_several_results(run: Run) -> dict[str, Any]:
    return measured(run, Histogram())


class Spread(Own):
    """A running mean and sum of squared distances."""

    shapes: ClassVar = {"number": ((), "zeros"), "mean": ((), "zeros"), "distance": ((), "zeros")}

    def move(self, errors: Any) -> None:
        rows = ops.cast(ops.shape(errors)[0], "float32")
        mean, total = ops.mean(errors), self.number + rows
        delta = mean - self.mean
        spread = ops.sum(ops.square(errors - mean))
        self.distance.assign(self.distance + spread + ops.square(delta) * self.number * rows / total)
        self.mean.assign(self.mean + delta * rows / total)
        self.number.assign(total)

    def result(self) -> Any:
        return self.distance / ops.maximum(self.number, 1.0)


@case(strategies=SEVERAL)
def metric_brought_up_to_date(run: Run) -> dict[str, Any]:
    return measured(run, Spread())


class Product(Own):
    """The product of a number for each row, for a geometric mean."""

    shapes: ClassVar = {"product": ((), "ones"), "number": ((), "zeros")}

    def move(self, errors: Any) -> None:
        self.product.assign(self.product * ops.prod(0.9 + 0.01 * errors))
        self.number.assign_add(ops.cast(ops.shape(errors)[0], "float32"))

    def result(self) -> Any:
        return ops.convert_to_tensor(self.product)


@case(strategies=SEVERAL)
def metric_that_multiplies(run: Run) -> dict[str, Any]:
    return measured(run, Product())


class BatchMeans(Own):
    """The mean over batches of the root of a mean."""

    shapes: ClassVar = {"total": ((), "zeros"), "batches": ((), "zeros")}

    def move(self, errors: Any) -> None:
        self.total.assign_add(ops.sqrt(ops.mean(ops.square(errors))))
        self.batches.assign_add(1.0)

    def result(self) -> Any:
        return self.total / ops.maximum(self.batches, 1.0)


@case(strategies=SEVERAL)
def metric_of_roots_of_batches(run: Run) -> dict[str, Any]:
    return measured(run, BatchMeans())


class Smallest(Own):
    """The smallest and largest, and their distance."""

    shapes: ClassVar = {"low": ((), keras.initializers.Constant(9e9)), "high": ((), "zeros")}

    def move(self, errors: Any) -> None:
        self.low.assign(ops.minimum(self.low, ops.min(errors)))
        self.high.assign(ops.maximum(self.high, ops.max(errors)))

    def reset_state(self) -> None:
        self.low.assign(9e9)
        self.high.assign(0.0)

    def result(self) -> Any:
        return self.high - self.low


@case(strategies=SEVERAL)
def metric_with_a_reset_of_its_own(run: Run) -> dict[str, Any]:
    return measured(run, Smallest())


class Correlation(keras.metrics.Metric):
    """Pearson's correlation, of sums."""

    def __init__(self, name: str = "correlation") -> None:
        super().__init__(name=name)
        self.sums = self.add_variable((6,), "zeros", name="sums")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        a, b = ops.reshape(y_true, (-1,)), ops.reshape(y_pred, (-1,))
        parts = [ops.ones_like(a), a, b, a * a, b * b, a * b]
        self.sums.assign_add(ops.stack([ops.sum(part) for part in parts]))

    def result(self) -> Any:
        n, a, b, aa, bb, ab = (self.sums[i] for i in range(6))
        return (n * ab - a * b) / ops.sqrt((n * aa - a * a) * (n * bb - b * b) + 1e-6)


@case(strategies=SEVERAL)
def metric_of_correlation(run: Run) -> dict[str, Any]:
    return measured(run, Correlation())


@case(strategies=SEVERAL)
def metrics_by_thresholds(run: Run) -> dict[str, Any]:
    """Metrics of Keras with tables of counts, and weights of rows."""
    x, _ = run.rows()
    kinds = keras.metrics
    y = (run.labels() > 1).astype("float32")[:, None]
    weight = run.rng(2).uniform(0, 2, 37).astype("float32")
    metrics = [
        kinds.PrecisionAtRecall(0.5, num_thresholds=11),
        kinds.SensitivityAtSpecificity(0.5, num_thresholds=11),
        kinds.AUC(num_thresholds=11, curve="PR"),
        kinds.FalseNegatives(),
        kinds.BinaryIoU(),
    ]
    with run.scope():
        model = compiled(dense(activation="sigmoid"), loss="binary_crossentropy", weighted_metrics=metrics)
    history = model.fit(x, y, sample_weight=weight, validation_data=(x[:21], y[:21]), **FIT)
    evaluated = model.evaluate(x, y, sample_weight=weight, batch_size=BATCH, verbose=0)
    return outcome(model, history, evaluated=evaluated)


@case(strategies=SEVERAL)
def metrics_of_ranks(run: Run) -> dict[str, Any]:
    x, _ = run.rows()
    kinds = keras.metrics
    metrics = [
        kinds.SparseTopKCategoricalAccuracy(2),
        "accuracy",
        kinds.SparseCategoricalCrossentropy(from_logits=True),
    ]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with run.scope():
        model = compiled(dense(4), loss=loss, metrics=metrics)
    return outcome(model, model.fit(x, run.labels(classes=4), validation_split=0.3, **FIT))


# Losses over the rows of a batch


def lossy(run: Run, loss: Any, **options: Any) -> dict[str, Any]:
    return outcome(*regress(run, loss=loss, optimizer=keras.optimizers.SGD(0.02), **options))


def squares(y: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y - y_pred), axis=-1)


@case(strategies=SEVERAL)
def loss_of_a_root(run: Run) -> dict[str, Any]:
    """The root of the mean is not the mean of the roots."""
    return lossy(run, lambda y, p: ops.sqrt(ops.mean(squares(y, p))))


@case(strategies=SEVERAL)
def loss_of_the_hardest_rows(run: Run) -> dict[str, Any]:
    return lossy(run, lambda y, p: ops.mean(ops.sort(squares(y, p))[-2:]))


@case(strategies=SEVERAL)
def loss_weighed_by_the_batch(run: Run) -> dict[str, Any]:
    """Weights of rows that are divided by their mean over the batch."""

    def loss(y: Any, p: Any) -> Any:
        weight = ops.abs(y[:, 0]) + 0.1
        return ops.mean(squares(y, p) * weight / ops.mean(weight))

    return lossy(run, loss)


@case(strategies=SEVERAL)
def loss_of_correlation(run: Run) -> dict[str, Any]:
    def loss(y: Any, p: Any) -> Any:
        a, b = y - ops.mean(y), p - ops.mean(p)
        return 1 - ops.sum(a * b) / ops.sqrt(ops.sum(a * a) * ops.sum(b * b) + 1e-6)

    return lossy(run, loss)


@case(strategies=SEVERAL)
def loss_divided_by_a_part_of_the_batch(run: Run) -> dict[str, Any]:
    """The mean over the rows whose label is positive, as in detection."""

    def loss(y: Any, p: Any) -> Any:
        positive = ops.cast(y[:, 0] > 0, "float32")
        return ops.sum(squares(y, p) * positive) / ops.maximum(ops.sum(positive), 1.0)

    return lossy(run, loss)


@case(strategies=SEVERAL, backends=["tensorflow", "torch"])
def loss_without_a_reduction(run: Run) -> dict[str, Any]:
    """A loss that gives a number for each row, and no one adds them up."""
    return lossy(run, keras.losses.MeanSquaredError(reduction=None))


@case(strategies=SEVERAL)
def loss_that_is_clipped(run: Run) -> dict[str, Any]:
    """A bound for the mean of the batch, which replicas mustn't apply to theirs."""
    return lossy(run, lambda y, p: ops.maximum(ops.mean(squares(y, p)), 0.2))


@case(strategies=SEVERAL)
def loss_with_a_second_part_of_the_batch(run: Run) -> dict[str, Any]:
    """A regularizer over the batch: the outputs are to have a variance of one."""
    return lossy(run, lambda y, p: squares(y, p) + 0.1 * ops.square(ops.var(p) - 1))
