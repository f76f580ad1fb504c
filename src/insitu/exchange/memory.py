"""Memory that processes of one host share, and the futex that they sleep on.

A segment is an anonymous file (memfd): it has no name in the file system, only processes of the same user
can open it through /proc, and the kernel frees it with its last mapping, so a crash leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from typing import Any

import numpy as np

from insitu.errors import ExchangeError
from insitu.exchange.arithmetic import PAGE

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
_EVERYBODY = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def supported() -> bool:
    """Whether this machine can run the shared-memory transport.

    It needs Linux, and a processor that makes stores visible in program order (x86-64): sequence numbers
    are published after the data by plain stores, without fences.
    """
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and sys.maxsize > 2**32


def host_identity() -> str:
    """Equal for two processes that can open each other's segments: same boot, process numbers and user."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"


def _reserve(size: int) -> int:
    """An address for a mapping of `size` bytes, such that large pages can be used. Nothing is mapped there
    but what keeps others away."""
    room = max(PAGE, -(-size // PAGE) * PAGE)
    start = _libc.mmap(None, room + HUGE, _PROT_NONE, _MAP_PRIVATE, -1, 0)
    if start == _FAILED:
        raise ExchangeError(f"{size} bytes of addresses can't be had: {os.strerror(ctypes.get_errno())}")
    address = int(-(-start // HUGE) * HUGE)
    if address > start:
        _libc.munmap(start, address - start)
    _libc.munmap(address + room, start + HUGE - address)
    return address


class Segment:
    """A mapping of shared memory of `size` bytes at `address`. Owns `file`, a descriptor of it.

    Arrays made by `array` keep it mapped; it is unmapped with the last of them. With `over`, it takes the
    place of the memory of that array, which starts on a page: whoever has the array has the segment then.
    """

    def __init__(self, file: int, size: int, over: np.ndarray | None = None) -> None:
        self.file = file
        self.size = size
        self.address = 0
        self._over = over
        place = _reserve(size) if over is None else over.__array_interface__["data"][0]
        flags = mmap.MAP_SHARED | _MAP_POPULATE | _MAP_FIXED
        address = _libc.mmap(place, max(size, 1), mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
        if address == _FAILED:
            raise ExchangeError(
                f"{size} bytes of shared memory can't be mapped: {os.strerror(ctypes.get_errno())}"
            )
        self.address = address

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "data": (self.address, False), "shape": (self.size,), "typestr": "|u1"}

    def array(self) -> np.ndarray:
        """All bytes, as uint8[size]."""
        return np.asarray(self) if self._over is None else self._over

    def isolate(self) -> None:
        """Puts a private copy in the place of the shared memory: nobody else can change it any more. Arrays
        keep their addresses and contents."""
        if not self.size:
            return
        copy = _libc.mmap(None, self.size, mmap.PROT_READ | mmap.PROT_WRITE, _MAP_PRIVATE, -1, 0)
        if copy == _FAILED:
            raise ExchangeError(
                f"{self.size} bytes of memory can't be had: {os.strerror(ctypes.get_errno())}"
            )
        ctypes.memmove(copy, self.address, self.size)
        if _libc.mremap(copy, self.size, self.size, _MREMAP_TO, self.address) == _FAILED:
            raise ExchangeError(f"Memory can't be moved: {os.strerror(ctypes.get_errno())}")

    def close_file(self) -> None:
        """The mapping stays."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def __del__(self) -> None:
        if self.file >= 0:
            os.close(self.file)
        if self.address and self._over is None:
            _libc.munmap(self.address, max(self.size, 1))


def create(name: str, size: int) -> int:
    """The descriptor of a new segment of `size` zero bytes. Raises ExchangeError where memory is short."""
    file = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.fchmod(file, 0o600)
        os.ftruncate(file, size)
        if size:
            os.posix_fallocate(file, 0, size)
        if size >= HUGE:
            _use_large_pages(file, size)
    except OSError as error:
        os.close(file)
        raise ExchangeError(f"{size} bytes of shared memory can't be had: {error.strerror}") from error
    return file


def _use_large_pages(file: int, size: int) -> None:
    """Asks for pages of 2 MiB, whatever the system's setting for shared memory is. They make sweeping over a
    large buffer a third faster; where the kernel has none to give (or is older than 6.1), it isn't. The
    memory must be there already: holes aren't collapsed."""
    address = _reserve(size)
    flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
    if _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0) != _FAILED:
        _libc.madvise(address, size // HUGE * HUGE, _MADV_COLLAPSE)
    _libc.munmap(address, size)


def fill(file: int, data: np.ndarray) -> None:
    """Writes all bytes of `data` (uint8) to the beginning of a segment."""
    view, at = memoryview(data), 0  # type: ignore[arg-type]
    while at < len(view):
        at += os.pwrite(file, view[at:], at)


def attach(process: int, descriptor: int, size: int, over: np.ndarray | None = None) -> Segment:
    """Maps the segment that `process` of this host has open as `descriptor`; see Segment for `over`."""
    try:
        file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ExchangeError(
            f"The shared memory of process {process} can't be opened: {error.strerror}"
        ) from error
    if os.fstat(file).st_size < size:
        os.close(file)
        raise ExchangeError(
            f"The shared memory of process {process} is smaller than the {size} bytes it promised"
        )
    return Segment(file, size, over)


def futex_wait(address: int, value: int, seconds: float) -> None:
    """Sleeps while the 32-bit word at `address` is `value`, until `futex_wake`, `seconds` at most."""
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
    """Wakes all that sleep on the word at `address`."""
    _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(address), _FUTEX_WAKE, _EVERYBODY, None, None, 0)


def yield_processor() -> None:
    """Lets another process (or thread of this one) run."""
    _libc.sched_yield()
