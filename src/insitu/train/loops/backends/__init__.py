"""The replicas of a custom loop, one file per Keras backend: those of `fit`, which also keep what the user's
step returns."""

from __future__ import annotations

from typing import Any, Protocol

from insitu.train.backends import Replica
from insitu.train.loops.program import StepModel


class LoopReplica(Replica, Protocol):
    """`outputs[shard]` are the tensors that the step returned for that shard."""

    outputs: dict[int, list[Any]]


def learn(model: StepModel, example: list[Any]) -> None:
    """Runs the step of `model` without effect on arrays like `example`, so that `model` knows what it
    touches."""
    _backend().learn(model, example)


def make_loop_replica(model: StepModel, example: list[Any]) -> LoopReplica:
    """A replica of `model`, which has learnt what it touches."""
    replica: LoopReplica = _backend().LoopReplica(model, example)
    return replica


def _backend() -> Any:
    import importlib

    import keras

    return importlib.import_module(f"insitu.train.loops.backends.{keras.backend.backend()}")


__all__ = ["LoopReplica", "learn", "make_loop_replica"]
