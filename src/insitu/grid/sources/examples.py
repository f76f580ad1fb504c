"""tf.train.Example and tf.train.SequenceExample as stored in a file, without their library.

A message is a list of fields; `locate_features` walks through one record and returns the places of each
feature's values. Records of a file mostly have the same layout and differ in their values alone. So a
`Layout` is made of one record, compared with all records of its length at once, and the values of those that
have it are taken by a few calls of NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

BYTES, FLOAT, INT64 = 1, 2, 3
KINDS = {BYTES: "bytes_list", FLOAT: "float_list", INT64: "int64_list"}
"""The kinds of a feature, by their number in the message, and their names there."""

_VARINT, _FIXED64, _CHUNK, _FIXED32 = 0, 1, 2, 5
_MOST_VARINT_BYTES = 10
Bytes = npt.NDArray[np.uint8]


class Malformed(Exception):
    """A record that isn't what its writers write; says what is wrong."""


@dataclass(frozen=True, slots=True)
class Located:
    """Places of the values of one feature in a record."""

    #: BYTES, FLOAT or INT64.
    kind: int
    #: For BYTES each value's [start, stop); for others ranges of values without anything between them.
    ranges: tuple[tuple[int, int], ...]


def locate_features(record: bytes) -> dict[str, Located]:
    """Return the place of each feature of an Example, or of a SequenceExample's context and lists.

    Features without values are left out. The steps of a feature list follow each other. Raises Malformed.
    """
    context: dict[str, Located] = {}
    lists: dict[str, Located] = {}
    for number, wire, start, stop in _fields(record, 0, len(record)):
        if number == 1 and wire == _CHUNK:
            context.update(_locate_map(record, start, stop, _locate_feature))
        elif number == 2 and wire == _CHUNK:
            lists.update(_locate_map(record, start, stop, _locate_list))
    return {**lists, **context}


def _locate_map(record: bytes, start: int, stop: int, locate: Any) -> Iterator[tuple[str, Located]]:
    """Yield (key, the place of its values) of a map. The last of equal keys counts."""
    for number, wire, first, last in _fields(record, start, stop):
        if number != 1 or wire != _CHUNK:
            continue
        key, found = "", None
        for inner, inner_wire, begin, end in _fields(record, first, last):
            if inner == 1 and inner_wire == _CHUNK:
                key = record[begin:end].decode("utf-8", "replace")
            elif inner == 2 and inner_wire == _CHUNK:
                found = locate(record, begin, end)
        if found is not None:
            yield key, found


def _locate_list(record: bytes, start: int, stop: int) -> Located | None:
    """Return the places of the values of a FeatureList, those of all steps in a row."""
    kind: int | None = None
    ranges: list[tuple[int, int]] = []
    for number, wire, begin, end in _fields(record, start, stop):
        if number != 1 or wire != _CHUNK:
            continue
        step = _locate_feature(record, begin, end)
        if step is None:
            continue
        if kind is not None and kind != step.kind:
            raise Malformed(f"a feature list has steps of {KINDS[kind]} and of {KINDS[step.kind]}")
        kind = step.kind
        ranges += step.ranges
    return None if kind is None else Located(kind, tuple(ranges))


def _locate_feature(record: bytes, start: int, stop: int) -> Located | None:
    """Return the places of the values of a Feature; None if it has no kind. The last of several kinds
    counts."""
    kind: int | None = None
    ranges: list[tuple[int, int]] = []
    for number, wire, begin, end in _fields(record, start, stop):
        if number not in KINDS or wire != _CHUNK:
            continue
        if number != kind:
            kind, ranges = number, []
        ranges += _ranges(record, begin, end, number)
    return None if kind is None else Located(kind, tuple(ranges))


def _ranges(record: bytes, start: int, stop: int, kind: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of values of a list of one kind, packed or one by one."""
    single = {FLOAT: _FIXED32, INT64: _VARINT}.get(kind)
    for number, wire, begin, end in _fields(record, start, stop):
        if number != 1:
            continue
        if wire == _CHUNK:
            if kind == FLOAT and (end - begin) % 4:
                raise Malformed(f"{end - begin} bytes are no whole number of floats")
            if kind == INT64:
                _check_varints(record, begin, end)
            if kind == BYTES or end > begin:
                yield begin, end
        elif wire == single:
            yield begin, end


def _fields(record: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number, wire type, start, stop) of the fields of a message. Raises Malformed."""
    while at < stop:
        tag, at = _read_varint(record, at, stop)
        wire, start = tag & 7, at
        if wire == _CHUNK:
            size, start = _read_varint(record, at, stop)
            at = start + size
        elif wire == _VARINT:
            _, at = _read_varint(record, at, stop)
        elif wire in (_FIXED32, _FIXED64):
            at += 4 if wire == _FIXED32 else 8
        else:
            raise Malformed(f"a field of type {wire} at byte {start}, which no Example has")
        if at > stop:
            raise Malformed(f"a field at byte {start} ends {at - stop} bytes behind its message")
        if not tag >> 3:
            raise Malformed(f"a field without a number at byte {start}")
        yield tag >> 3, wire, start, at


def _read_varint(record: bytes, at: int, stop: int) -> tuple[int, int]:
    """Return (number, the byte behind it). Raises Malformed."""
    result = shift = 0
    while at < stop and shift < 7 * _MOST_VARINT_BYTES:
        byte = record[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
        shift += 7
    raise Malformed(f"a number that doesn't end at byte {at}")


def _check_varints(record: bytes, start: int, stop: int) -> None:
    """Raise Malformed unless a range holds whole numbers of ten bytes at most each."""
    if stop == start:
        return
    ends = np.flatnonzero(np.frombuffer(record, np.uint8, stop - start, start) < 0x80)
    is_whole = len(ends) > 0 and int(ends[-1]) == stop - start - 1
    if not is_whole or int(np.diff(ends, prepend=-1).max()) > _MOST_VARINT_BYTES:
        raise Malformed(f"a number that doesn't end at byte {stop}")


class Layout:
    """The layout that records share which differ in the values of their features alone."""

    def __init__(self, record: bytes, features: Mapping[str, Located]) -> None:
        self.features = features
        self._record: Bytes = np.frombuffer(record, np.uint8)
        self._fixed: Bytes = np.full(len(record), 0xFF, np.uint8)
        for located in features.values():
            for start, stop in located.ranges:
                # Only those bits of a number that say whether it continues belong to the layout.
                self._fixed[start:stop] = 0x80 if located.kind == INT64 else 0

    def matches(self, records: Bytes) -> npt.NDArray[np.bool_]:
        """Return which of `records`, uint8[records, bytes], have this layout."""
        differing: npt.NDArray[np.bool_] = np.any((records ^ self._record) & self._fixed, axis=1)
        return ~differing

    def count(self, feature: str) -> int:
        """Return how many values a feature has; 0 if records lack it."""
        located = self.features.get(feature)
        if located is None:
            return 0
        if located.kind == BYTES:
            return len(located.ranges)
        if located.kind == FLOAT:
            return sum(stop - start for start, stop in located.ranges) // 4
        return int(sum((self._record[start:stop] < 0x80).sum() for start, stop in located.ranges))

    def take(self, records: Bytes, feature: str) -> npt.NDArray[Any]:
        """Return the values of a feature: float32 or int64 [records, values], of bytes uint8 [records,
        bytes],
        those of several values end to end."""
        located = self.features[feature]
        parts = [records[:, start:stop] for start, stop in located.ranges]
        raw = parts[0] if len(parts) == 1 else np.concatenate([records[:, :0], *parts], axis=1)
        if located.kind == BYTES:
            return raw
        if located.kind == FLOAT:
            return np.ascontiguousarray(raw).view("<f4").astype(np.float32, copy=False)
        return decode_varints(raw) if raw.shape[1] else np.empty((len(records), 0), np.int64)


def decode_varints(raw: Bytes) -> npt.NDArray[np.int64]:
    """Return the numbers of rows of varints, each of the same size in all rows: int64[rows, numbers]."""
    ends = np.flatnonzero(raw[0] < 0x80)
    starts = np.concatenate(([0], ends[:-1] + 1))
    if len(starts) == raw.shape[1]:
        return raw.astype(np.int64)
    shifts = 7 * (np.arange(raw.shape[1]) - np.repeat(starts, ends - starts + 1))
    # The last of ten bytes has a single bit; the others fall out at the top, as in protobuf.
    parts = (raw & 0x7F).astype(np.uint64) << shifts.astype(np.uint64)
    return np.bitwise_or.reduceat(parts, starts, axis=1).view(np.int64)
