"""Pure: binary objects, many at once: where the fields of each are.

An object is a header of 24 bytes (type code, version, flags, type, hash, length, schema, where the footer
begins), the fields, and a footer with where each field begins. All numbers of all objects are read by one
call of NumPy each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.base.errors import SourceError
from insitu.extensions.ignite.protocol import BinaryType
from insitu.extensions.ignite.rows import Buffer, Positions
from insitu.extensions.ignite.wire import HANDLE, NULL, OBJECT, WRAPPED, Malformed, name_of_code

HEADER_BYTES = 24
_HAS_SCHEMA, _HAS_RAW, _ONE_BYTE, _TWO_BYTES, _COMPACT = 0x02, 0x04, 0x08, 0x10, 0x20
_HEADER = np.dtype(
    [
        *(("code", "u1"), ("version", "u1"), ("flags", "<u2"), ("type", "<i4"), ("hash", "<i4")),
        *(("length", "<i4"), ("schema", "<i4"), ("footer", "<i4")),
    ]
)
MOST_FIXED_BYTES = 17
"""The most bytes of a value whose length follows from its type, the type code included."""
_LEAST_ALIGNED, _LEAST_FIELDS, _MOST_ALIGNED = 64, 4, 2048
"""How many objects, and fields of each, make it worth while to copy their beginnings, of so many bytes at
most."""
ABSENT = -1
"""The position of what isn't there."""


class UnknownSchema(Exception):
    """Raised for objects of a schema that isn't known yet. `number` is the type."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def gather(buffer: Buffer, positions: Positions, size: int) -> npt.NDArray[Any]:
    """Return the `size` bytes at each position, as an array [positions] of void. Raises Malformed."""
    return _gather(buffer, positions, size, np.dtype(f"V{max(1, size)}"))


def _gather(buffer: Buffer, positions: Positions, size: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the value of `dtype`, of `size` bytes, at each position. Raises Malformed."""
    count = len(positions)
    if not count or not size:
        return np.zeros(count, dtype)
    low, high = int(positions.min()), int(positions.max())
    if low < 0 or high + size > len(buffer):
        raise Malformed(f"values of {size} bytes at [{low}, {high}] are outside of {len(buffer)} bytes")
    step = int(positions[1] - positions[0]) if count > 1 else 0
    if step > 0 and high - low == step * (count - 1) and (np.diff(positions) == step).all():
        return np.ndarray((count,), dtype, buffer, offset=low, strides=(step,)).copy()
    everywhere: npt.NDArray[Any] = np.ndarray((len(buffer) - size + 1,), f"V{size}", buffer, strides=(1,))
    return everywhere[positions].view(dtype)


def gather_numbers(buffer: Buffer, positions: Positions, dtype: str) -> npt.NDArray[Any]:
    """Return the number at each position."""
    kind = np.dtype(dtype).newbyteorder("<")
    return _gather(buffer, positions, kind.itemsize, kind)


def gather_codes(buffer: Buffer, positions: Positions) -> npt.NDArray[np.uint8]:
    """Return the type code of each value; NULL for what is absent."""
    absent = positions < 0
    if not absent.any():
        return gather_numbers(buffer, positions, "u1")
    codes = np.full(len(positions), NULL, np.uint8)
    codes[~absent] = gather_numbers(buffer, positions[~absent], "u1")
    return codes


def follow_handles(buffer: Buffer, positions: Positions) -> Positions:
    """Return where each value begins, also those that stand earlier in their row, to which a handle leads.

    Such values are objects, arrays of objects, collections and maps.
    """
    handles = np.flatnonzero(gather_codes(buffer, positions) == HANDLE)
    if not len(handles):
        return positions
    found = positions.copy()
    found[handles] -= gather_numbers(buffer, positions[handles] + 1, "i4")
    if (found[handles] >= positions[handles]).any() or (found[handles] < 0).any():
        raise Malformed("a handle leads to what doesn't stand before it")
    return found


def locate_objects(buffer: Buffer, positions: Positions, what: str) -> Positions:
    """Return where the object of each value begins; ABSENT for null. Raises SourceError for other values.

    An object may be in a wrapper, or be one that stands earlier in the same row, to which a handle leads.
    """
    positions = follow_handles(buffer, positions)
    codes = gather_codes(buffer, positions)
    if (codes == OBJECT).all():
        return positions
    if (codes == WRAPPED).all():
        return _unwrap(buffer, positions)
    found = np.where(codes == OBJECT, positions, ABSENT)
    wrapped = np.flatnonzero(codes == WRAPPED)
    if len(wrapped):
        found[wrapped] = _unwrap(buffer, positions[wrapped])
    others = np.setdiff1d(codes, [OBJECT, WRAPPED, NULL])
    if len(others):
        raise SourceError(
            f"All {what} must be objects where one is. Received: {name_of_code(int(others[0]))} beside them. "
            f"Leave it out with --without {what}, or store one type"
        )
    return found


def _unwrap(buffer: Buffer, wrappers: Positions) -> Positions:
    """Return where the object in each wrapper begins."""
    lengths = gather_numbers(buffer, wrappers + 1, "i4").astype(np.int64)
    found: Positions = wrappers + 5 + gather_numbers(buffer, wrappers + 5 + lengths, "i4")
    return found


def _footer_form(flags: int) -> tuple[int, int]:
    """Return the bytes of a field's offset in the footer, and of its number before that."""
    return 1 if flags & _ONE_BYTE else 2 if flags & _TWO_BYTES else 4, 0 if flags & _COMPACT else 4


@dataclass(frozen=True, slots=True)
class AlignedFields:
    """The beginnings of objects, one after the other."""

    #: The bytes.
    buffer: Buffer
    #: How many there are of each object.
    width: int
    #: The number of a field -> its distance from the beginning.
    distances: Mapping[int, int]

    def locate(self, field: int) -> Positions:
        """Return where the value of a field begins in `buffer`, for each object."""
        return np.arange(self.distances[field], len(self.buffer), self.width, dtype=np.int64)

    def read(self, field: int, code: int, dtype: str) -> npt.NDArray[Any] | None:
        """Return the number after the type code of each value; None where not all have type `code`."""
        distance, count = self.distances[field], len(self.buffer) // self.width
        strides = (self.width,)
        if (np.ndarray((count,), np.uint8, self.buffer, distance, strides) != code).any():
            return None
        kind = np.dtype(dtype).newbyteorder("<")
        return np.ndarray((count,), kind, self.buffer, distance + 1, strides).copy()


class ObjectFields:
    """The headers of some objects: gives where a field of each begins. Raises Malformed for damaged ones."""

    def __init__(self, buffer: Buffer, objects: Positions, type_of: Callable[[int], BinaryType]) -> None:
        """`objects` are all there: none is ABSENT."""
        self._buffer, self._objects, self._type_of = buffer, objects, type_of
        heads = gather(buffer, objects, HEADER_BYTES).view(_HEADER)
        if (heads["code"] != OBJECT).any():
            raise Malformed("an object doesn't begin with its type code")
        self._flags, self._schemas = heads["flags"], heads["schema"]
        self.types = heads["type"]
        self._lengths = heads["length"].astype(np.int64)
        self._footers = heads["footer"].astype(np.int64)
        if (self._lengths < HEADER_BYTES).any() or (objects + self._lengths > len(buffer)).any():
            raise Malformed("an object is cut off")
        self._groups = self._group()

    def _group(self) -> list[Positions | None]:
        """Return the rows of each kind of object: of the same flags, type and schema. None: all rows."""
        if not len(self._objects):
            return []
        parts = (self._flags, self.types, self._schemas)
        if all((part == part[0]).all() for part in parts):
            return [None]
        heads = np.stack([part.astype(np.int64) for part in parts])
        _, kinds = np.unique(heads, axis=1, return_inverse=True)
        kinds = kinds.reshape(-1)
        return [np.flatnonzero(kinds == kind) for kind in range(int(kinds.max()) + 1)]

    def locate(self, field: int) -> Positions:
        """Return where the value of a field begins in each object; ABSENT where it has no such field."""
        if len(self._groups) == 1 and self._groups[0] is None:
            return self._locate_in(field, slice(None), 0)
        found = np.full(len(self._objects), ABSENT, np.int64)
        for rows in self._groups:
            if rows is not None:
                found[rows] = self._locate_in(field, rows, int(rows[0]))
        return found

    def align(self, fields: Sequence[int]) -> AlignedFields | None:
        """Return those of `fields` that are at one distance from the beginning of all objects, side by side;
        None where few do: then it is no gain.

        One copy of the beginning of each object takes the place of several of each field.
        """
        if len(self._objects) < _LEAST_ALIGNED or self._groups != [None] or len(fields) < _LEAST_FIELDS:
            return None
        distances = self._find_distances(fields)
        if len(distances) < _LEAST_FIELDS:
            return None
        # A value of a fixed length ends before that; longer ones aren't read from here.
        width = min(max(distances.values()) + MOST_FIXED_BYTES, _MOST_ALIGNED, int(self._lengths.min()))
        inside = {field: d for field, d in distances.items() if d + MOST_FIXED_BYTES <= width}
        return AlignedFields(gather(self._buffer, self._objects, width).view(np.uint8), width, inside)

    def _find_distances(self, fields: Sequence[int]) -> dict[int, int]:
        """Return the distance from the beginning of those fields for which it is the same in all objects.

        These are of one kind.
        """
        flags = int(self._flags[0])
        width, head = _footer_form(flags)
        if not flags & _HAS_SCHEMA:
            return {}
        schema = self._schema(0, flags, width + head)
        size = len(schema) * (width + head)
        if (self._footers < HEADER_BYTES).any() or (self._footers + size > self._lengths).any():
            raise Malformed("the footer of an object is outside of it")
        footers = gather(self._buffer, self._objects + self._footers, size).view(np.uint8)
        entries = np.ndarray(
            (len(self._objects), len(schema)),
            f"<u{width}",
            footers,
            offset=head,
            strides=(size, width + head),
        )
        alike = (entries == entries[0]).all(axis=0)
        distances = {field: int(entries[0, k]) for k, field in enumerate(schema) if alike[k]}
        least = int(self._lengths.min())
        return {
            field: distances[field] for field in fields if HEADER_BYTES <= distances.get(field, 0) < least
        }

    def _locate_in(self, field: int, rows: Any, first: int) -> Positions:
        objects, footers, lengths = self._objects[rows], self._footers[rows], self._lengths[rows]
        flags = int(self._flags[first])
        width, head = _footer_form(flags)
        if not flags & _HAS_SCHEMA:
            return np.full(len(objects), ABSENT, np.int64)
        schema = self._schema(first, flags, width + head)
        if field not in schema:
            return np.full(len(objects), ABSENT, np.int64)
        place = footers + schema.index(field) * (width + head) + head
        if (footers < HEADER_BYTES).any() or (place + width > lengths).any():
            raise Malformed("the footer of an object is outside of it")
        offsets = gather_numbers(self._buffer, objects + place, f"u{width}").astype(np.int64)
        if (offsets < HEADER_BYTES).any() or (offsets >= lengths).any():
            raise Malformed("a field of an object is outside of it")
        found: Positions = objects + offsets
        return found

    def _schema(self, row: int, flags: int, width: int) -> tuple[int, ...]:
        """Return the numbers of an object's fields: of a compact one by its class, else by its footer."""
        if flags & _COMPACT:
            number = int(self.types[row])
            try:
                return self._type_of(number).schemas[int(self._schemas[row])]
            except KeyError:
                raise UnknownSchema(number) from None
        start = int(self._objects[row] + self._footers[row])
        end = int(self._objects[row] + self._lengths[row]) - (4 if flags & _HAS_RAW else 0)
        if end < start:
            raise Malformed("the footer of an object is outside of it")
        places = np.arange(start, end - width + 1, width, dtype=np.int64)
        return tuple(gather_numbers(self._buffer, places, "i4").tolist())
