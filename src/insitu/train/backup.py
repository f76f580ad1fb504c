"""The callback that lets a restarted job go on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras

from insitu.errors import TrainingError
from insitu.train.binding import Binding, binding_of
from insitu.train.checkpoint import Checkpoint, CheckpointStore
from insitu.train.gather import gather_bytes
from insitu.train.state import broadcast_state, load_snapshot, snapshot, to_numpy


class BackupAndRestore(keras.callbacks.Callback):
    """Saves the training's whole state, and restores it when the script runs again after a failure.

    Weights, optimizer, metrics, seeds, position in the data and the ledger are restored, so that the run
    ends with the bits of an undisturbed one. What Python objects hold is not: a callback such as
    `EarlyStopping` starts over. The chief writes; give the callback in every task.

    Args:
        directory: where to save. By default the job's own folder; outside a job nothing is saved, since
            nobody would restart the script.
        save_freq: `"epoch"`, or a number of steps; then also at each epoch's end.
        keep: how many checkpoints of a fit stay on disk.
    """

    def __init__(
        self, directory: str | Path | None = None, *, save_freq: str | int = "epoch", keep: int = 2
    ) -> None:
        super().__init__()
        if save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq > 0):
            raise TrainingError(f"save_freq is 'epoch' or a number of steps above 0. Received: {save_freq!r}")
        self._directory = Path(directory) if directory is not None else None
        self._save_freq = save_freq
        self._keep = keep
        self._store: CheckpointStore | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        binding = self._binding()
        directory = self._directory or binding.membership.context.checkpoint_dir
        if directory is None:
            return
        self._store = CheckpointStore(directory, binding.fit_index, self._keep)
        self._restore(binding, self._store)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._store is None or self._save_freq == "epoch":
            return
        if (batch + 1) % int(self._save_freq) == 0:
            self._save(self._store)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._store is not None:
            self._save(self._store)

    def on_train_end(self, logs: Any = None) -> None:
        binding, epochs = self._binding(), self.params["epochs"]
        if self._store is not None and binding.position[0] < epochs:
            # Stopped early: a restarted script must not train on.
            binding.position = (epochs, 0)
            self._save(self._store)
        # A later fit of the same model begins where its own arguments say.
        self.model._initial_epoch = None

    def _binding(self) -> Binding:
        binding = binding_of(self.model)
        if binding is None:
            raise TrainingError(
                "insitu.BackupAndRestore needs a model that was compiled in a strategy's scope. Received: a "
                "model outside of any. Put model.compile() inside `with strategy.scope():`."
            )
        return binding

    def _save(self, store: CheckpointStore) -> None:
        binding = self._binding()
        ledgers = gather_bytes(binding.membership.group(), binding.bookkeeper.snapshot())
        if binding.membership.context.is_chief:
            epoch, step = binding.position
            texts = tuple(ledger.decode() for ledger in ledgers)
            store.save(Checkpoint(epoch, step, snapshot(binding.state), texts))

    def _restore(self, binding: Binding, store: CheckpointStore) -> None:
        """The chief reads, the others get its state over the exchange: they may not see its disk."""
        found = store.load_latest() if binding.membership.context.is_chief else None
        told = json.dumps([found.epoch, found.step, found.ledgers]).encode() if found else b""
        message = _from_chief(binding, told)
        if not message:
            return
        epoch, step, ledgers = json.loads(message)
        if found:
            load_snapshot(binding.state, found.values)
        broadcast_state(binding.state, binding.membership.group())
        binding.bookkeeper.restore([ledger.encode() for ledger in ledgers])
        state = binding.state
        metrics = {id(variable) for variable in (*state.sums, *state.metric_first)}
        binding.metrics_to_restore = {n: to_numpy(v) for n, v in state.named() if id(v) in metrics}
        binding.position = (epoch, step)
        self.model._initial_epoch = epoch


def _from_chief(binding: Binding, message: bytes) -> bytes:
    """What the chief says, in each task; the others pass nothing."""
    others = [b""] * (len(binding.membership.context.shards) - 1)
    return max(gather_bytes(binding.membership.group(), [message, *others]), key=len)
