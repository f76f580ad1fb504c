"""Steps of a probe on the PyTorch backend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import torch
from numpy.typing import NDArray

from insitu.train.replica import (
    BatchTotals,
    capture_gradients,
    count_losses,
    count_rows,
    map_batch,
    refuse_use_of_updated,
    watch_step,
)
from insitu.train.replica.probe import Outcome, Totals, losses_of, read_logs, to_float64


class TorchSteps:
    """See `Steps`."""

    def __init__(self, model: Any, trainable: Any) -> None:
        self._model = model
        self._trainable = trainable
        self.demands_totals = True
        self._training = model.training
        self._random_state = torch.get_rng_state()

    def train(self, data: Any, *, totals: Totals = None, factor: float = 1.0, shift: float = 0.0) -> Outcome:
        model = self._model

        def on_apply() -> None:
            with torch.no_grad():
                for variable in self._trainable:
                    variable._value.add_(shift)  # what the step may not read any more

        model.train()
        for variable in self._trainable:
            variable.value.grad = None
        with (
            torch.enable_grad(),
            watch_step(model) as watch,
            losses_of(model, self, totals, data),
            capture_gradients(model.optimizer, on_apply if shift else None) as captured,
            refuse_use_of_updated(model, captured.is_applied),
            self._scaled_gradients(factor) as seen,
        ):
            logs = read_logs(model.train_step(_as_tensors(data)), watch)
        by_variable = {id(v): g for v, g in zip(captured.variables, captured.gradients, strict=True)}
        gradients = [_or_zero(v, by_variable.get(id(v))) for v in self._trainable]
        logs = {name: to_float64(value) for name, value in logs.items()}
        return Outcome(gradients, logs, frozenset(watch.means.variables), bool(seen))

    def test(self, data: Any, *, totals: Totals = None) -> Outcome:
        self._model.eval()
        model = self._model
        with torch.no_grad(), watch_step(model) as watch, losses_of(model, self, totals, data):
            logs = read_logs(self._model.test_step(_as_tensors(data)), watch)
        logs = {name: to_float64(value) for name, value in logs.items()}
        return Outcome([], logs, frozenset(watch.means.variables))

    def count(self, data: Any, *, training: bool) -> Totals:
        model = self._model
        model.train(training)
        with count_losses(model) as counts, torch.set_grad_enabled(training):
            if training:
                with capture_gradients(model.optimizer, trains=bool(self._trainable)):
                    model.train_step(_as_tensors(data))
            else:
                model.test_step(_as_tensors(data))
        totals = np.array([count_rows(data), *map(float, counts.totals)], np.float32)
        return BatchTotals(totals, [each.detach() for each in counts.rows])

    def forward(self, data: Any, *, training: bool) -> list[NDArray[Any]]:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(_as_tensors(data))
        options = {"training": training} if self._model._call_has_training_arg else {}
        self._model.train(training)
        with torch.no_grad():
            return [to_float64(leaf) for leaf in keras.tree.flatten(self._model(x, **options))]

    def close(self, *, chance_used: bool) -> None:
        del chance_used  # each step draws its random numbers again
        for variable in self._trainable:
            variable.value.grad = None
        self._model.train(self._training)
        torch.set_rng_state(self._random_state)

    @contextlib.contextmanager
    def _scaled_gradients(self, factor: float) -> Iterator[list[bool]]:
        """While open, scale losses of which gradients are taken. The list isn't empty once one was."""
        seen: list[bool] = []
        original = torch.Tensor.backward

        def backward(tensor: Any, *arguments: Any, **options: Any) -> Any:
            seen.append(True)
            return original(tensor if factor == 1 else tensor * factor, *arguments, **options)

        torch.Tensor.backward = backward
        try:
            yield seen
        finally:
            torch.Tensor.backward = original


def _as_tensors(data: Any) -> Any:
    return map_batch(lambda leaf: keras.ops.convert_to_tensor(np.array(leaf)), data)


def _or_zero(variable: Any, gradient: Any) -> NDArray[np.float64]:
    return np.zeros(tuple(variable.shape)) if gradient is None else to_float64(gradient)
