"""Checkpoints: staged, checksummed, published in one step, verified before use. On any fsspec URL.

DIRECTORY/
  fit-00000/                          the first fit of the script, the second, ...
    epoch-00002.step-00000000/        where training goes on: the epoch and step that come next
      arrays.bin                      all arrays' bytes, as `image.py` lays them out
      state.json                      position, the arrays' dtypes and shapes, checksums of both files
  fit-00000/.staging-PID/             half-written; invisible to readers, removed by the next writer

On a local disk a checkpoint is staged and published by one rename. Elsewhere, where a folder can't be
renamed at once, `state.json` is written last: what has none isn't there.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from insitu.durable import NO_ROOM, published, seal, unseal, write_pages, write_synced
from insitu.errors import CheckpointError, StorageFull
from insitu.train.checkpoint.state_buffer import Image, read_image
from insitu.train.collectives import pack, unpack

FORMAT = 3
_NAME = re.compile(r"epoch-(\d+)\.step-(\d+)")
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


@dataclass(frozen=True, slots=True)
class Packed:
    """A checkpoint as it lies on a disk: nothing in it is the training's any more."""

    epoch: int
    step: int
    image: Image
    state: bytes

    @classmethod
    def of(cls, checkpoint: Checkpoint, image: Image) -> Packed:
        """Copies what `checkpoint` holds to `image`."""
        parcel = pack([checkpoint.values, checkpoint.more])
        image.take(parcel)
        state = {
            "format": FORMAT,
            "epoch": checkpoint.epoch,
            "step": checkpoint.step,
            "tree": parcel.tree,
            "arrays": parcel.kinds,
            "xxh3": image.checksum,
        }
        return cls(checkpoint.epoch, checkpoint.step, image, seal(state))


class Folder(Protocol):
    """Where the checkpoints of one fit lie. Names are those of checkpoints, without folders."""

    def names(self) -> list[str]:
        """What was published, from the oldest to the newest."""

    def write(self, name: str, image: Image, state: bytes) -> None:
        """Writes and publishes `arrays.bin` and `state.json`."""

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
        """See `publish`."""
        return self.publish(Packed.of(checkpoint, Image()))

    def publish(self, packed: Packed) -> str:
        """Writes and publishes a checkpoint, then removes the oldest beyond those to keep. Returns its path.

        Newer ones are removed first: training is here again because they were damaged.
        Raises StorageFull where no room is left: nothing half-written stays, older ones stand.
        """
        name = f"epoch-{packed.epoch:05d}.step-{packed.step:08d}"
        where = self._folder.path("")
        try:
            self._folder.write(name, packed.image, packed.state)
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
                state = unseal(text)
                if state["format"] != FORMAT:
                    raise CheckpointError(
                        f"The checkpoint {path} has format {state['format']}; this version reads {FORMAT}."
                    )
                arrays, found = read_image(file, state["arrays"])
            if found != state["xxh3"]:
                raise CheckpointError(
                    f"The checkpoint {path} is damaged: checksum expected {state['xxh3']}, found {found}."
                )
            values, more = unpack(state["tree"], arrays)
            return Checkpoint(state["epoch"], state["step"], values, more)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(f"The checkpoint {path} can't be read: {error}.") from error


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

    def write(self, name: str, image: Image, state: bytes) -> None:
        with published(self._root, name) as staging:
            write_pages(staging / "arrays.bin", image.pages, image.nbytes)
            write_synced(staging / "state.json", state)

    def read(self, name: str) -> tuple[bytes, Any]:
        folder = self._root / name
        return (folder / "state.json").read_bytes(), (folder / "arrays.bin").open("rb")

    def remove(self, name: str) -> None:
        shutil.rmtree(self._root / name, ignore_errors=True)


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

    def write(self, name: str, image: Image, state: bytes) -> None:
        folder = f"{self._root}/{name}"
        self.remove(name)
        try:
            self._system.makedirs(folder, exist_ok=True)
            with self._system.open(f"{folder}/arrays.bin", "wb") as file:
                data = image.pages[: image.nbytes]
                for start in range(0, len(data), _SLICE_BYTES):
                    file.write(data[start : start + _SLICE_BYTES])
            with self._system.open(f"{folder}/state.json", "wb") as file:
                file.write(state)
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
