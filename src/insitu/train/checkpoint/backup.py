"""The callback that lets a restarted job resume."""

from __future__ import annotations

import logging
import os
import stat
import sys
from pathlib import Path
from typing import Any

import keras
from numpy.typing import NDArray

from insitu.base.context import Context
from insitu.base.disk.signatures import derive_key, read_user_key
from insitu.base.errors import CheckpointError, TrainingError
from insitu.base.measure.time_account import ACCOUNT, CHECKPOINT
from insitu.exchange import Group
from insitu.train.checkpoint.async_writer import AsyncCheckpointWriter, wait_for_writers
from insitu.train.checkpoint.store import Checkpoint, CheckpointStore
from insitu.train.collectives import all_gather_json, barrier_token, broadcast_value
from insitu.train.elastic import RESTORE
from insitu.train.fit import KerasTrainer, trainer_of
from insitu.train.replica import check_saved_vocabularies, check_snapshot, find_vocabularies, views


class BackupAndRestore(keras.callbacks.Callback):
    """Saves the training's whole state, and restores it when the script runs again after a failure.

    Weights, optimizer, metrics, seeds, position in the data, the ledger and what callbacks remember in plain
    values (numbers, text, arrays, and lists of them) are restored, so that the run ends with the bits of one
    without a failure. A worker that is replaced while the others live needs no checkpoint: this is for the
    case that all are lost. One task writes, in a thread; pass the callback in every task.

    Checkpoints are signed: by the job in its own folder, and by the user in a `directory`, with the key in
    `$INSITU_HOME/keys`. One that was forged is passed over.

    Args:
        directory: where to save: a path, or any URL that fsspec knows (`"s3://bucket/run"`). By default the
            job's own folder; outside a job nothing is saved, since no controller would restart the script.
        save_freq: `"epoch"`, or a number of steps; then also at each epoch's end.
        keep: how many checkpoints of a fit are kept.

    Raises:
        TrainingError: for a wrong argument, or a model outside of any strategy's scope.
        CheckpointError: if the newest checkpoint is of another model, or of other vocabularies; at the next
            save or at the end of training, if a checkpoint could not be written (if only room was lacking,
            there is a warning, and training continues).

    Example:
        >>> callback = insitu.BackupAndRestore("backups", save_freq=500)
        >>> insitu.BackupAndRestore(save_freq="day")  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        insitu.base.errors.TrainingError: ...
    """

    restores_training = True
    """Read by `fit`: other callbacks begin after this one."""

    fit: int | None = None
    """Number of the series of checkpoints; None: that of the fit in its script."""

    def __init__(
        self, directory: str | Path | None = None, *, save_freq: str | int = "epoch", keep: int = 2
    ) -> None:
        super().__init__()
        if save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq > 0):
            raise TrainingError(f"save_freq is 'epoch' or a number of steps above 0. Received: {save_freq!r}")
        self._directory = directory
        self._save_freq = save_freq
        self._keep = keep
        self._writer: AsyncCheckpointWriter | None = None
        self._memory_writer: AsyncCheckpointWriter | None = None
        #: A digest of each vocabulary, by name. Written as a fit begins.
        self._vocabularies: dict[str, str] = {}

    @property
    def hears_batches(self) -> bool:
        """True if it saves between the batches of an epoch."""
        return self._save_freq != "epoch"

    def on_train_begin(self, logs: Any = None) -> None:
        trainer = self._trainer()
        context = trainer.membership.context
        directory = self._directory or context.checkpoint_dir
        if directory is None:
            return
        self._vocabularies = find_vocabularies(self.model)
        # Another job may resume from a directory that the user gives.
        key = None if self._directory else checkpoint_key(context)
        fit = trainer.fit_index if self.fit is None else self.fit
        note = context.job.saved_elsewhere(fit) if self._directory and context.job is not None else None
        store = CheckpointStore(directory, fit, self._keep, key, note)
        memory = memory_store(context, fit)
        for place in (store, memory):
            if place is not None:
                wait_for_writers(place)
        with trainer.membership.reporter.sampler.hold(CHECKPOINT):
            self._restore(trainer, store, memory)
        trainer.strategy.expect_saves()
        self._writer = AsyncCheckpointWriter(store)
        self._memory_writer = AsyncCheckpointWriter(memory) if memory is not None else None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._save_freq != "epoch" and (batch + 1) % int(self._save_freq) == 0:
            self._schedule_save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._schedule_save()

    def on_train_end(self, logs: Any = None) -> None:
        epochs = self.params["epochs"]
        if self._writer is not None:
            if self._needs_last_save(epochs):
                position = self._trainer().position
                self._save_at(epochs, 0, ended_at=[position.epoch, position.step])
            writers, self._writer, self._memory_writer = (self._writer, self._memory_writer), None, None
            with ACCOUNT.hold(CHECKPOINT):
                for writer in writers:
                    if writer is not None:
                        writer.finish()

    def _needs_last_save(self, epochs: int) -> bool:
        """Return whether the end of a fit isn't saved yet: it has stopped early. A script that is started
        again must not train on."""
        return self._trainer().position.epoch < epochs

    def _trainer(self) -> KerasTrainer:
        trainer = trainer_of(self.model)
        if trainer is None:
            raise TrainingError(
                "insitu.BackupAndRestore needs a model that was compiled in a strategy's scope. Received: "
                f"{self.model.name!r}, compiled outside. Put model.compile() inside `with strategy.scope():`."
            )
        return trainer

    def _schedule_save(self) -> None:
        """Save once all callbacks have handled the present event, since their state is saved too."""
        callbacks = self._trainer().callbacks
        if self._writer is not None and callbacks is not None and self._save not in callbacks.due:
            callbacks.due.append(self._save)

    def _save(self) -> None:
        position = self._trainer().position
        self._save_at(position.epoch, position.step)

    def _save_at(self, epoch: int, step: int, **more: Any) -> None:
        """Copy the state in memory and hand it to a writer. The first task's checkpoint goes to disk."""
        trainer = self._trainer()
        writer = self._writer if trainer.membership.is_leader else self._memory_writer
        if writer is None or trainer.callbacks is None:
            return
        if trainer.strategy.save_elsewhere():
            return
        with ACCOUNT.hold(CHECKPOINT):
            writer.submit(
                Checkpoint(epoch, step, views(trainer.state), {**self._more(trainer, epoch), **more})
            )

    def _more(self, trainer: KerasTrainer, epoch: int) -> dict[str, Any]:
        """Return what a checkpoint holds beside the position and the variables."""
        return {
            **trainer.loop.checkpoint_extras(),
            "final": epoch >= self.params["epochs"],
            "job": trainer.membership.context.job_id,
            "vocabularies": self._vocabularies,
        }

    def _restore(self, trainer: KerasTrainer, store: CheckpointStore, memory: CheckpointStore | None) -> None:
        """Load the newest state that any task holds. The first task reads the disk, which others may not see,
        and each task its memory; the owner of the newest state broadcasts it."""
        received: list[Any] = []

        def work(group: Group) -> NDArray[Any]:
            places = [store if group.rank == 0 else None, memory]
            read = [place.load_latest() for place in places if place is not None]
            found = max((one for one in read if one), key=lambda one: one.position, default=None)
            if found is not None:
                try:
                    check_snapshot(trainer.state, found.values)
                except CheckpointError as error:
                    path = store.path_of(found.position)
                    raise CheckpointError(f"{path} is of another model. {error}") from None
            received[:] = [broadcast_newest(group, found)]
            return barrier_token(group)

        trainer.membership.lockstep.run_unit_until_done(trainer.calls.position(RESTORE), work)
        if not received:
            return
        if received[0] is None:
            self._tell_beginning(trainer, store)
            return
        (epoch, step), values, more = received[0]
        check_saved_vocabularies(more, self._vocabularies)
        if trainer.membership.is_leader:
            sys.stderr.write(
                f"[insitu] Training continues from the checkpoint of epoch {epoch}, step {step}\n"
            )
        self._enter(trainer, epoch, step, values, more)

    def _enter(self, trainer: KerasTrainer, epoch: int, step: int, values: dict[str, Any], more: Any) -> None:
        """Enter the fit at the position of a checkpoint."""
        trainer.loop.restore(epoch, step, values, more)

    def _tell_beginning(self, trainer: KerasTrainer, store: CheckpointStore) -> None:
        """Report that a restarted script has found nothing to resume from, here or on servers."""
        begins = (trainer.position.epoch, trainer.position.step) == (0, 0)
        if begins and trainer.membership.is_leader and trainer.membership.context.incarnation > 1:
            sys.stderr.write(
                f"[insitu] Training starts from its beginning: {store.path} has no checkpoint to read\n"
            )


# Checkpoints in the memory of the tasks' hosts, for a job whose disk with checkpoints is lost.
#
# Replicas are equal, so nothing needs to be sent. While one task writes a checkpoint to disk, each other task
# writes its own to its host's memory. These are files that outlive the task, in the format of those on disk,
# with checksums. When all tasks restart, they use the newest whole checkpoint that any of them holds


_LOG = logging.getLogger("insitu")


def checkpoint_key(context: Context) -> bytes:
    """Return the key that checkpoints in the job's own folders are signed with; outside a job, the user's."""
    return derive_key(context.signing_secret() or read_user_key(context.paths), "checkpoints")


def memory_store(context: Context, fit: int) -> CheckpointStore | None:
    """Return the store of this task's checkpoints of a fit in memory, or None if none is wanted or
    possible."""
    folder = context.memory_checkpoint_dir
    if folder is None:
        return None
    try:
        _make_private(folder.parent)
    except OSError as error:
        _LOG.warning("Checkpoints can't be kept in memory: %s", error)
        return None
    # One suffices: the other tasks have theirs.
    return CheckpointStore(folder, fit, keep=1, key=checkpoint_key(context))


def _make_private(folder: Path) -> None:
    """Make the folder for this user alone. Raises OSError if another user has made it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must belong to this user alone (mode 700)")


def broadcast_newest(group: Group, own: Checkpoint | None) -> Any:
    """Return [position, values, more] of the newest checkpoint that any rank holds, in each rank; None if
    there is none. If several are equally new, the lowest rank's counts. Collective."""
    notes = all_gather_json(group, None if own is None else list(own.position))
    held = [(tuple(note), -rank) for rank, note in enumerate(notes) if note is not None]
    if not held:
        return None
    source = -max(held)[1]
    value = None
    if own is not None and group.rank == source:
        value = [own.position, own.values, own.more]
    return broadcast_value(group, source, value)
