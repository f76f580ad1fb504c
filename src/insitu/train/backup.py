"""The callback that lets a restarted job go on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras

from insitu.errors import TrainingError
from insitu.train.binding import Binding, binding_of
from insitu.train.checkpoint import Checkpoint, CheckpointStore
from insitu.train.gather import gather_bytes, gather_sizes
from insitu.train.state import broadcast_state, load_snapshot, snapshot


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
        group = binding.membership.group()
        chief = binding.membership.context.is_chief
        found = store.load_latest() if chief else None
        if not max(gather_sizes(group, 1 if found else 0)):
            return
        if found:
            load_snapshot(binding.state, found.values)
        broadcast_state(binding.state, group)
        epoch = max(gather_sizes(group, found.epoch if found else 0))
        step = max(gather_sizes(group, found.step if found else 0))
        ledgers = _from_chief(binding, [text.encode() for text in found.ledgers] if found else None)
        binding.bookkeeper.restore(ledgers)
        state = binding.state
        names = {id(v): n for n, v in state.named()}
        metrics = (*state.sums, *state.metric_first)
        values = snapshot(state)
        binding.metrics_to_restore = {names[id(v)]: values[names[id(v)]] for v in metrics}
        binding.position = (epoch, step)
        self.model._initial_epoch = epoch


def _from_chief(binding: Binding, ledgers: list[bytes] | None) -> list[bytes]:
    """The ledgers of all shards, as the chief has read them."""
    group, context = binding.membership.group(), binding.membership.context
    text = json.dumps([ledger.decode() for ledger in ledgers]).encode() if ledgers is not None else b""
    own = [text if index == 0 else b"" for index in range(len(context.shards))]
    received = max(gather_bytes(group, own), key=len)
    return [ledger.encode() for ledger in json.loads(received)]
