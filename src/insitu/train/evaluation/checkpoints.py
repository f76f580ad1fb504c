"""Find and read checkpoints of a running training: of insitu.BackupAndRestore, or .keras files.

Neither is ever read half. The first are published by one rename, and are signed over a checksum; a .keras
file is written in its place, but has an index at its end and a checksum of each part.
"""

from __future__ import annotations

import io
import logging
import os
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from insitu.base.errors import TrainingError
from insitu.train.checkpoint import Checkpoint, CheckpointStore, find_fits
from insitu.train.replica import (
    check_saved_vocabularies,
    inner_optimizer,
    load_weights,
    name_update_count,
    read_state,
    read_update_count,
)

_LOG = logging.getLogger("insitu")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A published checkpoint."""

    #: Names it for users: the same for the same state of the training.
    name: str
    #: Number of the fit in its script; None for a file.
    fit: int | None = None
    #: The epoch and the step that come next in the training, from 0; None for a file.
    position: tuple[int, int] | None = None
    #: The file; None for a checkpoint of insitu's.
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """Facts about a checkpoint whose weights a model has now."""

    #: Updates of the model until then; None if they aren't known.
    iterations: int | None
    #: Whether its fit ended with it.
    is_final: bool
    #: Position of a fit that ended before its last epoch: the epoch and the step that would have come next.
    ended_at: tuple[int, int] | None = None


class CheckpointSource(Protocol):
    """Checkpoints of one kind in one folder."""

    def find(self) -> Sequence[Candidate]:
        """Return the published checkpoints, oldest first."""

    def load(self, candidate: Candidate, model: Any) -> Loaded | None:
        """Give `model` the weights of a checkpoint. Returns None, with the model unchanged, if it is gone or
        isn't whole. Raises TrainingError or CheckpointError if it is another model's, or one of other
        vocabularies."""


def choose_next(
    found: Sequence[Candidate], done: Collection[str], skipped: Collection[str]
) -> Candidate | None:
    """Return the checkpoint to score next: the newest, unless it is done. Older ones are passed over, so that
    an evaluator that is slower than the training doesn't fall behind. `skipped` can't be read."""
    readable = [candidate for candidate in found if candidate.name not in skipped]
    if not readable or readable[-1].name in done:
        return None
    return readable[-1]


class BackupCheckpoints(CheckpointSource):
    """Checkpoints of insitu.BackupAndRestore. `fit` is the number of one fit; None: of all, in order."""

    def __init__(self, directory: str | Path, key: bytes | None, fit: int | None) -> None:
        self._directory = directory
        self._key = key
        self._fit = fit

    def find(self) -> Sequence[Candidate]:
        fits = [fit for fit in find_fits(self._directory) if self._fit in (None, fit)]
        return [
            Candidate(_describe(fit, position), fit, position)
            for fit in fits
            for position in self._store(fit).positions()
        ]

    def _store(self, fit: int) -> CheckpointStore:
        return CheckpointStore(self._directory, fit, key=self._key)

    def load(self, candidate: Candidate, model: Any) -> Loaded | None:
        checkpoint = self._store(candidate.fit or 0).load(candidate.position or (0, 0))
        if checkpoint is None:
            return None
        check_saved_vocabularies(checkpoint.more, model)
        load_weights(read_state(model), checkpoint.values)
        iterations = _read_iterations(checkpoint, model.optimizer)
        if iterations is not None and model.optimizer is not None:
            iterations = assign_iterations(model.optimizer, iterations)
        more = checkpoint.more or {}
        ended_at = more.get("ended_at")
        return Loaded(iterations, bool(more.get("final")), None if ended_at is None else tuple(ended_at))


def name_checkpoint(candidate: Candidate, loaded: Loaded) -> tuple[str, tuple[int, int] | None]:
    """Return how users know a checkpoint that was read, and where its training was."""
    if loaded.ended_at is None:
        return candidate.name, candidate.position
    return f"{_describe(candidate.fit or 0, loaded.ended_at)}, where the fit ended", loaded.ended_at


def _describe(fit: int, position: tuple[int, int]) -> str:
    """Return where a training was, as Keras counts for users: epochs from 1."""
    epoch, step = position
    which = f"fit {fit + 1}, " if fit else ""
    return f"{which}epoch {epoch + 1}, step {step}" if step else f"{which}epoch {epoch}"


def _read_iterations(checkpoint: Checkpoint, optimizer: Any) -> int | None:
    """Return the optimizer's count of gradients; None without an optimizer."""
    value = checkpoint.values.get(name_update_count(optimizer))
    return int(value) if value is not None and value.ndim == 0 and value.dtype.kind in "iu" else None


def assign_iterations(optimizer: Any, count: int) -> int:
    """Have an optimizer continue after `count` calls. Returns the updates that these were: fewer if it
    accumulates the gradients of several calls."""
    inner_optimizer(optimizer)._iterations.assign(count)
    return read_update_count(optimizer)


def find_checkpoints(directory: str | Path, key: bytes | None) -> list[tuple[str, Candidate]]:
    """Return (path, checkpoint) of those of insitu.BackupAndRestore in a folder, oldest first."""
    if not os.fspath(directory):
        return []
    found = []
    for candidate in BackupCheckpoints(directory, key, None).find():
        store = CheckpointStore(directory, candidate.fit or 0, key=key)
        found.append((store.path_of(candidate.position or (0, 0)), candidate))
    return found


def load_checkpoint(directory: str | Path, key: bytes | None, candidate: Candidate, model: Any) -> bool:
    """Give `model` the weights of a checkpoint of insitu.BackupAndRestore, and its count of updates. Returns
    False, with the model unchanged, if it is gone or isn't whole."""
    return BackupCheckpoints(directory, key, None).load(candidate, model) is not None


class FileCheckpoints(CheckpointSource):
    """The .keras files of Keras' ModelCheckpoint. If one isn't whole, its end or a checksum is wrong."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def find(self) -> Sequence[Candidate]:
        found = []
        for path in self._directory.glob("*.keras"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            found.append((stat.st_mtime_ns, Candidate(f"{path.name} of {stat.st_mtime_ns}", path=path)))
        return [candidate for _, candidate in sorted(found, key=lambda each: (each[0], each[1].name))]

    def load(self, candidate: Candidate, model: Any) -> Loaded | None:
        path = candidate.path or self._directory
        try:
            data = path.read_bytes()
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                if archive.testzip() is not None:
                    return None
        except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
            return None  # RuntimeError: a part is encrypted, or packed in a way that zipfile doesn't know
        optimizer = model.optimizer
        if optimizer is not None and not optimizer.built:
            # Without its variables Keras would leave out the count of updates, with a warning.
            optimizer.build(model.trainable_variables)
        with tempfile.TemporaryDirectory(prefix="insitu-") as folder:
            copy = os.path.join(folder, "model.keras")
            Path(copy).write_bytes(data)
            try:
                model.load_weights(copy)
            except (OSError, ValueError, KeyError) as error:
                raise TrainingError(
                    f"A checkpoint must be of the model that is scored. Received: {path}, which "
                    f"doesn't fit {model.name!r}: {error}. Build the model that was saved."
                ) from error
        # If parameter servers do the updates, the model that was saved has counted none.
        iterations = None if optimizer is None else read_update_count(optimizer) or None
        return Loaded(iterations, is_final=False)


class AnyCheckpoints(CheckpointSource):
    """Checkpoints of the kind that is first in a folder; if both are there, those of insitu."""

    def __init__(self, directory: str | Path, key: bytes | None, fit: int | None) -> None:
        self._directory = directory
        self._backups = BackupCheckpoints(directory, key, fit)
        self._files = FileCheckpoints(directory)

    def find(self) -> Sequence[Candidate]:
        if (found := self._backups.find()) or "://" in os.fspath(self._directory):
            return found
        if found := self._files.find():
            return found
        weights = sorted(Path(self._directory).glob("*.weights.h5"))
        if weights:
            raise TrainingError(
                "The evaluator reads checkpoints that tell whether they are whole: those of "
                f"insitu.BackupAndRestore and .keras files. Received: {weights[0]}. Pass "
                "insitu.BackupAndRestore() to fit, or a ModelCheckpoint whose filepath ends with .keras."
            )
        return []

    def load(self, candidate: Candidate, model: Any) -> Loaded | None:
        source = self._backups if candidate.path is None else self._files
        return source.load(candidate, model)
