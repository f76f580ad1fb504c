"""Train on one device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from insitu.base.context import Context
from insitu.base.errors import TrainingError
from insitu.train.devices import Device, resolve
from insitu.train.fit import StepExecutor
from insitu.train.replicated import pin_step
from insitu.train.strategies.synchronous import SynchronousStrategy


class OneDeviceStrategy(SynchronousStrategy):
    """One replica on the named device: variables are there, steps run there.

    Keras' own step runs; the bits are those of plain Keras on that device. A job with one task may
    have several shards; their gradients are then computed one after the other and combined in shard order.

    Args:
        device: such as `"cpu:0"` or `"gpu:1"`; also as a backend writes it (`"/device:GPU:1"`, `"cuda:1"`).
        context: who this process is; read from the environment by default.

    Raises:
        InputError: for a device that isn't there; the message lists those that are.
        TrainingError: in a job with several workers, each of which would train a model of its own.

    Example:
        >>> strategy = insitu.OneDeviceStrategy("cpu:0")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(10)])
        ...     model.compile("adam", "mse")
        >>> strategy.num_replicas_in_sync
        1
    """

    def __init__(self, device: str | Device = "cpu:0", *, context: Context | None = None) -> None:
        super().__init__(context=context)
        workers = len(self.membership.context.workers)
        if workers > 1:
            raise TrainingError(
                f"One device is one worker's. Received: a job with {workers} workers. Start it with "
                "--workers 1, or use MultiWorkerMirroredStrategy."
            )
        self.device = resolve(device)

    def placement(self) -> AbstractContextManager[Any]:
        return self.device.scope()

    def make_step(self, model: Any, example: Any, *, first: bool) -> StepExecutor:
        return pin_step(super().make_step(model, example, first=first), self.device)
