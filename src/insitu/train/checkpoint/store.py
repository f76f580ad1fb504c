"""Checkpoints: staged, checksummed, published in one step, verified before use. On any fsspec URL.

DIRECTORY/
  fit-00000/                          the first fit of the script, the second, ...
    epoch-00002.step-00000000/        the epoch and step that come next
      arrays.bin                      all arrays' bytes, laid out by `state_buffer.py`
      state.json                      position, the arrays' dtypes and shapes, their SHA-256; signed
  fit-00000/.staging-PID-NUMBER/      half-written; invisible to readers, removed by the next writer

On a local disk a checkpoint is staged and published by one rename. Elsewhere a folder can't be renamed at
once: there `state.json` is written last, and a folder without it is no checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from insitu.base.disk.checkpoints import (
    NotDamaged,
    explained_reading,
    explained_writing,
    list_folder,
    try_again,
)
from insitu.base.disk.durable import (
    published,
    recover_replaced,
    replace_file,
    write_pages,
    write_synced,
)
from insitu.base.disk.signatures import read_user_key, sign, unsign
from insitu.base.errors import CheckpointError, ClusterError
from insitu.base.paths import Paths
from insitu.base.serialization import decode, encode
from insitu.train.checkpoint.state_buffer import StateBuffer, read_arrays

FORMAT = 4
_NAME = re.compile(r"epoch-(\d+)\.step-(\d+)")
_FIT = re.compile(r"fit-(\d+)")
_SLICE_BYTES = 4 << 20
_LOG = logging.getLogger("insitu")


class _OtherFormat(CheckpointError):
    """Raised for a checkpoint of another version of insitu: passed over, but not damaged."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A training's whole state between two steps."""

    epoch: int
    """The epoch of the next step, from 0."""
    step: int
    """The next step in that epoch, from 0."""
    values: dict[str, NDArray[Any]]
    """The variables by name."""
    more: Any = None
    """Any serializable value."""

    @property
    def position(self) -> tuple[int, int]:
        return self.epoch, self.step


@dataclass(frozen=True, slots=True)
class EncodedCheckpoint:
    """A checkpoint as it is on a disk, in memory that training no longer touches."""

    epoch: int
    """The epoch of the next step, from 0."""
    step: int
    """The next step in that epoch, from 0."""
    buffer: StateBuffer
    """The content of `arrays.bin`."""
    state: dict[str, Any]
    """The content of `state.json`, but for the digest of the arrays."""

    @classmethod
    def encode(cls, checkpoint: Checkpoint, buffer: StateBuffer) -> EncodedCheckpoint:
        """Copy the arrays of `checkpoint` to `buffer`."""
        payload = encode([checkpoint.values, checkpoint.more])
        buffer.copy_from(payload)
        state = {
            "format": FORMAT,
            "epoch": checkpoint.epoch,
            "step": checkpoint.step,
            "tree": payload.tree,
            "arrays": payload.specs,
        }
        return cls(checkpoint.epoch, checkpoint.step, buffer, state)

    def sign(self, key: bytes) -> bytes:
        """Return the content of `state.json`."""
        return sign({**self.state, "sha256": self.buffer.compute_digest()}, key)


class Folder(Protocol):
    """The folder with the checkpoints of one fit. Names are those of checkpoints, without folders."""

    def recover(self) -> None:
        """Bring back a checkpoint whose writer was killed while it replaced it. Only while nobody writes."""

    def names(self) -> list[str]:
        """Return the published checkpoints, oldest first."""

    def write(self, name: str, buffer: StateBuffer, state: bytes) -> None:
        """Write and publish `arrays.bin` and `state.json`."""

    def read(self, name: str) -> tuple[bytes, Any]:
        """Return (content of state.json, an open file of arrays.bin)."""

    def remove(self, name: str) -> None: ...

    def path(self, name: str) -> str:
        """Return the path of a checkpoint, for messages."""


class CheckpointStore:
    """The checkpoints of one fit. One process writes, any may read. `directory` is a path or fsspec URL.

    Checkpoints are signed with `key`, and only those that were are read; None: this user's.
    """

    def __init__(
        self,
        directory: str | Path,
        fit: int,
        keep: int = 2,
        key: bytes | None = None,
        note: Path | None = None,
    ) -> None:
        """`note` is a file in another place, which says that a checkpoint was published here. If none is
        found then, the storage is unreachable."""
        if keep < 1:
            raise CheckpointError(f"keep must be at least 1. Received: {keep}")
        self._key = _read_user_key() if key is None else key
        self._folder = _open_folder(directory, f"fit-{fit:05d}")
        self._keep = keep
        self._note = note
        #: Checkpoints that were read and found damaged. Written by `load_latest`.
        self._damaged: set[str] = set()
        #: Those that were published by this process and not removed, the oldest first.
        self._own: list[str] = []

    @property
    def path(self) -> str:
        """The folder, for messages and to distinguish stores."""
        return self._folder.path("")

    def save(self, checkpoint: Checkpoint) -> str:
        """See `publish`."""
        return self.publish(EncodedCheckpoint.encode(checkpoint, StateBuffer()))

    def publish(self, encoded: EncodedCheckpoint) -> str:
        """Write and publish a checkpoint, then remove the oldest beyond those to keep. Returns its path.

        Those that were found damaged are removed, too: they would be kept in the place of fresh ones.
        Raises StorageFull if no room is left: nothing half-written and all older checkpoints stay.
        """
        name = _name((encoded.epoch, encoded.step))
        with explained_writing(self.path):
            self._folder.write(name, encoded.buffer, encoded.sign(self._key))
        self._damaged.discard(name)
        with contextlib.suppress(OSError):
            if self._note is not None and not self._is_noted():
                self._note.parent.mkdir(exist_ok=True)
                replace_file(self._note, self.path.encode())
        self._own = [*(each for each in self._own if each != name), name]
        with contextlib.suppress(OSError, ClusterError):
            self._remove_old(name)
        return self._folder.path(name)

    def _remove_old(self, newest: str) -> None:
        try:
            names = self._folder.names()
        except ClusterError:  # of insitu://, whose head is unreachable
            names = sorted(self._own)
        good = [each for each in names if each <= newest and each not in self._damaged]
        for other in (*self._damaged.intersection(names), *good[: -self._keep]):
            self._folder.remove(other)
            self._own = [each for each in self._own if each != other]

    def positions(self) -> list[tuple[int, int]]:
        """Return the (epoch, step) of the published checkpoints, oldest first. Raises CheckpointError if the
        storage fails."""
        found = (_NAME.fullmatch(name) for name in self._list())
        return [(int(match[1]), int(match[2])) for match in found if match]

    def path_of(self, position: tuple[int, int]) -> str:
        """Return the path of the checkpoint of an (epoch, step), for messages and to name it."""
        return self._folder.path(_name(position))

    def load(self, position: tuple[int, int]) -> Checkpoint | None:
        """Return the checkpoint of an (epoch, step), or None if it is gone or isn't whole, which a warning
        says. May be called while another process writes. Raises CheckpointError for one that was signed with
        another key, and if the storage fails."""
        name = _name(position)
        try:
            return self._read(name)
        except NotDamaged:
            raise
        except CheckpointError as error:
            if name in self._list():
                _LOG.warning("%s", error)
            return None

    def load_latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is whole, or None. One that is damaged or forged is named in a
        warning and skipped. Raises CheckpointError for one that was signed with another key, and if the
        storage fails or is unreachable. Only while nobody writes."""
        self._folder.recover()
        names = self._list()
        if not names and self._is_noted():
            raise NotDamaged(
                f"Training continues from the newest checkpoint that was published in {self.path}. Received: "
                f"none is there. Mount or bring back that folder, or remove {self._note} to start over"
            )
        for name in reversed(names):
            try:
                return self._read(name)
            except NotDamaged:
                raise
            except CheckpointError as error:
                if name not in self._list():
                    raise NotDamaged(f"{error} It was there before, so its storage is away.") from error
                if not isinstance(error, _OtherFormat):
                    self._damaged.add(name)
                _LOG.warning("%s The one before is used.", error)
        return None

    def _is_noted(self) -> bool:
        """Return whether a checkpoint was published here before."""
        try:
            return self._note is not None and self._note.read_text(errors="replace") == self.path
        except FileNotFoundError:
            return False

    def _list(self) -> list[str]:
        """Return the names of checkpoints, oldest first. Raises CheckpointError if the storage fails."""
        return try_again(self._folder.names, self.path)

    def _read(self, name: str) -> Checkpoint:
        """Return a checkpoint. Raises CheckpointError."""
        return try_again(lambda: self._load(name), self._folder.path(name))

    def _load(self, name: str) -> Checkpoint:
        path = self._folder.path(name)
        with explained_reading(path):
            text, file = self._folder.read(name)
            with file:
                state = unsign(text, self._key)
                if state["format"] != FORMAT:
                    raise _OtherFormat(
                        f"The checkpoint {path} has format {state['format']}; this version reads {FORMAT}."
                    )
                arrays, found = read_arrays(file, state["arrays"])
            if found != state["sha256"]:
                raise CheckpointError(
                    f"The checkpoint {path} is damaged: SHA-256 expected {state['sha256']}, found {found}."
                )
            values, more = decode(state["tree"], arrays)
            return Checkpoint(state["epoch"], state["step"], values, more)


def find_fits(directory: str | Path) -> list[int]:
    """Return the numbers of the fits that have a folder of checkpoints in `directory`, ascending. Raises
    OSError."""
    text = os.fspath(directory).removeprefix("file://")
    if "://" not in text:
        names = list_folder(Path(text))
    else:
        import fsspec

        names = _list_remote(*fsspec.core.url_to_fs(text))
    return sorted(int(match[1]) for name in names if (match := _FIT.fullmatch(name)))


def _list_remote(system: Any, root: str) -> list[str]:
    """As `list_folder`: fsspec's `isdir` and `exists` take each error for none."""
    system.invalidate_cache()
    try:
        return [path.rstrip("/").rpartition("/")[2] for path in system.ls(root, detail=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _name(position: tuple[int, int]) -> str:
    return f"epoch-{position[0]:05d}.step-{position[1]:08d}"


def _read_user_key() -> bytes:
    try:
        return read_user_key(Paths.default())
    except OSError as error:
        raise CheckpointError(
            f"Checkpoints are signed with a key in INSITU_HOME, which must be a folder that can be written "
            f"to. Received: {Paths.default().home} ({error}). Set INSITU_HOME to another folder."
        ) from error


def _open_folder(directory: str | Path, name: str) -> Folder:
    """Raise CheckpointError for a URL that fsspec doesn't know, or whose package isn't installed."""
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

    def recover(self) -> None:
        # A store that can't be written to is read as it is.
        with contextlib.suppress(OSError):
            recover_replaced(self._root)

    def names(self) -> list[str]:
        return sorted(name for name in list_folder(self._root) if _NAME.fullmatch(name))

    def write(self, name: str, buffer: StateBuffer, state: bytes) -> None:
        with published(self._root, name) as staging:
            write_pages(staging / "arrays.bin", buffer.pages, buffer.nbytes)
            write_synced(staging / "state.json", state)

    def read(self, name: str) -> tuple[bytes, Any]:
        folder = self._root / name
        return (folder / "state.json").read_bytes(), (folder / "arrays.bin").open("rb")

    def remove(self, name: str) -> None:
        shutil.rmtree(self._root / name, ignore_errors=True)


class _RemoteFolder:
    """See `Folder`. Files appear whole or not at all when they are closed, as in object stores."""

    def __init__(self, system: Any, root: str) -> None:
        self._system = system
        self._root = root

    def path(self, name: str) -> str:
        return str(self._system.unstrip_protocol(f"{self._root}/{name}".rstrip("/")))

    def recover(self) -> None:
        # A checkpoint isn't replaced here: the old one is removed first.
        pass

    def names(self) -> list[str]:
        found = (name for name in _list_remote(self._system, self._root) if _NAME.fullmatch(name))
        return sorted(name for name in found if self._is_whole(name))

    def _is_whole(self, name: str) -> bool:
        try:
            self._system.info(f"{self._root}/{name}/state.json")
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def write(self, name: str, buffer: StateBuffer, state: bytes) -> None:
        folder = f"{self._root}/{name}"
        self.remove(name)
        try:
            self._system.makedirs(folder, exist_ok=True)
            with self._system.open(f"{folder}/arrays.bin", "wb") as file:
                data = buffer.pages[: buffer.nbytes]
                for start in range(0, len(data), _SLICE_BYTES):
                    file.write(data[start : start + _SLICE_BYTES])
            with self._system.open(f"{folder}/state.json", "wb") as file:
                file.write(state)
        except OSError:
            with contextlib.suppress(Exception):  # the first error says more
                self.remove(name)
            raise

    def read(self, name: str) -> tuple[bytes, Any]:
        folder = f"{self._root}/{name}"
        return self._system.cat_file(f"{folder}/state.json"), self._system.open(f"{folder}/arrays.bin", "rb")

    def remove(self, name: str) -> None:
        folder = f"{self._root}/{name}"
        if self._may_exist(folder):
            # state.json first: a half-removed folder is no checkpoint.
            if self._may_exist(f"{folder}/state.json"):
                with contextlib.suppress(FileNotFoundError):
                    self._system.rm_file(f"{folder}/state.json")
            with contextlib.suppress(FileNotFoundError):
                self._system.rm(folder, recursive=True)

    def _may_exist(self, path: str) -> bool:
        try:
            return bool(self._system.exists(path))
        except ClusterError:  # of insitu://, whose head is unreachable: removed later
            return True
