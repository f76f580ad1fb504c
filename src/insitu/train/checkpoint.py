"""Checkpoints: staged, checksummed, published in one step, verified before use. On any fsspec URL.

DIRECTORY/
  fit-00000/                          the first fit of the script, the second, ...
    epoch-00002.step-00000000/        where training goes on: the epoch and step that come next
      arrays.bin                      all arrays' bytes, one after the other
      state.json                      position, the arrays' dtypes and shapes, checksums of both files
  fit-00000/.staging-PID/             half-written; invisible to readers, removed by the next writer

On a local disk a checkpoint is staged and published by one rename. Elsewhere, where a folder can't be
renamed at once, `state.json` is written last: what has none isn't there.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from insitu.durable import NO_ROOM, sync_folder
from insitu.errors import CheckpointError, StorageFull
from insitu.train.plain import dtype_of, pack, unpack

FORMAT = 2
_NAME = re.compile(r"epoch-(\d+)\.step-(\d+)")
_STAGING = ".staging-"
_SLICE_BYTES = 4 << 20
_LOG = logging.getLogger("insitu")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A training's whole state between two steps.

    `epoch` and `step` come next; `values` are variables by name; `more` is any plain value.
    """

    epoch: int
    step: int
    values: dict[str, NDArray[Any]]
    more: Any = None

    @property
    def position(self) -> tuple[int, int]:
        return self.epoch, self.step


class Folder(Protocol):
    """Where the checkpoints of one fit lie. Names are those of checkpoints, without folders."""

    def names(self) -> list[str]:
        """What was published, from the oldest to the newest."""

    def write(self, name: str, pieces: Iterable[Any], finish: Any) -> None:
        """Writes and publishes: `pieces` are bytes of arrays, `finish()` gives `state.json` after them."""

    def read(self, name: str) -> tuple[bytes, Any]:
        """(state.json, an open file of arrays.bin)"""

    def remove(self, name: str) -> None: ...

    def path(self, name: str) -> str:
        """What messages call it."""


class CheckpointStore:
    """The checkpoints of one fit. One process writes, any may read. `directory` is a path or fsspec URL."""

    def __init__(self, directory: str | Path, fit: int, keep: int = 2) -> None:
        if keep < 1:
            raise CheckpointError(f"At least one checkpoint must be kept. Received: keep={keep}")
        self._folder = _open_folder(directory, f"fit-{fit:05d}")
        self._keep = keep

    def save(self, checkpoint: Checkpoint) -> str:
        """Writes and publishes `checkpoint`, then removes the oldest beyond those to keep. Returns its path.

        Newer ones are removed first: training is here again because they were damaged.
        Raises StorageFull where no room is left: nothing half-written stays, older ones stand.
        """
        name = f"epoch-{checkpoint.epoch:05d}.step-{checkpoint.step:08d}"
        parcel = pack([checkpoint.values, checkpoint.more])
        checksum = 0

        def pieces() -> Iterable[Any]:
            nonlocal checksum
            for array in parcel.arrays:
                flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                for start in range(0, len(flat), _SLICE_BYTES):
                    piece = flat[start : start + _SLICE_BYTES]
                    # Summed while it is in the processor's cache, on its way to the disk.
                    checksum = zlib.crc32(piece, checksum)
                    yield piece

        def finish() -> bytes:
            state = {
                "format": FORMAT,
                "epoch": checkpoint.epoch,
                "step": checkpoint.step,
                "tree": parcel.tree,
                "arrays": parcel.kinds,
                "crc32": checksum,
            }
            text = json.dumps(state)
            return json.dumps({"crc32": zlib.crc32(text.encode()), "state": text}).encode()

        where = self._folder.path("")
        try:
            self._folder.write(name, pieces(), finish)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise StorageFull(
                    f"No room is left for a checkpoint in {where}. The last one that was published "
                    "stands. Free some space, or save less often or elsewhere."
                ) from error
            raise CheckpointError(f"A checkpoint can't be written to {where}: {error}") from error
        names = self._folder.names()
        here = names.index(name) + 1
        for other in (*names[here:], *names[: max(0, here - self._keep)]):
            self._folder.remove(other)
        return self._folder.path(name)

    def load_latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None where there is none. One that isn't is named in a warning
        and passed over."""
        for name in reversed(self._folder.names()):
            try:
                return self._load(name)
            except CheckpointError as error:
                _LOG.warning("%s It is passed over for the one before.", error)
        return None

    def _load(self, name: str) -> Checkpoint:
        path = self._folder.path(name)
        try:
            text, file = self._folder.read(name)
            with file:
                outer = json.loads(text)
                if zlib.crc32(outer["state"].encode()) != outer["crc32"]:
                    raise CheckpointError(f"The checkpoint {path} is damaged: its state.json has changed.")
                state = json.loads(outer["state"])
                if state["format"] != FORMAT:
                    raise CheckpointError(
                        f"The checkpoint {path} has format {state['format']}; this version reads {FORMAT}."
                    )
                arrays, found = _read_arrays(file, state["arrays"])
            if found != state["crc32"]:
                raise CheckpointError(
                    f"The checkpoint {path} is damaged: checksum expected {state['crc32']}, found {found}."
                )
            values, more = unpack(state["tree"], arrays)
            return Checkpoint(state["epoch"], state["step"], values, more)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(f"The checkpoint {path} can't be read: {error}.") from error


def _read_arrays(file: Any, kinds: list[list[Any]]) -> tuple[list[NDArray[Any]], int]:
    """(arrays, checksum of their bytes). Raises ValueError where there are more or fewer bytes."""
    arrays, checksum = [], 0
    for name, shape in kinds:
        array = np.empty(shape, dtype_of(name))
        flat = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(flat), _SLICE_BYTES):
            part = file.read(min(_SLICE_BYTES, len(flat) - start))
            flat[start : start + len(part)] = part
            checksum = zlib.crc32(part, checksum)
            if len(part) < min(_SLICE_BYTES, len(flat) - start):
                raise ValueError("arrays.bin ends too early")
        arrays.append(array)
    if file.read(1):
        raise ValueError("arrays.bin is longer than it should be")
    return arrays, checksum


def _open_folder(directory: str | Path, name: str) -> Folder:
    """Raises CheckpointError for a URL that fsspec doesn't know, or whose package isn't installed."""
    text = os.fspath(directory)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" not in text:
        return _LocalFolder(Path(text) / name)
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(text)
    except (ValueError, ImportError) as error:
        raise CheckpointError(f"Checkpoints can't be kept at {text}: {error}") from error
    return _RemoteFolder(system, f"{root.rstrip('/')}/{name}")


class _LocalFolder:
    """See `Folder`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, name: str) -> str:
        return str(self._root / name)

    def names(self) -> list[str]:
        if not self._root.is_dir():
            return []
        return sorted(p.name for p in self._root.iterdir() if _NAME.fullmatch(p.name))

    def write(self, name: str, pieces: Iterable[Any], finish: Any) -> None:
        staging = self._root / f"{_STAGING}{os.getpid()}"
        final = self._root / name
        try:
            for left in self._root.glob(f"{_STAGING}*"):
                shutil.rmtree(left, ignore_errors=True)
            staging.mkdir(parents=True)
            _write_file(staging / "arrays.bin", pieces)
            _write_file(staging / "state.json", [finish()])
            sync_folder(staging)
            if final.exists():
                shutil.rmtree(final)
            staging.rename(final)
            sync_folder(self._root)
        except OSError:
            shutil.rmtree(staging, ignore_errors=True)
            raise

    def read(self, name: str) -> tuple[bytes, Any]:
        folder = self._root / name
        return (folder / "state.json").read_bytes(), (folder / "arrays.bin").open("rb")

    def remove(self, name: str) -> None:
        shutil.rmtree(self._root / name, ignore_errors=True)


def _write_file(path: Path, pieces: Iterable[Any]) -> None:
    with path.open("wb", buffering=0) as file:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


class _RemoteFolder:
    """See `Folder`. Files appear whole or not at all when they are closed, as object stores have it."""

    def __init__(self, system: Any, root: str) -> None:
        self._system = system
        self._root = root

    def path(self, name: str) -> str:
        return str(self._system.unstrip_protocol(f"{self._root}/{name}".rstrip("/")))

    def names(self) -> list[str]:
        self._system.invalidate_cache()
        if not self._system.isdir(self._root):
            return []
        found = (path.rstrip("/").rpartition("/")[2] for path in self._system.ls(self._root, detail=False))
        return sorted(
            n for n in found if _NAME.fullmatch(n) and self._system.exists(f"{self._root}/{n}/state.json")
        )

    def write(self, name: str, pieces: Iterable[Any], finish: Any) -> None:
        folder = f"{self._root}/{name}"
        self.remove(name)
        try:
            self._system.makedirs(folder, exist_ok=True)
            with self._system.open(f"{folder}/arrays.bin", "wb") as file:
                for piece in pieces:
                    file.write(piece)
            with self._system.open(f"{folder}/state.json", "wb") as file:
                file.write(finish())
        except OSError:
            self.remove(name)
            raise

    def read(self, name: str) -> tuple[bytes, Any]:
        folder = f"{self._root}/{name}"
        return self._system.cat_file(f"{folder}/state.json"), self._system.open(f"{folder}/arrays.bin", "rb")

    def remove(self, name: str) -> None:
        folder = f"{self._root}/{name}"
        if self._system.exists(folder):
            # First what makes it a checkpoint: half removed, it is none.
            if self._system.exists(f"{folder}/state.json"):
                self._system.rm_file(f"{folder}/state.json")
            self._system.rm(folder, recursive=True)
