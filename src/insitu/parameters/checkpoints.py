"""Checkpoints of one server: written by a thread while the server goes on, and read again.

DIRECTORY/
  server-0/                     the first server's; servers on hosts of their own may have disks of their own
    checkpoint-00000005/
      arrays.bin                the numbers, one array after the other
      state.json                what they are, each with its checksum (XXH3), and the account
    .staging-PID/               half-written; invisible to readers, removed by the next writer

A checkpoint of number n is the same moment on all servers: each shard's pushes up to one sequence and no
further. A server takes the newest number that all servers whose folders it sees have whole.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from insitu.durable import NO_ROOM, PageFile, published, seal, unseal, write_synced
from insitu.errors import CheckpointError, InsituError, ParameterError, StorageFull
from insitu.exchange.arithmetic import PAGE
from insitu.exchange.pages import Pages
from insitu.parameters.copy_on_write import SnapshotArray
from insitu.parameters.snapshots import LiveSnapshot, Snapshot
from insitu.parameters.wire import Array, dtype_of

_NAME = re.compile(r"checkpoint-(\d{8})")
_KEEP = 2
_PIECE = 1 << 20
"""Bytes that are read, summed and put in their place at a time: they stay in the cache meanwhile."""
_AT_ONCE = 4 << 20
"""Bytes per call of the system."""
_NICENESS = 10
_LOG = logging.getLogger("insitu")
_Step = Callable[[], None]


def folder_of(directory: Path, server: int) -> Path:
    return directory / f"server-{server}"


class _Stopped(Exception):
    """Internal: nobody wants the checkpoint any more."""


class CheckpointWriter:
    """A checkpoint that is being written, by a thread of its own. Its file number becomes readable once it is
    done. Raises ParameterError where that can't be begun."""

    def __init__(self, directory: Path, number: int, server: int, lasting: LiveSnapshot) -> None:
        self._error: InsituError | None = None
        self._unwanted = threading.Event()
        self._out, self._into = os.pipe2(os.O_CLOEXEC)
        arguments = (folder_of(directory, server), number, lasting)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._out)
            os.close(self._into)
            raise ParameterError(f"No thread can be started to write a checkpoint: {error}") from error

    def _write(self, folder: Path, number: int, lasting: LiveSnapshot) -> None:
        try:
            with contextlib.suppress(OSError):
                # Of this thread alone: where processors are few, those who train come first.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            write(folder, number, lasting, self._look)
        except _Stopped:
            self._error = CheckpointError("The server ended before its checkpoint was on disk")
        except InsituError as error:
            self._error = error
        except Exception as error:
            self._error = CheckpointError(f"A checkpoint can't be written to {folder}: {error!r}")
        finally:
            os.close(self._into)

    def _look(self) -> None:
        if self._unwanted.is_set():
            raise _Stopped

    def fileno(self) -> int:
        return self._out

    def end(self) -> InsituError | None:
        """Waits for what came of it; None: it is published."""
        self._thread.join()
        os.close(self._out)
        return self._error

    def stop(self) -> None:
        """Gives it up, unless it is published already."""
        self._unwanted.set()
        self.end()


def write(folder: Path, number: int, lasting: LiveSnapshot, look: _Step = lambda: None) -> None:
    """Writes and publishes a checkpoint, then removes the oldest beyond those to keep. Calls `look` now and
    then, which may raise. Raises StorageFull, CheckpointError: nothing half-written stays, older ones
    stand."""
    try:
        with published(folder, f"checkpoint-{number:08d}") as staging:
            described = _write_arrays(staging / "arrays.bin", lasting.arrays, look)
            state = {**lasting.meta, "number": number, "arrays": described}
            write_synced(staging / "state.json", seal(state))
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StorageFull(
                f"No room is left for a checkpoint in {folder}. The last one that was published stands, and "
                "training goes on. Free some space, or save less often or elsewhere"
            ) from error
        raise CheckpointError(f"A checkpoint can't be written to {folder}: {error}") from error
    for old in numbers(folder)[:-_KEEP]:
        shutil.rmtree(folder / f"checkpoint-{old:08d}", ignore_errors=True)


def _write_arrays(path: Path, arrays: Mapping[str, Array | SnapshotArray], look: _Step) -> list[Any]:
    """[name, dtype, shape, XXH3] of each, in the order in which they lie in the file."""
    described = []
    room = Pages(_AT_ONCE).array()
    with contextlib.closing(PageFile(path, sum(array.nbytes for array in arrays.values()))) as file:
        size = filled = 0
        for name, array in arrays.items():
            summed = xxhash.xxh3_64()
            for piece in _pieces(array):
                look()
                summed.update(piece.data)
                size += piece.size
                while piece.size:
                    part = piece[: room.size - filled]
                    room[filled : filled + part.size] = part
                    filled, piece = filled + part.size, piece[part.size :]
                    if filled == room.size:
                        file.write(room.data)
                        filled = 0
            described.append([name, array.dtype.name, list(array.shape), summed.hexdigest()])
        file.write(room[: -(-filled // PAGE) * PAGE].data)
        file.finish(size)
    return described


def _pieces(array: Array | SnapshotArray) -> Iterator[Array]:
    """The bytes of an array, uint8[n], piece by piece. One is gone when the next is asked for."""
    if not array.nbytes:
        return
    if isinstance(array, SnapshotArray):
        rows = max(1, _PIECE * len(array) // array.nbytes)
        out = np.empty((rows, *array.shape[1:]), array.dtype)
        for low in range(0, len(array), rows):
            high = min(len(array), low + rows)
            array.read(low, high, out[: high - low])
            yield out[: high - low].reshape(-1).view(np.uint8)
        return
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for low in range(0, flat.size, _PIECE):
        yield flat[low : low + _PIECE]


def numbers(folder: Path) -> list[int]:
    """The numbers of the checkpoints that were published, ascending."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def newest(directory: Path, server: int) -> Snapshot | None:
    """What `server` goes on from: its newest checkpoint that is whole and that all servers have whose folders
    are here; None where there is none. A damaged one is named in a warning and passed over."""
    others = [numbers(path) for path in directory.glob("server-*") if path != folder_of(directory, server)]
    own = folder_of(directory, server)
    for number in reversed(numbers(own)):
        if any(number not in other for other in others):
            continue
        try:
            return read(own / f"checkpoint-{number:08d}")
        except CheckpointError as error:
            _LOG.warning("%s It is passed over for the one before.", error)
    return None


def read(path: Path) -> Snapshot:
    """Raises CheckpointError where it isn't whole."""
    try:
        meta = unseal((path / "state.json").read_bytes())
        described = meta.pop("arrays")
        data = np.memmap(path / "arrays.bin", np.uint8, "r") if (path / "arrays.bin").stat().st_size else None
        arrays, at = {}, 0
        for name, dtype, shape, checksum in described:
            kind = dtype_of(dtype)
            size = math.prod(shape) * kind.itemsize
            part = np.empty(0, np.uint8) if data is None else data[at : at + size]
            if part.size != size or xxhash.xxh3_64_hexdigest(part.data) != checksum:
                raise CheckpointError(f"The checkpoint {path} is damaged: {name} isn't what was written.")
            arrays[name] = np.array(part).view(kind).reshape(shape)
            at += size
        return Snapshot(meta, arrays)
    except (OSError, ValueError, KeyError, TypeError, ParameterError) as error:
        raise CheckpointError(f"The checkpoint {path} can't be read: {error}.") from error
