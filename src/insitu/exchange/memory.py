"""Memory that processes of one host share, and the futex that they sleep on.

A segment is an anonymous file (memfd). It has no name in the file system, and the kernel frees it with its
last
mapping, so a crash leaves nothing behind. Its size is sealed: nobody can cut it off under those who have
mapped
it. Another process gets it as a descriptor that the kernel hands over (`memory_passing`), never by a number.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import sys
import threading
from typing import Any

import numpy as np

from insitu.base.errors import ExchangeError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

HUGE = 2 << 20
_MADV_COLLAPSE = 25
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_PRIVATE = 0x22  # and anonymous
_MAP_POPULATE = 0x8000
_MREMAP_TO = 3  # may move, to the address given
_FAILED = ctypes.c_void_p(-1).value
_SYS_FUTEX = 202
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL_WAITERS = 2**31 - 1
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""The seals of each segment. No other kind of file has them."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_supported() -> bool:
    """Return True if this machine can run the shared-memory transport.

    It needs Linux, and a processor that makes stores visible in program order (x86-64): sequence numbers
    are published after the data by plain stores, without fences.
    """
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and sys.maxsize > 2**32


def read_host_identity() -> str:
    """Return a text that is equal for processes that may hand memory to each other: same boot, pid namespace
    and user. Equal texts are a claim, which `memory_passing` verifies."""
    return f"{read_machine_identity()}/{os.geteuid()}"


def read_machine_identity() -> str:
    """Return a text that is equal for processes whose processor numbers and process ids mean the same."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _reserve(size: int) -> int:
    """Return an address for a mapping of `size` bytes, such that large pages can be used. The range is
    reserved, but can't be accessed."""
    rounded = max(mmap.PAGESIZE, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    start = _libc.mmap(None, rounded + HUGE, _PROT_NONE, _MAP_PRIVATE, -1, 0)
    if start == _FAILED:
        raise _memory_error(f"{size} bytes of addresses must be available")
    address = int(-(-start // HUGE) * HUGE)
    if address > start:
        _libc.munmap(start, address - start)
    _libc.munmap(address + rounded, start + HUGE - address)
    return address


def _memory_error(rule: str) -> ExchangeError:
    return ExchangeError(
        f"{rule}. Received: {os.strerror(ctypes.get_errno())}. Free memory, or use smaller buffers"
    )


class Segment:
    """A mapping of shared memory. Arrays made by `array` keep it mapped; it is unmapped with the last of
    them."""

    def __init__(self, file: int, size: int, over: np.ndarray | None = None) -> None:
        """Map `size` bytes of `file`. `over`: the memory of this array, which starts on a page, is replaced
        by the segment."""
        #: The descriptor, which the segment owns; -1 once it is closed.
        self.file = file
        #: Bytes.
        self.size = size
        #: The address of the mapping.
        self.address = 0
        self._over = over
        at = _reserve(size) if over is None else over.__array_interface__["data"][0]
        flags = mmap.MAP_SHARED | _MAP_POPULATE | _MAP_FIXED
        address = _libc.mmap(at, max(size, 1), mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            if over is None:
                _libc.munmap(at, max(size, 1))
            ctypes.set_errno(number)
            raise _memory_error(f"{size} bytes of shared memory must be available")
        self.address = address

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "data": (self.address, False), "shape": (self.size,), "typestr": "|u1"}

    def array(self) -> np.ndarray:
        """Return all bytes, as uint8[size]."""
        return np.asarray(self) if self._over is None else self._over

    def make_private(self) -> None:
        """Replace the shared memory by a private copy, which no other process can change. Arrays keep their
        addresses and contents."""
        if not self.size:
            return
        copy = _libc.mmap(None, self.size, mmap.PROT_READ | mmap.PROT_WRITE, _MAP_PRIVATE, -1, 0)
        if copy == _FAILED:
            raise _memory_error(f"{self.size} bytes of memory must be available")
        ctypes.memmove(copy, self.address, self.size)
        if _libc.mremap(copy, self.size, self.size, _MREMAP_TO, self.address) == _FAILED:
            raise _memory_error(f"{self.size} bytes of memory must be movable")

    def close_file(self) -> None:
        """Close the descriptor; the mapping stays."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    # Arguments, since a process that ends may have emptied this module before.
    def __del__(self, close: Any = os.close, unmap: Any = _libc.munmap) -> None:
        file, address, self.file, self.address = self.file, self.address, -1, 0
        if file >= 0:
            close(file)
        if address and self._over is None:
            unmap(address, max(self.size, 1))


def create(name: str, size: int) -> int:
    """Return the descriptor of a new segment of `size` zero bytes. Raises ExchangeError if memory is
    short."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(file, 0o600)
        os.ftruncate(file, size)
        if size:
            os.posix_fallocate(file, 0, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        if size >= HUGE:
            _use_large_pages(file, size)
    except OSError as error:
        os.close(file)
        raise ExchangeError(
            f"{size} bytes of shared memory must be available. Received: {error.strerror}. "
            "Free memory, or use smaller buffers"
        ) from error
    return file


def _use_large_pages(file: int, size: int) -> None:
    """Ask for pages of 2 MiB, whatever the system's setting for shared memory is. They make reading a large
    buffer a third faster. A kernel that has none left, or is older than 6.1, ignores this. The memory must be
    allocated already: holes aren't collapsed."""
    address = _reserve(size)
    flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
    if _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0) != _FAILED:
        _libc.madvise(address, size // HUGE * HUGE, _MADV_COLLAPSE)
    _libc.munmap(address, size)


def fill(file: int, data: np.ndarray) -> None:
    """Write all bytes of `data` (uint8) to the beginning of a segment."""
    view, at = memoryview(data), 0  # type: ignore[arg-type]
    while at < len(view):
        at += os.pwrite(file, view[at:], at)


def adopt(file: int, size: int, over: np.ndarray | None = None) -> Segment:
    """Map the segment that another process has handed over as the descriptor `file`, which is closed.

    `over` as for Segment. Raises ExchangeError unless it is a segment of at least `size` bytes whose size
    can't
    change: anything else that a peer has open isn't mapped.
    """
    try:
        check_segment(file, size)
        # A descriptor that was handed over shares its locks with the sender's; one that is opened again
        # doesn't.
        own = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ExchangeError(
            f"Memory that a peer hands over must be mappable. Received: {error.strerror}. Run all tasks of a "
            'host as one user, or use transport="tcp"'
        ) from error
    finally:
        os.close(file)
    return Segment(own, size, over)


def check_segment(file: int, size: int) -> None:
    """Raise ExchangeError unless `file` is a sealed segment of at least `size` bytes that are all there."""
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALS != _SEALS:
        raise ExchangeError(
            f"Memory that a peer hands over must be a segment with a sealed size. Received: seals "
            f"{seals:#x}. "
            "Run the same version of insitu in all tasks"
        )
    status = os.fstat(file)
    available = min(status.st_size, status.st_blocks * 512)
    if size < 0 or available < size:
        raise ExchangeError(
            f"Memory that a peer hands over must have {size} bytes. Received: {available} bytes. "
            "Check that all ranks run the same version of insitu"
        )


def futex_wait(address: int, value: int, seconds: float) -> None:
    """Sleep while the 32-bit word at `address` is `value`, until `futex_wake`, `seconds` at most."""
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _libc.syscall(
        _SYS_FUTEX,
        ctypes.c_void_p(address),
        _FUTEX_WAIT,
        ctypes.c_uint32(value),
        ctypes.byref(limit),
        None,
        0,
    )


def futex_wake(address: int) -> None:
    """Wake all that sleep on the word at `address`."""
    _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(address), _FUTEX_WAKE, _ALL_WAITERS, None, None, 0)


def fence() -> None:
    """Have all stores of this thread so far come before all its loads from now on, for all processors.

    Taking a lock is one atomic operation of the processor. A new lock is free, so it is always carried out.
    """
    threading.Lock().acquire()


def yield_processor() -> None:
    """Let another process (or thread of this one) run."""
    _libc.sched_yield()
