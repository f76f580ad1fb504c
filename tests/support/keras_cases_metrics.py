"""Cases: metrics, and several optimizers."""

from __future__ import annotations

from typing import Any

import keras
from keras_case_tools import BATCH, FIT, Run, SumOf, case, compiled, dense, numbers, outcome

ops = keras.ops


# Metrics


def measured(run: Run, *metrics: Any) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        model = compiled(dense(), metrics=list(metrics))
    history = model.fit(x, y, validation_data=(x[:21], y[:21]), **FIT)
    return outcome(model, history, evaluated=model.evaluate(x, y, batch_size=BATCH, verbose=0))


class Kept(keras.metrics.Metric):
    """A metric that doesn't add up over rows."""

    def __init__(self, how: str, name: str = "kept") -> None:
        super().__init__(name=name)
        self.how = how
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        errors = ops.abs(y_true - y_pred)
        if self.how == "max":
            self.value.assign(ops.maximum(self.value, ops.max(errors)))
        elif self.how == "moving":
            self.value.assign(0.8 * self.value + 0.2 * ops.mean(errors))
        elif self.how == "batches":
            self.value.assign_add(1.0)
        else:
            self.value.assign(ops.mean(errors))

    def result(self) -> Any:
        return ops.convert_to_tensor(self.value)


@case()
def metric_that_sums(run: Run) -> dict[str, Any]:
    return measured(run, SumOf())


@case()
def metric_that_keeps_the_largest(run: Run) -> dict[str, Any]:
    return measured(run, Kept("max"))


@case()
def metric_that_moves_an_average(run: Run) -> dict[str, Any]:
    return measured(run, Kept("moving"))


@case()
def metric_that_counts_batches(run: Run) -> dict[str, Any]:
    return measured(run, Kept("batches"))


@case()
def metric_of_the_last_batch(run: Run) -> dict[str, Any]:
    return measured(run, Kept("last"))


@case()
def metrics_of_regression(run: Run) -> dict[str, Any]:
    names = keras.metrics
    return measured(run, names.RootMeanSquaredError(), names.R2Score(), names.CosineSimilarity(), "mape")


@case()
def metric_functions(run: Run) -> dict[str, Any]:
    def largest(y: Any, y_pred: Any) -> Any:
        return ops.max(ops.abs(y - y_pred), axis=-1)

    def scalar(y: Any, y_pred: Any) -> Any:
        return ops.mean(ops.abs(y - y_pred))

    return measured(run, largest, scalar)


@case()
def metrics_of_classes(run: Run) -> dict[str, Any]:
    x, _ = run.rows()
    names = keras.metrics
    y = (run.labels() > 1).astype("float32")[:, None]
    metrics = [names.AUC(num_thresholds=11), names.Precision(), names.Recall(), names.F1Score(threshold=0.5)]
    with run.scope():
        model = compiled(
            dense(activation="sigmoid"), loss="binary_crossentropy", metrics=["accuracy", *metrics]
        )
    history = model.fit(x, y, validation_data=(x[:21], y[:21]), **FIT)
    return outcome(model, history, evaluated=model.evaluate(x, y, batch_size=BATCH, verbose=0))


@case()
def confusion_metrics(run: Run) -> dict[str, Any]:
    x, _ = run.rows()
    metric = keras.metrics.MeanIoU(3, sparse_y_pred=False)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with run.scope():
        model = compiled(dense(3), loss=loss, metrics=[metric])
    history = model.fit(x, run.labels(), **FIT)
    return outcome(model, history)


# Several optimizers


class Pair(keras.Model):
    """Two networks that are trained in turn, in the manner of a GAN without random numbers."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.maker, self.critic = dense(4), dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.critic(self.maker(x))

    def compile(self, first: Any, second: Any, **options: Any) -> None:
        super().compile(optimizer=first, **options)
        if self.where == "attribute":
            self.second = second
        elif self.where == "dict":
            self.optimizers = {"second": second}
        else:
            self._hidden = lambda: second

    def other(self) -> Any:
        if self.where == "attribute":
            return self.second
        return self.optimizers["second"] if self.where == "dict" else self._hidden()

    def train_step(self, data: Any) -> Any:
        x, _ = data
        critic = self._step(self.optimizer, self.critic, lambda: self._critic_loss(x))
        maker = self._step(
            self.other(), self.maker, lambda: ops.mean(ops.softplus(-self.critic(self.maker(x))))
        )
        return {"critic": critic, "maker": maker}

    def _critic_loss(self, x: Any) -> Any:
        real, made = self.critic(x), self.critic(self.maker(x))
        return ops.mean(ops.softplus(-real)) + ops.mean(ops.softplus(made))

    def _step(self, optimizer: Any, network: Any, loss_of: Any) -> Any:
        variables = list(network.trainable_variables)
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = loss_of()
            gradients = tape.gradient(loss, [v.value for v in variables])
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss
        import torch

        self.zero_grad()
        loss = loss_of()
        loss.backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)
        return loss.detach()


def adversaries(run: Run, where: str) -> dict[str, Any]:
    x, y = run.rows(40)
    with run.scope():
        model = Pair(where)
        eager = {"jit_compile": False} if run.backend == "tensorflow" else {}
        model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.05, momentum=0.9), **eager)
    history = model.fit(x, y, **FIT)
    return outcome(model, history, second=int(numbers(model.other().iterations)))


@case(backends=["tensorflow", "torch"])
def two_optimizers_as_attributes(run: Run) -> dict[str, Any]:
    return adversaries(run, "attribute")


@case(backends=["tensorflow", "torch"])
def two_optimizers_in_a_dictionary(run: Run) -> dict[str, Any]:
    return adversaries(run, "dict")


@case(backends=["tensorflow", "torch"])
def two_optimizers_behind_a_function(run: Run) -> dict[str, Any]:
    return adversaries(run, "function")


@case(backends=["tensorflow", "torch"])
def two_updates_in_a_step(run: Run) -> dict[str, Any]:
    """One optimizer, applied twice in each step to the same variables."""

    class Twice(Pair):
        def train_step(self, data: Any) -> Any:
            x, y = data
            loss_of = lambda: ops.mean(ops.square(y - self.critic(self.maker(x))))  # noqa: E731
            first = self._step(self.optimizer, self, loss_of)
            return {"first": first, "second": self._step(self.optimizer, self, loss_of)}

    x, y = run.rows(40)
    with run.scope():
        model = Twice("attribute")
        eager = {"jit_compile": False} if run.backend == "tensorflow" else {}
        model.compile(keras.optimizers.SGD(0.1), None, **eager)
    return outcome(model, model.fit(x, y, **FIT))
