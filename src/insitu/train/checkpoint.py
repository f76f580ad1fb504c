"""Checkpoints on disk: staged, checksummed, published by one rename, verified before use.

DIRECTORY/
  fit-00000/                          the first fit of the script, the second, ...
    epoch-00002.step-00000000/        where training goes on: the epoch and step that come next
      arrays.npz                      variables by name
      state.json                      position, ledgers, dtypes, checksum of arrays.npz
  fit-00000/.staging-PID/             half-written; invisible to readers, removed by the next writer
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.errors import CheckpointError, StorageFull

_NAME = re.compile(r"epoch-(\d+)\.step-(\d+)")
_LOG = logging.getLogger("insitu")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A training's whole state between two steps.

    `epoch` and `step` come next; `values` are variables by name; `ledgers` one JSON text for each shard.
    """

    epoch: int
    step: int
    values: dict[str, NDArray[Any]]
    ledgers: tuple[str, ...] = ()


class CheckpointStore:
    """The checkpoints of one fit. One process writes, any may read."""

    def __init__(self, directory: Path, fit: int, keep: int = 2) -> None:
        if keep < 1:
            raise CheckpointError(f"At least one checkpoint must be kept. Received: keep={keep}")
        self._folder = directory / f"fit-{fit:05d}"
        self._keep = keep

    def save(self, checkpoint: Checkpoint) -> Path:
        """Writes and publishes `checkpoint`, then removes the oldest beyond those to keep.

        Raises StorageFull where no room is left: nothing half-written stays, older ones stand.
        """
        staging = self._folder / f".staging-{os.getpid()}"
        final = self._folder / f"epoch-{checkpoint.epoch:05d}.step-{checkpoint.step:08d}"
        try:
            self._remove_staging()
            staging.mkdir(parents=True)
            _write(staging, checkpoint)
            if final.exists():
                shutil.rmtree(final)
            staging.rename(final)
            _sync(self._folder)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StorageFull(
                    f"No room is left for a checkpoint in {self._folder}. The last one that was published "
                    "stands. Free some space, or save less often or elsewhere."
                ) from error
            raise CheckpointError(f"A checkpoint can't be written to {self._folder}: {error}") from error
        for old in self._published()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def load_latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None where there is none. One that isn't is named in a warning
        and passed over."""
        for folder in reversed(self._published()):
            try:
                return _read(folder)
            except CheckpointError as error:
                _LOG.warning("%s It is passed over for the one before.", error)
        return None

    def _published(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(p for p in self._folder.iterdir() if _NAME.fullmatch(p.name))

    def _remove_staging(self) -> None:
        for left in self._folder.glob(".staging-*"):
            shutil.rmtree(left, ignore_errors=True)


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    arrays = folder / "arrays.npz"
    # NumPy writes types that it doesn't know itself (bfloat16) as bytes: their names are kept beside.
    with arrays.open("wb") as file:
        stored: dict[str, Any] = {
            name.replace("/", ":"): _as_bytes(value) for name, value in checkpoint.values.items()
        }
        np.savez(file, **stored)
        file.flush()
        os.fsync(file.fileno())
    state = {
        "format": 1,
        "epoch": checkpoint.epoch,
        "step": checkpoint.step,
        "ledgers": list(checkpoint.ledgers),
        "arrays": {n: [v.dtype.name, list(v.shape)] for n, v in checkpoint.values.items()},
        "crc32": _crc32(arrays),
    }
    with (folder / "state.json").open("w") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


def _read(folder: Path) -> Checkpoint:
    arrays = folder / "arrays.npz"
    try:
        state = json.loads((folder / "state.json").read_text())
        found = _crc32(arrays)
        if found != state["crc32"]:
            raise CheckpointError(
                f"The checkpoint {folder} is damaged: checksum expected {state['crc32']}, found {found}."
            )
        with np.load(arrays, allow_pickle=False) as stored:
            values = {
                name: stored[name.replace("/", ":")].view(_dtype(dtype)).reshape(shape)
                for name, (dtype, shape) in state["arrays"].items()
            }
        return Checkpoint(state["epoch"], state["step"], values, tuple(state["ledgers"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"The checkpoint {folder} can't be read: {error}.") from error


def _as_bytes(value: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
