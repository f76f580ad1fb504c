"""Checkpoints of one server: written by a copy of the process while the server goes on, and read again.

DIRECTORY/
  server-0/                     the first server's; servers on hosts of their own may have disks of their own
    checkpoint-00000005/
      arrays.bin                the numbers, one array after the other
      state.json                what they are, each with its CRC-32, and the account
    .staging-PID/               half-written; invisible to readers, removed by the next writer

A checkpoint of number n is the same moment on all servers: each shard's pushes up to one sequence and no
further. A server takes the newest number that all servers whose folders it sees have whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from insitu.durable import NO_ROOM, sync_folder
from insitu.errors import CheckpointError, InsituError, ParameterError, StorageFull
from insitu.parameters.snapshots import Snapshot
from insitu.parameters.wire import Array, as_bytes, dtype_of

_NAME = re.compile(r"checkpoint-(\d{8})")
_KEEP = 2
_SLICE = 8 << 20
_LOG = logging.getLogger("insitu")


def folder_of(directory: Path, server: int) -> Path:
    return directory / f"server-{server}"


@dataclass(slots=True)
class Writing:
    """A checkpoint that a child process is writing. `pipe` becomes readable once it's done."""

    process: int
    pipe: int

    def fileno(self) -> int:
        return self.pipe

    def end(self) -> InsituError | None:
        """What came of it, once `pipe` is readable; None: it is published."""
        told = b""
        while block := os.read(self.pipe, 1 << 16):
            told += block
        os.close(self.pipe)
        _, status = os.waitpid(self.process, 0)
        if told:
            kind, text = json.loads(told)
            return StorageFull(text) if kind == "StorageFull" else CheckpointError(text)
        if status:
            return CheckpointError(f"The process that wrote a checkpoint ended with status {status}")
        return None


def begin(directory: Path, number: int, server: int, snapshot: Snapshot) -> Writing:
    """Begins to write in a copy of this process, which sees the snapshot as it is now whatever happens to it
    later: the system copies the pages that change meanwhile. Raises ParameterError where that can't be."""
    out, into = os.pipe2(os.O_CLOEXEC)
    try:
        with warnings.catch_warnings():
            # A copy of a process with threads has only this one; all that it does is to write files.
            warnings.simplefilter("ignore")
            process = os.fork()
    except OSError as error:
        os.close(out)
        os.close(into)
        raise ParameterError(f"No process can be started to write a checkpoint: {error.strerror}") from error
    if not process:
        _write_and_exit(directory, number, server, snapshot, into)
    os.close(into)
    return Writing(process, out)


def _write_and_exit(directory: Path, number: int, server: int, snapshot: Snapshot, pipe: int) -> NoReturn:
    """In the child. Connections are closed first: a peer must notice when the server itself dies."""
    status = 1
    try:
        os.closerange(3, pipe)
        os.closerange(pipe + 1, 1 << 16)
        write(folder_of(directory, server), number, snapshot)
        status = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(pipe, json.dumps([type(error).__name__, str(error)]).encode())
    finally:
        os._exit(status)


def write(folder: Path, number: int, snapshot: Snapshot) -> None:
    """Writes and publishes a checkpoint, then removes the oldest beyond those to keep. Raises StorageFull,
    CheckpointError: nothing half-written stays, older ones stand."""
    staging, final = folder / f".staging-{os.getpid()}", folder / f"checkpoint-{number:08d}"
    try:
        for left in folder.glob(".staging-*"):
            shutil.rmtree(left, ignore_errors=True)
        staging.mkdir(parents=True)
        described = _write_arrays(staging / "arrays.bin", snapshot.arrays)
        with (staging / "state.json").open("w") as file:
            json.dump({**snapshot.meta, "number": number, "arrays": described}, file)
            file.flush()
            os.fsync(file.fileno())
        if final.exists():
            shutil.rmtree(final)
        staging.rename(final)
        sync_folder(folder)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        if error.errno in NO_ROOM:
            raise StorageFull(
                f"No room is left for a checkpoint in {folder}. The last one that was published stands, and "
                "training goes on. Free some space, or save less often or elsewhere"
            ) from error
        raise CheckpointError(f"A checkpoint can't be written to {folder}: {error}") from error
    for old in numbers(folder)[:-_KEEP]:
        shutil.rmtree(folder / f"checkpoint-{old:08d}", ignore_errors=True)


def _write_arrays(path: Path, arrays: dict[str, Array]) -> list[Any]:
    """[name, dtype, shape, CRC-32] of each, in the order in which they lie in the file."""
    described = []
    with path.open("wb", buffering=0) as file:
        for name, array in arrays.items():
            crc32 = 0
            data = as_bytes(np.ascontiguousarray(array)) if array.nbytes else memoryview(b"")
            for low in range(0, len(data), _SLICE):
                part = data[low : low + _SLICE]
                crc32 = zlib.crc32(part, crc32)
                while part:
                    part = part[file.write(part) :]
            described.append([name, array.dtype.name, list(array.shape), crc32])
        os.fsync(file.fileno())
    return described


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
        meta = json.loads((path / "state.json").read_text())
        described = meta.pop("arrays")
        data = np.memmap(path / "arrays.bin", np.uint8, "r") if (path / "arrays.bin").stat().st_size else None
        arrays, at = {}, 0
        for name, dtype, shape, crc32 in described:
            kind = dtype_of(dtype)
            size = math.prod(shape) * kind.itemsize
            part = np.empty(0, np.uint8) if data is None else data[at : at + size]
            if part.size != size or zlib.crc32(as_bytes(part) if size else b"") != crc32:
                raise CheckpointError(f"The checkpoint {path} is damaged: {name} isn't what was written.")
            arrays[name] = np.array(part).view(kind).reshape(shape)
            at += size
        return Snapshot(meta, arrays)
    except (OSError, ValueError, KeyError, TypeError, ParameterError) as error:
        raise CheckpointError(f"The checkpoint {path} can't be read: {error}.") from error
