"""The callback that lets a restarted job go on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
from numpy.typing import NDArray

from insitu.errors import TrainingError
from insitu.exchange import Group
from insitu.train.binding import Binding, binding_of
from insitu.train.checkpoint import Checkpoint, CheckpointStore
from insitu.train.gather import nothing
from insitu.train.lockstep import SETUP
from insitu.train.state import check_snapshot, load_snapshot, snapshot
from insitu.train.transfer import share


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
        if binding.membership.leads:
            epoch, step = binding.position
            store.save(Checkpoint(epoch, step, snapshot(binding.state)))

    def _restore(self, binding: Binding, store: CheckpointStore) -> None:
        """The first task reads, the others get its state over the exchange: they may not see its disk."""
        told: list[Any] = []

        def work(group: Group) -> NDArray[Any]:
            found = store.load_latest() if group.rank == 0 else None
            if found is not None:
                check_snapshot(binding.state, found.values)
            value = [found.epoch, found.step, found.values] if found is not None else None
            told[:] = [share(group, 0, value)]
            return nothing(group)

        binding.membership.lockstep.insist(binding.session.key(SETUP, 1), work)
        if told and told[0] is not None:
            epoch, step, values = told[0]
            load_snapshot(binding.state, values)
            binding.restore(epoch, step)
            self.model._initial_epoch = epoch
