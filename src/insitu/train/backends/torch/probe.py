"""Steps of a probe on the PyTorch backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import torch

from insitu.train.replica.probe import EagerSteps


class TorchSteps(EagerSteps):
    """See `Steps`."""

    def __init__(self, model: Any, trainable: Any) -> None:
        super().__init__(model, trainable)
        self._training = model.training
        self._random_state = torch.get_rng_state()

    def _to_tensor(self, leaf: Any) -> Any:
        return keras.ops.convert_to_tensor(np.array(leaf))

    def _shift(self, shift: float) -> None:
        with torch.no_grad():
            for variable in self._trainable:
                variable._value.add_(shift)  # what the step may not read any more

    def _mode(self, *, training: bool, differentiates: bool) -> contextlib.AbstractContextManager[Any]:
        self._model.train(training)
        if differentiates:
            self._forget_gradients()
        mode: contextlib.AbstractContextManager[Any] = torch.set_grad_enabled(differentiates)
        return mode

    def _forget_gradients(self) -> None:
        for variable in self._trainable:
            variable.value.grad = None

    def close(self, *, chance_used: bool) -> None:
        del chance_used  # each step draws its random numbers again
        self._forget_gradients()
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


def random_functions(
    of_keras: Mapping[str, Any],
) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """See `Backend`."""
    for name in ("randn_like", "rand_like"):
        yield torch, name, lambda value, **options: torch.zeros_like(value)
    yield torch, "randn", lambda *size, **options: _zeros(size, options)
    yield torch, "rand", lambda *size, **options: _zeros(size, options) + 0.5
    yield torch, "randperm", lambda n, **options: torch.arange(n)
    yield torch, "bernoulli", lambda value, **options: (value >= 0.5).to(value)


def _zeros(size: Any, options: dict[str, Any]) -> Any:
    kept = {name: value for name, value in options.items() if name in ("dtype", "device", "requires_grad")}
    return torch.zeros(*(size or options.get("size", ())), **kept)
