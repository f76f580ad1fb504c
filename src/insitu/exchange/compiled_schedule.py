"""A round over TCP in compiled code: `ScheduleRunner` as `kernels.c` sees it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from insitu.exchange import native
from insitu.exchange.native import address_of, table
from insitu.exchange.schedule import Schedule, Transfer

THROUGH, WAITING, AGREED, DIFFERENT = 0, 1, 2, 3
"""What a call comes back with: all is done; somebody is late; all have agreed, and it is to be said what rows
are multiplied with; a peer's header differs."""
PIECE_BYTES = 8192
"""What is added up at once, so that a sum stays in the first-level cache from one row to the next."""


class _Transfer(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("bytes", ctypes.c_uint64), ("gate", ctypes.c_uint64))


class _TransferQueue(ctypes.Structure):
    _fields_ = (
        ("segments", ctypes.POINTER(_Transfer)),
        *((name, ctypes.c_uint64) for name in ("count", "place", "offset")),
    )


class _Peer(ctypes.Structure):
    _fields_ = (
        ("socket", ctypes.c_int64),
        ("ended", ctypes.c_uint64),
        ("greeting", ctypes.c_uint64),
        ("needs", ctypes.c_void_p),
        ("out", _TransferQueue),
        ("into", _TransferQueue),
    )


class _ScheduleStep(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("rows", ctypes.c_void_p), ("length", ctypes.c_uint64))


class _Schedule(ctypes.Structure):
    _fields_ = (
        ("lines", ctypes.POINTER(_Peer)),
        ("lines_count", ctypes.c_uint64),
        ("steps", ctypes.POINTER(_ScheduleStep)),
        *((name, ctypes.c_uint64) for name in ("steps_count", "itemsize", "piece")),
        ("sum", native.Sum),
        ("header", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("header_bytes", "pauses", "skips", "in_place")),
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("bytes", "looks", "yields", "done", "agreed", "moved")),
        ("waited", ctypes.c_double),
        ("last", ctypes.c_int64),
        ("different", ctypes.c_int64),
    )


class CompiledPeer:
    """What is under way with one peer, as a DataChannel tells it of its own queues."""

    def __init__(self, kernels: native.Kernels, connection: Any, round_: _Schedule, number: int) -> None:
        self.connection = connection
        self._kernels, self._round, self._number = kernels, round_, number
        self._line = round_.lines[number]

    def _is_open(self, flow: _TransferQueue) -> bool:
        at = flow.place
        return bool(at < flow.count and flow.segments[at].gate <= self._round.done)

    @property
    def ended(self) -> bool:
        return bool(self._line.ended)

    @property
    def out(self) -> bool:
        return self._is_open(self._line.out)

    @property
    def into(self) -> bool:
        return self._is_open(self._line.into)

    @property
    def idle(self) -> bool:
        return not self.out and not self.into

    def pull(self) -> bool:
        return bool(self._kernels.pull(ctypes.addressof(self._round), self._number))


class CompiledSchedule:
    """One schedule, for `kernels.round` and `kernels.round_on`, and everything that it points to."""

    def __init__(
        self,
        kernels: native.Kernels,
        schedule: Schedule,
        connections: Sequence[Any],
        headers: tuple[np.ndarray, Sequence[np.ndarray]],
        total: native.Sum,
        looks: tuple[int, bool],
    ) -> None:
        """`connections` and the headers to be received are those of `schedule.peers`, in order; the first of
        `headers` is this member's own. `looks`: how often to ask all connections again before giving up, and
        whether to yield the processor in between."""
        self._kept: list[Any] = [schedule, connections, headers]
        own, theirs = headers
        late = int(schedule.answers)
        lines = (_Peer * len(connections))()
        for line, peer, connection, header in zip(lines, schedule.peers, connections, theirs, strict=True):
            line.socket, line.greeting = connection.fileno(), schedule.greeting[peer]
            needs = np.array([step.needs[peer] for step in schedule.steps], np.uint64)
            line.needs = address_of(self._keep(needs))
            line.out = self._flow([Transfer(own, late), *schedule.out[peer]])
            line.into = self._flow([Transfer(header), *schedule.into[peer]])
        steps = (_ScheduleStep * len(schedule.steps))()
        for place, step in zip(steps, schedule.steps, strict=True):
            rows = self._keep(table(step.rows))
            place.out, place.rows, place.length = address_of(step.out), address_of(rows), step.out.size
        self.round = _Schedule(
            lines=lines, lines_count=len(lines), steps=steps, steps_count=len(steps), sum=total
        )
        self.round.header, self.round.header_bytes = address_of(own), own.nbytes
        self.round.in_place = schedule.in_place
        self.round.looks, self.round.yields = looks
        if schedule.steps:
            self.round.itemsize = schedule.steps[0].out.itemsize
            self.round.piece = PIECE_BYTES // self.round.itemsize
        self.address = ctypes.addressof(self.round)
        self.lines = [CompiledPeer(kernels, c, self.round, number) for number, c in enumerate(connections)]

    def copy_at_the_end(self, source: np.ndarray, target: np.ndarray) -> None:
        self.round.source, self.round.target = address_of(source), address_of(target)
        self.round.bytes = target.nbytes

    def _keep(self, array: np.ndarray) -> np.ndarray:
        self._kept.append(array)
        return array

    def _flow(self, segments: Sequence[Transfer]) -> _TransferQueue:
        places = (_Transfer * len(segments))()
        for place, segment in zip(places, segments, strict=True):
            place.at, place.bytes, place.gate = address_of(segment.data), segment.data.nbytes, segment.gate
        return _TransferQueue(places, len(places), 0, 0)
