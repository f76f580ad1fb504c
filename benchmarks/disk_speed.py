"""What a disk writes, and what it copies: references for imports."""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write(folder: Path, size: int) -> float:
    """Return the bytes a second that the disk writes in sequence, with the synchronisation at the end."""
    room, target = mmap.mmap(-1, 8 << 20), folder / "written"
    room.write(np.random.default_rng(0).bytes(8 << 20))
    started = time.perf_counter()
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    for _ in range(max(1, size >> 23)):
        os.write(descriptor, room)
    os.fsync(descriptor)
    os.close(descriptor)
    seconds = time.perf_counter() - started
    target.unlink()
    return (size >> 23 << 23) / seconds


def copy(sources: Sequence[Path], folder: Path, size: int) -> float:
    """Return the bytes a second that the disk reads and writes at once, as a copy of `sources` needs.

    A thread reads while another one writes, 8 MiB at a time, both past the page cache.
    """
    free: queue.Queue[mmap.mmap] = queue.Queue()
    full: queue.Queue[mmap.mmap | None] = queue.Queue()
    for _ in range(4):
        free.put(mmap.mmap(-1, 8 << 20))

    def read() -> None:
        done = 0
        for path in sources:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            for offset in range(0, path.stat().st_size >> 23 << 23, 8 << 20):
                if done >= size:
                    break
                room = free.get()
                done += os.preadv(descriptor, [room], offset)
                full.put(room)
            os.close(descriptor)
        full.put(None)

    target, copied = folder / "copied", 0
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    started = time.perf_counter()
    threading.Thread(target=read).start()
    while room := full.get():
        copied += os.write(descriptor, room)
        free.put(room)
    os.fsync(descriptor)
    seconds = time.perf_counter() - started
    os.close(descriptor)
    target.unlink()
    return copied / seconds
