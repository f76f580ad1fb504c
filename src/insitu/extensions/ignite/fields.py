"""Pure: which columns the keys and values of a cache make, found in some rows; and all rows as columns.

Objects are read field by field, also those inside of others: the column `meta.width` is field `width` of the
object in field `meta`. The columns of an object are ordered by name, so that they don't depend on which
program has written an object first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from insitu.base.errors import InputError, SourceError
from insitu.base.spec import Column
from insitu.base.wording import format_count
from insitu.extensions.ignite.arrow_values import find_arrow_columns
from insitu.extensions.ignite.nested_values import (
    LISTS,
    decode_lists,
    find_elements,
    find_number_code,
    find_tensor,
    read_all,
)
from insitu.extensions.ignite.objects import (
    ABSENT,
    ObjectFields,
    follow_handles,
    gather_codes,
    gather_numbers,
    locate_objects,
)
from insitu.extensions.ignite.protocol import BinaryType, CacheConfiguration
from insitu.extensions.ignite.rows import Buffer, Positions, Rows
from insitu.extensions.ignite.values import (
    ARRAYS,
    JSON,
    NUMBERS,
    TENSOR,
    Leaf,
    MissingValues,
    are_sql_dates,
    decode_aligned,
    decode_leaf,
    read_lengths,
)
from insitu.extensions.ignite.wire import (
    BINARY_ENUM,
    BYTES,
    DECIMAL,
    ENUM,
    FIXED_BYTES,
    MAP,
    NULL,
    OBJECT,
    OPTIMIZED,
    STRING,
    TIMESTAMP,
    UUID,
    WRAPPED,
    name_of_code,
)
from insitu.grid.partitions import RAGGED, TEXT, is_ragged
from insitu.grid.sources import ENDING_OF_MASK, FILL_WORDS, ColumnOptions, SourceOptions, write_json

TypeLookup = Callable[[int], BinaryType]
_OBJECTS = (OBJECT, WRAPPED)
_DEEPEST = 32
"""How deep objects may be in each other."""
_MOST_PARTS = 4096
"""Fields that a row may have, those of all objects in it included."""
_SCALARS: Mapping[int, tuple[str, tuple[int, ...]]] = {
    **{code: (dtype, ()) for code, dtype in NUMBERS.items()},
    STRING: (TEXT, ()),
    ENUM: ("int32", ()),
    DECIMAL: ("float64", ()),
    TIMESTAMP: ("int64", ()),
    UUID: ("uint8", (16,)),
}


@dataclass(frozen=True, slots=True)
class Struct:
    """An object: the fields of it that make columns."""

    #: The path of field names, joined by dots; "key" or "value" for the whole.
    name: str
    #: The classes: its fields are those of all of them.
    kinds: tuple[BinaryType, ...]
    #: (number of the field, what it makes).
    fields: tuple[tuple[int, Struct | Leaf], ...]


@dataclass(frozen=True, slots=True)
class RowFields:
    """What the rows of a cache make."""

    #: Of the keys; None: they make no column.
    key: Struct | Leaf | None
    #: Of the values; None: they make no column.
    value: Struct | Leaf | None
    #: What can't be a column, and why.
    problems: tuple[str, ...] = ()

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All columns, those of the key first."""
        return tuple(leaf for part in (self.key, self.value) if part is not None for leaf in _leaves(part))

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the cache."""
        return tuple(column for leaf in self.leaves for column in leaf.columns)

    @property
    def classes(self) -> tuple[BinaryType, ...]:
        """The classes of all objects."""
        return tuple(kind for part in (self.key, self.value) if part is not None for kind in _classes(part))

    @property
    def mixed(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """(its name, the names of its classes) of each object that is of several ones."""
        parts = [part for part in (self.key, self.value) if part is not None]
        return tuple(
            (each.name, tuple(kind.name for kind in each.kinds))
            for part in parts
            for each in _structs(part)
            if len(each.kinds) > 1
        )


def _structs(part: Struct | Leaf) -> list[Struct]:
    if isinstance(part, Leaf):
        return []
    return [part, *(each for _, inner in part.fields for each in _structs(inner))]


def _leaves(part: Struct | Leaf) -> list[Leaf]:
    if isinstance(part, Leaf):
        return [part]
    return [leaf for _, inner in part.fields for leaf in _leaves(inner)]


def _classes(part: Struct | Leaf) -> list[BinaryType]:
    return [kind for each in _structs(part) for kind in each.kinds]


class _Finder:
    """Finds columns in sample rows. `problems` says what can't be one."""

    def __init__(
        self, buffer: Buffer, type_of: TypeLookup, options: ColumnOptions, reading: SourceOptions
    ) -> None:
        self._buffer, self._type_of, self._options = buffer, type_of, options
        self._ragged = reading.ragged_columns
        self.problems: list[str] = []
        self.seen: set[str] = set()

    def find(
        self,
        name: str,
        prefix: str,
        positions: Positions,
        declared: int,
        around: tuple[Positions, ...] = (),
    ) -> Any:
        """Return the Struct or Leaf of the values at `positions`; None where they make no column.

        `name` is the path of the values, `prefix` what the names of their fields begin with, `around` where
        the objects are that hold them. Raises SourceError for too many fields.
        """
        self.seen.add(name)
        if len(self.seen) > _MOST_PARTS:
            raise SourceError(
                f"A row has at most {_MOST_PARTS} fields, those of objects in objects included. Received: "
                f"more, the last one {name}. Leave objects out with --without, or store them in another cache"
            )
        if name in self._options.without:
            return None
        if name in self._options.dtypes:
            return self._fill(Leaf(name, NULL, Column(name, TEXT), form=JSON))
        positions = follow_handles(self._buffer, positions)
        codes = gather_codes(self._buffer, positions)
        codes[codes == BINARY_ENUM] = ENUM
        codes[np.isin(codes, _OBJECTS)] = OBJECT
        kinds = [int(code) for code in np.unique(codes) if code != NULL]
        if len(kinds) > 1:
            way_out = f"Store one type, keep them as text with --dtype {name}=json"
            return self._refuse(name, f"is {' and '.join(map(name_of_code, kinds))} in turn", way_out)
        code = kinds[0] if kinds else ENUM if declared == BINARY_ENUM else declared
        if code == OBJECT:
            return self._find_struct(name, prefix, positions, around)
        return self._find_leaf(name, code, positions[codes == code])

    def _refuse(self, name: str, fact: str, way_out: str) -> Any:
        """Note a problem. Returns None, for no column."""
        self.problems.append(f"{name} {fact}. {way_out}, or leave it out with --without {name}")

    def _find_struct(
        self, name: str, prefix: str, positions: Positions, around: tuple[Positions, ...]
    ) -> Any:
        objects = locate_objects(self._buffer, positions, name)
        objects = objects[objects != ABSENT]
        if not len(objects):
            return self._refuse(name, f"is null in all of the first {len(positions)} rows", "Store objects")
        if any(np.isin(objects, outer).any() for outer in around):
            return self._refuse(name, "is an object that holds it", "Store a key of that object")
        if len(around) > _DEEPEST:
            return self._refuse(name, f"is more than {_DEEPEST} objects deep", "Store it further up")
        headers = ObjectFields(self._buffer, objects, self._type_of)
        numbers = np.unique(headers.types)
        if not numbers.all():
            return self._refuse(name, "is of no registered class", "Store registered classes")
        kinds = tuple(sorted((self._type_of(int(number)) for number in numbers), key=lambda each: each.name))
        # A number is made of a field's name: equal names have equal ones, whatever the class.
        parts = {part.number: part for kind in reversed(kinds) for part in kind.fields}
        fields = []
        for part in sorted(parts.values(), key=lambda part: part.name):
            path = f"{prefix}{part.name}"
            found = self.find(path, f"{path}.", headers.locate(part.number), part.code, (*around, objects))
            if found is not None:
                fields.append((part.number, found))
        for kind in kinds:
            if not kind.fields:
                return self._refuse(name, f"is of {kind.name}, which has no fields by name", "Store fields")
        return Struct(name, kinds, tuple(fields)) if fields else None

    def _find_leaf(self, name: str, code: int, present: Positions) -> Leaf | None:
        if name in self._options.arrow:
            return self._find_arrow(name, code, present)
        if code in LISTS:
            return self._find_list(name, code, present)
        if code in ARRAYS:
            lengths = read_lengths(self._buffer, present, np.dtype(ARRAYS[code]).itemsize)
            column = self._find_array(name, code, ARRAYS[code], lengths)
        elif code in _SCALARS:
            column = Column(name, *_SCALARS[code])
        elif code == OPTIMIZED and len(present) and are_sql_dates(self._buffer, present):
            column = Column(name, "int64")
        else:
            column = None
            self._refuse(name, f"is {name_of_code(code)}", _way_out(name, code))
        if column is None:
            return None
        enum = self._find_enum(name, present) if code == ENUM else 0
        if enum is None:
            return None
        return self._fill(Leaf(name, code, column, enum))

    def _find_list(self, name: str, code: int, present: Positions) -> Leaf | None:
        """Return the leaf of lists: of numbers of one type, or of such lists, all of one shape."""
        firsts, counts = find_elements(self._buffer, present, [code] * len(present))
        element = find_number_code(self._buffer, firsts, counts)
        as_text = f"Keep it as text with --dtype {name}=json"
        if element is None:
            form = find_tensor(read_all(self._buffer, present, self._type_of, name))
            if form is None:
                fact = f"is {name_of_code(code)}, not of numbers of one type, nor of such lists of one shape"
                self._refuse(name, fact, as_text)
                return None
            return self._fill(Leaf(name, code, Column(name, *form), form=TENSOR))
        if element == NULL:
            self._refuse(name, f"is {name_of_code(code)}, null or empty in all of the first rows", as_text)
            return None
        column = self._find_array(name, code, NUMBERS[element], counts)
        return None if column is None else self._fill(Leaf(name, code, column, element=element))

    def _find_enum(self, name: str, present: Positions) -> int | None:
        """Return the number of the class of an enum; None, and note a problem, where there isn't one."""
        numbers = np.unique(gather_numbers(self._buffer, present + 1, "i4"))
        if not len(numbers):
            self._refuse(name, "is an enum, null in all of the first rows", "Store one in one of these")
        elif not numbers.all():
            self._refuse(name, "is an enum whose class isn't registered in the cluster", "Store its number")
        elif len(numbers) > 1:
            names = " and of ".join(self._type_of(int(number)).name for number in numbers)
            self._refuse(name, f"is an enum of {names}, whose numbers mean others", "Store one class")
        else:
            return int(numbers[0])
        return None

    def _find_arrow(self, name: str, code: int, present: Positions) -> Leaf | None:
        if code != BYTES or not len(present):
            self._refuse(name, f"is {name_of_code(code)}, where --arrow needs byte[]", "Store byte[]")
            return None
        leaf = Leaf(name, code, Column(name, "uint8" + RAGGED))
        values = decode_leaf(self._buffer, present, leaf)
        return replace(leaf, arrow=find_arrow_columns(values, name, self._ragged))

    def _find_array(self, name: str, code: int, element: str, lengths: Positions) -> Column | None:
        """Return the column of arrays of dtype `element` with so many elements each."""
        if name in self._ragged:
            return Column(name, element + RAGGED)
        if name in self._options.tensors:
            dtype, shape = self._options.tensors[name]
            if code != BYTES and dtype != element:
                way_out = f"Give --tensor {name}={element}[{','.join(map(str, shape))}]"
                self._refuse(name, f"is {name_of_code(code)}, where --tensor says {dtype}", way_out)
                return None
            return Column(name, dtype, shape)
        lengths = np.unique(lengths)
        if len(lengths) != 1 or not lengths[0]:
            fact = f"is {name_of_code(code)}, null in all of the first rows"
            if len(lengths):
                fact = f"is {name_of_code(code)} of {lengths.min()} to {lengths.max()} elements"
            way_out = f"Import it as it is with --ragged {name}, or pad it to one length"
            self._refuse(name, fact, way_out)
            return None
        return Column(name, element, (int(lengths[0]),))

    def _fill(self, leaf: Leaf) -> Leaf:
        """Return a leaf with what takes the place of null."""
        text = self._options.fills.get(leaf.name)
        if text != "null":
            return replace(leaf, fill=self._find_fill(leaf, text))
        zero = self._find_fill(leaf, "" if leaf.column.dtype == TEXT or is_ragged(leaf.column) else "0")
        return replace(leaf, fill=zero, mask=Column(f"{leaf.name}{ENDING_OF_MASK}", "bool"))

    def _find_fill(self, leaf: Leaf, text: str | None) -> Any:
        column = leaf.column
        if text is None:
            kind = "" if column.dtype == TEXT or is_ragged(column) else np.dtype(column.dtype).kind
            return float("nan") if kind == "f" and not column.shape else None
        if text in FILL_WORDS:
            way_out = f"Give a value, or --fill {leaf.name}=null for a column that says which were missing"
            return self._refuse(leaf.name, f"is read once, and --fill says {text!r} of all values", way_out)
        if column.dtype == TEXT:
            return text
        if is_ragged(column):
            if text:
                self._refuse(leaf.name, f"is ragged, and --fill says {text!r}", "Fill it with an empty list")
            return b""
        try:
            return _parse_value(text, np.dtype(column.dtype))
        except (ValueError, LookupError, OverflowError):
            return self._refuse(
                leaf.name, f"is of {column.dtype}, and --fill says {text!r}", "Give such a value"
            )


def _parse_value(text: str, dtype: np.dtype[Any]) -> Any:
    """Return the value of `dtype` that a text says. Raises ValueError, LookupError or OverflowError."""
    if dtype.kind == "b":
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if dtype.kind == "f":
        return float(text)
    value, limits = int(text), np.iinfo(dtype)
    if not limits.min <= value <= limits.max:
        raise OverflowError(text)
    return value


def _way_out(name: str, code: int) -> str:
    if code == OPTIMIZED:
        return "Store java.util.Date or java.sql.Timestamp for a time of java.time, else numbers or text"
    if code == OBJECT:
        return "Store an object in one of the first rows"
    if code == MAP:
        return f"Keep it as text with --dtype {name}=json"
    return "Store its fields, numbers or text"


def find_fields(
    rows: Rows,
    configuration: CacheConfiguration,
    type_of: TypeLookup,
    options: ColumnOptions,
    reading: SourceOptions,
    *,
    partly: bool = False,
) -> RowFields:
    """Return what the rows of a cache make, by some of them.

    Raises SourceError, which names all problems; with `partly` the result has them.
    """
    finder = _Finder(rows.data, type_of, options, reading)
    names = {"key": configuration.key_column or "key", "value": configuration.value_column or "value"}
    is_object = bool(np.isin(gather_codes(rows.data, rows.values), _OBJECTS).any())
    value = finder.find("value" if is_object else names["value"], "", rows.values, NULL)
    if any(leaf.name == names["key"] for leaf in (_leaves(value) if value is not None else [])):
        names["key"] = f"_{names['key']}"
    prefix = "" if configuration.key_fields else f"{names['key']}."
    key = finder.find(names["key"], prefix, rows.keys, NULL)
    if finder.problems and not partly:
        count = len(finder.problems)
        raise SourceError(
            f"{format_count(count, 'part')} of the rows of cache {configuration.name} can't be a column: "
            + "; ".join(finder.problems)
        )
    found = RowFields(key, value, tuple(finder.problems))
    if not partly:
        _check(found, finder.seen, options, reading, configuration.name)
    return found


def _check(
    found: RowFields, seen: set[str], options: ColumnOptions, reading: SourceOptions, cache: str
) -> None:
    """Raise InputError or SourceError for options that name nothing, and for two columns of one name."""
    names = [column.name for column in found.columns]
    arrow = {column.name for leaf in found.leaves for column in leaf.arrow}
    if not names:
        raise SourceError(f"Cache {cache} must have a column that isn't left out. Received: none")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SourceError(
            f"Each column must have a name of its own. Received: {', '.join(twice)} twice in cache {cache}. "
            f"Leave one out with --without"
        )
    named = {
        "--tensor": set(options.tensors)
        - {leaf.name for leaf in found.leaves if leaf.code in ARRAYS or leaf.element},
        "--dtype": set(options.dtypes) - {leaf.name for leaf in found.leaves if leaf.form == JSON},
        "--fill": set(options.fills) - {leaf.name for leaf in found.leaves if not leaf.arrow},
        "--arrow": options.arrow - {leaf.name for leaf in found.leaves if leaf.arrow},
        "--without": options.without - seen,
        "--ragged": reading.ragged_columns
        - {column.name for column in found.columns if is_ragged(column)}
        - arrow,
    }
    for option, unknown in named.items():
        if unknown:
            raise InputError(
                f"{option} must name a column that it can be said of. Received: {min(unknown)}, where cache "
                f"{cache} has {', '.join(names)}"
            )


def decode_rows(fields: RowFields, rows: Rows, type_of: TypeLookup) -> dict[str, Any]:
    """Return the values of all leaves by name, as `decode_leaf` does. Raises SourceError.

    Raises UnknownSchema for objects of a schema that `type_of` doesn't know yet.
    """
    found: dict[str, Any] = {}
    try:
        for part, positions in ((fields.key, rows.keys), (fields.value, rows.values)):
            if part is not None:
                _decode(part, rows.data, positions, type_of, found)
    except MissingValues as missing:
        raise _null_error(missing, fields, rows, type_of) from None
    return found


def _decode(
    part: Struct | Leaf, buffer: Buffer, positions: Positions, type_of: TypeLookup, found: dict[str, Any]
) -> None:
    if isinstance(part, Leaf):
        found[part.name] = _decode_leaf(part, buffer, positions, type_of)
        if part.mask is not None:
            is_missing = gather_codes(buffer, positions) == NULL
            if part.column.dtype in ("float32", "float64") and not part.column.shape:
                is_missing |= np.isnan(found[part.name])
                found[part.name][is_missing] = 0
            found[part.mask.name] = is_missing
        return
    objects = locate_objects(buffer, positions, part.name)
    present = objects != ABSENT
    headers = ObjectFields(buffer, objects[present], type_of)
    other = headers.types[~np.isin(headers.types, [kind.number for kind in part.kinds])]
    if len(other):
        known = " and ".join(kind.name for kind in part.kinds)
        raise SourceError(
            f"All {part.name} must be objects of the classes that the first rows are of: {known}. Received: "
            f"{type_of(int(other[0])).name}. Keep others in a cache of their own, or leave them out with "
            f"--without {part.name}"
        )
    whole = bool(present.all())
    short = [
        number
        for number, inner in part.fields
        if isinstance(inner, Leaf) and inner.code in FIXED_BYTES and not inner.form and inner.mask is None
    ]
    aligned = headers.align(short) if whole else None
    for number, inner in part.fields:
        if aligned is not None and number in aligned.distances and isinstance(inner, Leaf):
            found[inner.name] = decode_aligned(aligned, number, inner)
        elif whole:
            _decode(inner, buffer, headers.locate(number), type_of, found)
        else:
            spread = np.full(len(objects), ABSENT, np.int64)
            spread[present] = headers.locate(number)
            _decode(inner, buffer, spread, type_of, found)


def _decode_leaf(leaf: Leaf, buffer: Buffer, positions: Positions, type_of: TypeLookup) -> Any:
    if leaf.form == JSON:
        return write_json(read_all(buffer, positions, type_of, leaf.name), leaf.fill)
    if leaf.code in LISTS:
        return decode_lists(buffer, positions, leaf, type_of)
    return decode_leaf(buffer, positions, leaf)


def _null_error(missing: MissingValues, fields: RowFields, rows: Rows, type_of: TypeLookup) -> SourceError:
    first, where = int(missing.rows[0]), ""
    if isinstance(fields.key, Leaf) and fields.key.name != missing.name:
        keys: dict[str, Any] = {}
        _decode(fields.key, rows.data, rows.keys[first : first + 1], type_of, keys)
        value = keys[fields.key.name][0]
        where = (
            f", first where {fields.key.name} is {value.as_py() if isinstance(value, pa.Scalar) else value}"
        )
    return SourceError(
        f"Column {missing.name} must have a value in each row. Received: null in {len(missing.rows)} of "
        f"{len(rows.keys)} rows{where}. Say what takes its place with --fill {missing.name}=VALUE, with "
        f"--fill {missing.name}=null also which ones it was, or leave the column out with --without "
        f"{missing.name}"
    )
