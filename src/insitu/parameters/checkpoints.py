"""Writes checkpoints of one server in a thread, while the server keeps running, and reads them.

DIRECTORY/
  server-0/                     of the first server; servers on other hosts may use other disks
    checkpoint-00000005/
      arrays.bin                the numbers, one array after the other
      state.json                a description of the state and of each array, with its SHA-256; signed
    .staging-PID-NUMBER/        half-written; readers ignore it, the next writer removes it

Checkpoint n has the same pushes on all servers: those of each shard up to one sequence. A server starts from
the newest number that is complete on all servers whose folders it sees.
"""

from __future__ import annotations

import contextlib
import hashlib
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

from insitu.base.disk.checkpoints import (
    NotDamaged,
    explained_reading,
    explained_writing,
    list_folder,
    try_again,
)
from insitu.base.disk.durable import PageFile, published, write_synced
from insitu.base.disk.signatures import read_user_key, sign, unsign
from insitu.base.errors import CheckpointError, InsituError, ParameterError
from insitu.base.paths import Paths
from insitu.exchange import Pages
from insitu.exchange.plan import PAGE
from insitu.parameters.copy_on_write import SnapshotArray
from insitu.parameters.rules import Array, wire_dtype
from insitu.parameters.snapshots import LiveSnapshot, Snapshot

_FOLDER_NAME = re.compile(r"checkpoint-(\d{8})")
_CHECKPOINTS_KEPT = 2
"""Older ones are removed."""
_BLOCK_BYTES = 1 << 20
"""Bytes that are copied and summed at a time, so that they stay in the cache meanwhile."""
_WRITE_BYTES = 4 << 20
"""Bytes of one write."""
_CANCEL_TIMEOUT = 10.0
"""Seconds that a cancelled checkpoint has to end."""
_NICENESS = 10
"""Priority of the writing thread, so that training comes first if processors are few."""
_LOG = logging.getLogger("insitu")
_CheckCancelled = Callable[[], None]
"""Raises if the checkpoint was cancelled."""


def server_folder(directory: Path, server: int) -> Path:
    """Return the folder of one server's checkpoints."""
    return directory / f"server-{server}"


class _Cancelled(Exception):
    """Internal: the checkpoint was cancelled."""


class CheckpointWriter:
    """Writes one checkpoint in a thread. Its file descriptor becomes readable once it is done."""

    def __init__(
        self, directory: Path, number: int, server: int, snapshot: LiveSnapshot, key: bytes | None = None
    ) -> None:
        """Begin to write; see `write`. Raises ParameterError if no thread can be started."""
        self._error: InsituError | None = None
        self._cancelled = threading.Event()
        self._done_out, self._done_in = os.pipe2(os.O_CLOEXEC)
        arguments = (server_folder(directory, server), number, snapshot, key)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._done_out)
            os.close(self._done_in)
            raise ParameterError(
                f"A checkpoint is written by a thread, and none can be started: {error}. Raise the limit of "
                "processes (ulimit -u)"
            ) from error

    def _write(self, folder: Path, number: int, snapshot: LiveSnapshot, key: bytes | None) -> None:
        try:
            with contextlib.suppress(OSError):
                # On Linux this is the priority of the thread alone.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            write(folder, number, snapshot, key, self._raise_if_cancelled)
        except _Cancelled:
            self._error = CheckpointError(
                "The server ended before its checkpoint was on disk. The one before stays valid"
            )
        except InsituError as error:
            self._error = error
        except Exception as error:
            self._error = CheckpointError(f"A checkpoint can't be written to {folder}: {error!r}")
        finally:
            os.close(self._done_in)

    def _raise_if_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise _Cancelled

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable, for selectors."""
        return self._done_out

    def join(self) -> InsituError | None:
        """Wait until it is done. Return its error; None if the checkpoint is published."""
        self._thread.join()
        os.close(self._done_out)
        return self._error

    def cancel(self) -> None:
        """Discard the checkpoint, unless it is published already, and wait for the thread.

        A disk that hangs holds nobody up for longer than _CANCEL_TIMEOUT: the thread ends with the process.
        """
        self._cancelled.set()
        self._thread.join(_CANCEL_TIMEOUT)
        if self._thread.is_alive():
            _LOG.warning(
                "A checkpoint can't be cancelled within %g s: its disk doesn't answer. The one before stays "
                "valid",
                _CANCEL_TIMEOUT,
            )
        os.close(self._done_out)


def write(
    folder: Path,
    number: int,
    snapshot: LiveSnapshot,
    key: bytes | None = None,
    check_cancelled: _CheckCancelled = lambda: None,
) -> None:
    """Write and publish a checkpoint that is signed with `key` (None: this user's), then remove the oldest
    ones.

    Calls `check_cancelled` regularly, which may raise. Raises StorageFull, CheckpointError: then nothing
    half-written is left, and older checkpoints stay valid.
    """
    with explained_writing(folder), published(folder, f"checkpoint-{number:08d}") as staging:
        described = _write_arrays(staging / "arrays.bin", snapshot.arrays, check_cancelled)
        state = {**snapshot.meta, "number": number, "folder": folder.name, "arrays": described}
        write_synced(staging / "state.json", sign(state, _find_key(key)))
    # Those beyond this one are damaged: they aren't kept in the place of fresh ones.
    for old in [each for each in list_numbers(folder) if each <= number][:-_CHECKPOINTS_KEPT]:
        shutil.rmtree(folder / f"checkpoint-{old:08d}", ignore_errors=True)


def _write_arrays(
    path: Path, arrays: Mapping[str, Array | SnapshotArray], check_cancelled: _CheckCancelled
) -> list[Any]:
    """Write all arrays to one file. Return [name, dtype, shape, SHA-256] of each, in the file's order."""
    described = []
    buffer = Pages(_WRITE_BYTES).array()
    with contextlib.closing(PageFile(path, sum(array.nbytes for array in arrays.values()))) as file:
        size = filled = 0
        for name, array in arrays.items():
            digest = hashlib.sha256()
            for block in _iterate_blocks(array):
                check_cancelled()
                digest.update(block.data)
                size += block.size
                while block.size:
                    part = block[: buffer.size - filled]
                    buffer[filled : filled + part.size] = part
                    filled, block = filled + part.size, block[part.size :]
                    if filled == buffer.size:
                        file.write(buffer.data)
                        filled = 0
            described.append([name, array.dtype.name, list(array.shape), digest.hexdigest()])
        file.write(buffer[: -(-filled // PAGE) * PAGE].data)
        file.finish(size)
    return described


def _iterate_blocks(array: Array | SnapshotArray) -> Iterator[Array]:
    """Yield the bytes of an array block by block, uint8[n] each. A block is valid until the next one."""
    if not array.nbytes:
        return
    if isinstance(array, SnapshotArray):
        rows = max(1, _BLOCK_BYTES * len(array) // array.nbytes)
        out = np.empty((rows, *array.shape[1:]), array.dtype)
        for low in range(0, len(array), rows):
            high = min(len(array), low + rows)
            array.read(low, high, out[: high - low])
            yield out[: high - low].reshape(-1).view(np.uint8)
        return
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for low in range(0, flat.size, _BLOCK_BYTES):
        yield flat[low : low + _BLOCK_BYTES]


def list_numbers(folder: Path) -> list[int]:
    """Return the numbers of the published checkpoints, ascending. Raises OSError."""
    found = (_FOLDER_NAME.fullmatch(name) for name in list_folder(folder))
    return sorted(int(match[1]) for match in found if match)


def read_newest(directory: Path, server: int, key: bytes | None = None) -> Snapshot | None:
    """Return the checkpoint that `server` starts from; None if there is none.

    That is its newest one that is intact, that `key` has signed (None: this user's), and that all servers
    have whose folders are here. Logs a warning for each that is damaged or forged. Raises CheckpointError for
    one that was signed with another key, and if the disk keeps failing.
    """
    own = server_folder(directory, server)
    return try_again(lambda: _read_newest(directory, own, key), own, (OSError, MemoryError))


def _read_newest(directory: Path, own: Path, key: bytes | None) -> Snapshot | None:
    """See `read_newest`. Raises OSError and MemoryError, too."""
    names = [name for name in list_folder(directory) if name.startswith("server-") and name != own.name]
    others = [list_numbers(directory / name) for name in names]
    for number in reversed(list_numbers(own)):
        if any(number not in other for other in others):
            continue
        try:
            return read(own / f"checkpoint-{number:08d}", key)
        except NotDamaged:
            raise
        except CheckpointError as error:
            _LOG.warning("%s The checkpoint before it is used instead.", error)
    return None


def read(path: Path, key: bytes | None = None) -> Snapshot:
    """Read one checkpoint. Raises CheckpointError if it is incomplete, damaged, or not signed with `key`
    (None: this user's), OSError and MemoryError if it can't be read now."""
    with explained_reading(path, ParameterError, remedy=" Remove its folder."):
        meta = unsign((path / "state.json").read_bytes(), _find_key(key))
        if (meta["folder"], f"checkpoint-{meta['number']:08d}") != (path.parent.name, path.name):
            raise CheckpointError(
                f"A checkpoint must be where it was written. Received: {path}, which was checkpoint "
                f"{meta['number']} of {meta['folder']}. Remove its folder."
            )
        described = meta.pop("arrays")
        arrays = {}
        with (path / "arrays.bin").open("rb") as file:  # not mapped: a disk that fails would end the process
            left = os.fstat(file.fileno()).st_size
            for name, dtype, shape, digest in described:
                kind = wire_dtype(dtype)
                size = math.prod(shape) * kind.itemsize
                part = np.empty(size if 0 <= size <= left else 0, np.uint8)
                left -= file.readinto(part.data)
                if part.size != size or hashlib.sha256(part.data).hexdigest() != digest:
                    raise CheckpointError(
                        f"The checkpoint {path} is damaged: the SHA-256 of {name} is wrong. Remove its "
                        f"folder."
                    )
                arrays[name] = part.view(kind).reshape(shape)
        return Snapshot(meta, arrays)


def _find_key(key: bytes | None) -> bytes:
    """Return `key`, or this user's for None. Raises InputError, OSError."""
    return read_user_key(Paths.default()) if key is None else key
