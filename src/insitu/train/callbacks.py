"""Callbacks under a strategy: who runs which, and how an epoch goes on in its middle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from insitu.train.adapter import FeedAdapter

if TYPE_CHECKING:
    from insitu.train.binding import Binding

WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)
"""Callbacks that only write files or send reports: one task does, the others would write over it."""


def own_callbacks(callbacks: Any, is_chief: bool) -> list[Any]:
    """The callbacks that this task runs, out of those that the script gives in every task."""
    given = keras.tree.flatten(callbacks) if callbacks else []
    return [c for c in given if is_chief or not isinstance(c, WRITERS)]


class EpochCallbacks(keras.callbacks.CallbackList):
    """Keras' list of callbacks, which here also says where each epoch begins.

    After a restart an epoch begins in its middle: its first steps are skipped, and no callback hears of them,
    so that step numbers, progress bars and schedules go on where they were.
    """

    def __init__(self, binding: Binding, adapter: FeedAdapter, callbacks: list[Any], **params: Any) -> None:
        self._binding = binding
        self._adapter = adapter
        self._skip = 0
        super().__init__(
            callbacks, add_history=True, add_progbar=params["verbose"] != 0, model=binding.model, **params
        )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        resumed_epoch, step = self._binding.position
        self._skip = step if epoch == resumed_epoch else 0
        self._binding.begin_epoch(epoch, self._skip)
        self._adapter.position = (epoch, self._skip)
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch >= self._skip:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch >= self._skip:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._binding.position = (epoch + 1, 0)
        super().on_epoch_end(epoch, logs)
