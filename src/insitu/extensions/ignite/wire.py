"""Pure: the primitives of Ignite's wire format. All numbers are little-endian; values carry a type code."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from insitu.base.errors import SourceError

NULL, HANDLE, OBJECT, WRAPPED = 101, 102, 103, 27
BYTE, SHORT, INT, LONG, FLOAT, DOUBLE, CHAR, BOOL = range(1, 9)
STRING, UUID, DATE = 9, 10, 11
BYTES, SHORTS, INTS, LONGS, FLOATS, DOUBLES, CHARS, BOOLS = range(12, 20)
STRINGS, UUIDS, DATES, OBJECTS, COLLECTION, MAP = 20, 21, 22, 23, 24, 25
ENUM, ENUMS, DECIMAL, DECIMALS, TIMESTAMP, TIMESTAMPS = 28, 29, 30, 31, 33, 34
TIME, TIMES, BINARY_ENUM, CLASS, OPTIMIZED = 36, 37, 38, 32, 254

FIXED_BYTES = {
    NULL: 1,
    BYTE: 2,
    SHORT: 3,
    INT: 5,
    LONG: 9,
    FLOAT: 5,
    DOUBLE: 9,
    CHAR: 3,
    BOOL: 2,
    HANDLE: 5,
    UUID: 17,
    DATE: 9,
    TIMESTAMP: 13,
    TIME: 9,
}
"""Bytes of values whose length follows from the type code, the code included."""
ELEMENT_BYTES = {STRING: 1, BYTES: 1, SHORTS: 2, INTS: 4, LONGS: 8, FLOATS: 4, DOUBLES: 8, CHARS: 2, BOOLS: 1}
"""Bytes of an element of values that are a count and so many elements."""
NAMES = {
    NULL: "null",
    HANDLE: "handle",
    OBJECT: "object",
    WRAPPED: "object",
    BYTE: "byte",
    SHORT: "short",
    INT: "int",
    LONG: "long",
    FLOAT: "float",
    DOUBLE: "double",
    CHAR: "char",
    BOOL: "boolean",
    STRING: "String",
    UUID: "UUID",
    DATE: "Date",
    BYTES: "byte[]",
    SHORTS: "short[]",
    INTS: "int[]",
    LONGS: "long[]",
    FLOATS: "float[]",
    DOUBLES: "double[]",
    CHARS: "char[]",
    BOOLS: "boolean[]",
    STRINGS: "String[]",
    UUIDS: "UUID[]",
    DATES: "Date[]",
    OBJECTS: "Object[]",
    COLLECTION: "Collection",
    MAP: "Map",
    ENUM: "enum",
    ENUMS: "enum[]",
    DECIMAL: "BigDecimal",
    DECIMALS: "BigDecimal[]",
    TIMESTAMP: "Timestamp",
    TIMESTAMPS: "Timestamp[]",
    TIME: "Time",
    TIMES: "Time[]",
    BINARY_ENUM: "enum",
    CLASS: "Class",
    OPTIMIZED: "an object that Java itself serialized",
}
"""The types as Java names them, for messages."""

_INT, _LONG, _SHORT = struct.Struct("<i"), struct.Struct("<q"), struct.Struct("<h")


class Malformed(ValueError):
    """Raised for bytes that no Ignite server writes."""


def name_of_code(code: int) -> str:
    """Return the name of a type code, for messages."""
    return NAMES.get(code, f"type {code}")


def hash_name(name: str) -> int:
    """Return Java's `String.hashCode`, which numbers caches: of UTF-16 units, as a signed 32-bit number."""
    value = 0
    units = name.encode("utf-16-le")
    for low, high in zip(units[::2], units[1::2], strict=True):
        value = (31 * value + (high << 8 | low)) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def pack_int(value: int) -> bytes:
    return _INT.pack(value)


def pack_long(value: int) -> bytes:
    return _LONG.pack(value)


def pack_string(text: str | None) -> bytes:
    if text is None:
        return bytes([NULL])
    data = text.encode()
    return bytes([STRING]) + _INT.pack(len(data)) + data


def pack_byte_array(data: bytes) -> bytes:
    return bytes([BYTES]) + _INT.pack(len(data)) + data


class Reader:
    """Reads primitives one after another. Raises Malformed if they end early."""

    def __init__(self, data: bytes | bytearray | memoryview, position: int = 0) -> None:
        self.data = memoryview(data)
        self.position = position

    @property
    def left(self) -> int:
        """How many bytes follow."""
        return len(self.data) - self.position

    def take(self, count: int) -> memoryview:
        if count < 0 or count > self.left:
            raise Malformed(f"{count} bytes are announced at {self.position}, {self.left} follow")
        self.position += count
        return self.data[self.position - count : self.position]

    def read_byte(self) -> int:
        return self.take(1)[0]

    def read_bool(self) -> bool:
        return self.read_byte() != 0

    def read_short(self) -> int:
        return int(_SHORT.unpack(self.take(2))[0])

    def read_int(self) -> int:
        return int(_INT.unpack(self.take(4))[0])

    def read_long(self) -> int:
        return int(_LONG.unpack(self.take(8))[0])

    def read_count(self, least_bytes: int = 1) -> int:
        """Read how many elements follow, of `least_bytes` each at least."""
        count = self.read_int()
        if count < 0 or count * least_bytes > self.left:
            raise Malformed(f"{count} elements are announced at {self.position}, {self.left} bytes follow")
        return count

    def read_string(self) -> str | None:
        """Read a text with its type code, or null."""
        code = self.read_byte()
        if code == NULL:
            return None
        if code != STRING:
            raise Malformed(f"a text is expected at {self.position - 1}, it is {name_of_code(code)}")
        return bytes(self.take(self.read_count())).decode("utf-8", "replace")

    def read_text(self) -> str:
        """Read a text; null is the empty one."""
        return self.read_string() or ""

    def read_raw_uuid(self) -> str:
        """Read the two longs of a UUID."""
        return f"{self.read_long() & _UNSIGNED:016x}{self.read_long() & _UNSIGNED:016x}"

    def read_uuid(self) -> str:
        """Read a UUID with its type code, as 32 hex digits; of null it is empty."""
        code = self.read_byte()
        if code == NULL:
            return ""
        if code != UUID:
            raise Malformed(f"a UUID is expected at {self.position - 1}, it is {name_of_code(code)}")
        return self.read_raw_uuid()

    def read_byte_array(self) -> bytes:
        """Read a byte[] with its type code; null is empty."""
        code = self.read_byte()
        if code == NULL:
            return b""
        if code != BYTES:
            raise Malformed(f"a byte[] is expected at {self.position - 1}, it is {name_of_code(code)}")
        return bytes(self.take(self.read_count()))

    def skip_value(self) -> None:
        """Pass over one value of any type."""
        self.position = end_of_value(self.data, self.position)


_UNSIGNED = (1 << 64) - 1
_DEEPEST = 64
"""How deep arrays and collections of a value may be in each other."""


def end_of_value(data: Sequence[int] | memoryview, position: int, depth: int = 0) -> int:
    """Return where the value at `position` ends. Raises Malformed, and SourceError for an unknown type."""
    reader = Reader(data if isinstance(data, memoryview) else memoryview(bytes(data)), position)
    code = reader.read_byte()
    if depth > _DEEPEST:
        raise Malformed(f"values are more than {_DEEPEST} deep in each other")
    if code in FIXED_BYTES:
        reader.take(FIXED_BYTES[code] - 1)
    elif code in ELEMENT_BYTES:
        reader.take(reader.read_count(ELEMENT_BYTES[code]) * ELEMENT_BYTES[code])
    elif code == OBJECT:
        length = Reader(reader.data, position + 12).read_int()
        if length < 24:
            raise Malformed(f"an object of {length} bytes at {position}")
        reader.take(length - 1)
    elif code == WRAPPED:
        reader.take(reader.read_count())
        reader.read_int()
    elif code in (ENUM, BINARY_ENUM):
        _skip_type(reader)
        reader.read_int()
    elif code == DECIMAL:
        reader.read_int()
        reader.take(reader.read_count())
    elif code == OPTIMIZED:
        reader.take(reader.read_count())
    elif code == CLASS:
        _skip_type(reader)
    else:
        _skip_elements(reader, code, depth)
    return reader.position


def _skip_type(reader: Reader) -> None:
    if reader.read_int() == 0:  # the class isn't registered: its name follows
        reader.read_string()


def _skip_elements(reader: Reader, code: int, depth: int) -> None:
    if code in (OBJECTS, ENUMS):
        _skip_type(reader)
    elif code not in (STRINGS, UUIDS, DATES, TIMESTAMPS, TIMES, DECIMALS, COLLECTION, MAP):
        raise SourceError(
            f"A value must be of a type of Ignite's binary format. Received: type code {code}. Store it as "
            f"numbers, text or byte[]"
        )
    count = reader.read_count()
    if code in (COLLECTION, MAP):
        reader.read_byte()
    for _ in range(count * (2 if code == MAP else 1)):
        reader.position = end_of_value(reader.data, reader.position, depth + 1)
