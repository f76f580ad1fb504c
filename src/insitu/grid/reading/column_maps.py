"""Numbers of the texts and times in one column of a batch, which models of every backend take. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from insitu.base.errors import InputError
from insitu.base.fingerprint import fingerprints
from insitu.base.spec import Column
from insitu.base.wording import suggest_name
from insitu.grid.reading.structure import ArraySpec, Structure

UNKNOWN_TEXT = "[UNK]"
"""Stands in a vocabulary of texts for all others, as in keras.layers.StringLookup."""
UNKNOWN_NUMBER = -1
"""Likewise for whole numbers, as in keras.layers.IntegerLookup."""
LABEL = object()
"""The place of the label in a batch."""
_PUNCTUATION = b"!\"#$%&()*+,-./:;<=>?@[\\]^_`{|}~'"
_DATES = {"year": "year", "month": "month", "day": "day", "weekday": "day_of_week"}
_HOURS = {"hour": "hour", "minute": "minute", "second": "second"}
"""Parts of times, and Arrow's functions that return them."""


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """A function of a batch, as `map` takes it, that replaces the values of one column."""

    #: The column.
    column: str
    #: Where its values are: LABEL, a key of the features, or None if they are the only feature.
    place: Any
    #: Returns what takes their place, of the array of values: an array, or features by name.
    convert: Callable[[Any], Any]
    #: The call that has made it, such as "lookup('city')".
    call: str

    def __call__(self, *parts: Any) -> Structure:
        features, rest = parts[0], parts[1:]
        if self.place is LABEL:
            made: tuple[Any, ...] = (features, self.convert(rest[0]), *rest[1:])
        elif self.place is None:
            made = (self.convert(features), *rest)
        else:
            found = self.convert(features[self.place])
            if isinstance(found, dict):
                others = {key: value for key, value in features.items() if key != self.place}
                made = ({**others, **found}, *rest)
            else:
                made = ({**features, self.place: found}, *rest)
        return made if rest else made[0]


def find_place(spec: Structure, only_feature: str | None, label: str | None, column: str, call: str) -> Any:
    """Return the `ColumnMap.place` of a column in batches of `spec`. Raises InputError.

    `only_feature` is the name of the only feature, `label` that of the label; None: there is none.
    """
    features = spec[0] if isinstance(spec, tuple) else spec
    known: dict[str, Any] = dict.fromkeys(features) if isinstance(features, dict) else {}
    known = {key: key for key in known}
    if isinstance(features, ArraySpec) and only_feature is not None:
        known[only_feature] = None
    if label is not None and isinstance(spec, tuple) and len(spec) > 1 and isinstance(spec[1], ArraySpec):
        known[label] = LABEL
    if column not in known:
        there = ", ".join(sorted(known)) or "arrays without names, which a map has made"
        raise InputError(
            f"{call} takes a column of the batch. Received: {column!r}; there are {there}"
            f"{suggest_name(column, known)}"
        )
    return known[column]


# Texts and whole numbers


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ids of values: their places in a vocabulary, int64."""

    #: The column, for messages.
    column: str
    #: The values, most frequent first; that of a feature begins with what stands for all others.
    vocabulary: tuple[Any, ...]
    #: Whether a value that isn't in the vocabulary is refused, as in labels; else its id is 0.
    is_closed: bool
    #: The id of each value.
    ids: dict[Any, int]

    def __call__(self, values: Any) -> Any:
        flat = check_values(values, self.column, "lookup", of_texts=isinstance(self.vocabulary[-1], str))
        if not self.is_closed:
            found = [self.ids.get(value, 0) for value in flat]
        else:
            try:
                found = [self.ids[value] for value in flat]
            except KeyError as error:
                raise InputError(
                    f"A label is in its vocabulary. Received: {error.args[0]!r} in {self.column!r}, whose "
                    f"vocabulary has {len(self.vocabulary)} values. Give vocabulary= all of them, or leave "
                    f"rows out by filter before lookup"
                ) from None
        return np.array(found, np.int64).reshape(np.shape(values))


def make_lookup(column: str, vocabulary: Sequence[Any], *, is_label: bool, most: int | None = None) -> Lookup:
    """Return the look-up in a vocabulary. That of a feature may begin with what stands for all others, as the
    one of a Keras layer does. `most` is its length at most. Raises InputError."""
    given = [value.item() if isinstance(value, np.generic) else value for value in vocabulary]
    if isinstance(vocabulary, str) or not given or any(type(value) is not type(given[-1]) for value in given):
        raise InputError(
            f"A vocabulary is a list of texts, or of whole numbers. Received: {vocabulary!r:.200} for "
            f"{column!r}"
        )
    if type(given[0]) not in (str, int):
        raise InputError(
            f"A vocabulary is of texts, or of whole numbers. Received: {type(given[0]).__name__} for "
            f"{column!r}"
        )
    unknown: Any = UNKNOWN_TEXT if type(given[0]) is str else UNKNOWN_NUMBER
    values = given if is_label or given[0] == unknown else [unknown, *given]
    if len(set(values)) != len(values):
        twice = Counter(values).most_common(1)[0][0]
        raise InputError(
            f"A vocabulary has each value once, and {unknown!r} at its beginning or not at all. Received: "
            f"{twice!r} again for {column!r}"
        )
    ids = {value: number for number, value in enumerate(values[:most])}
    return Lookup(column, tuple(ids), is_label, ids)


@dataclass(frozen=True, slots=True)
class Hash:
    """Hashes of values: FarmHash's Fingerprint64 of their UTF-8 text, modulo `bins`, int64."""

    #: The column, for messages.
    column: str
    #: The number of ids.
    bins: int

    def __call__(self, values: Any) -> Any:
        flat = check_values(values, self.column, "hash", of_texts=is_of_texts(values))
        hashes = fingerprints([str(value).encode() for value in flat]) % np.uint64(self.bins)
        return hashes.astype(np.int64).reshape(np.shape(values))


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Ids of the words of texts: places in a vocabulary, int64[rows, length], 0 behind the last word."""

    #: The column, for messages.
    column: str
    #: The words, most frequent first, behind "" and what stands for all others.
    vocabulary: tuple[str, ...]
    #: The ids of a row. Further words are left out.
    length: int
    #: The id of each word.
    ids: dict[bytes, int]

    def __call__(self, values: Any) -> Any:
        flat = check_values(values, self.column, "tokenize", of_texts=True)
        found = np.zeros((len(flat), self.length), np.int64)
        for row, text in zip(found, flat, strict=True):
            words = split_words(text)[: self.length]
            row[: len(words)] = [self.ids.get(word, 1) for word in words]
        return found.reshape(*np.shape(values), self.length)


def split_words(text: str) -> list[bytes]:
    """Return the words of a text as keras.layers.TextVectorization finds them by default: in lower case,
    without punctuation, between white space, all of ASCII alone."""
    return text.encode().lower().translate(None, _PUNCTUATION).split()


def make_tokenize(column: str, vocabulary: Sequence[Any], length: int, most: int | None = None) -> Tokenize:
    """Return what makes ids of words. A vocabulary may begin as that of the Keras layer does. `most` is its
    length at most. Raises InputError."""
    given = [str(value) if isinstance(value, np.str_) else value for value in vocabulary]
    start = ["", UNKNOWN_TEXT]
    own = next(n for n in (2, 1, 0) if given[:n] == start[2 - n :])  # it may have both, or the second one
    values = [*start, *given[own:]]
    wrong = next((repr(value) for value in values if not isinstance(value, str)), "")
    if isinstance(vocabulary, str):
        wrong = repr(vocabulary)[:200]
    elif not wrong and len(set(values)) != len(values):
        wrong = f"{Counter(values).most_common(1)[0][0]!r} again"
    if wrong:
        raise InputError(f"A vocabulary is a list of words, each once. Received: {wrong} for {column!r}")
    values = values[:most]
    return Tokenize(column, tuple(values), length, {value.encode(): i for i, value in enumerate(values)})


def is_of_texts(values: Any) -> bool:
    """Return whether an array or its ArraySpec has texts, or other objects."""
    return values.dtype.kind in "OUS"


def check_values(values: Any, column: str, call: str, *, of_texts: bool) -> list[Any]:
    """Return an array of texts or of whole numbers as a flat list. Raises InputError for other values."""
    flat: list[Any] = values.reshape(-1).tolist()
    kinds = set(map(type, flat))
    if all(issubclass(kind, str) if of_texts else kind is int for kind in kinds):
        return flat
    wanted = "texts" if of_texts else "whole numbers"
    held = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise InputError(
        f"{call} takes columns of texts or of whole numbers, here of {wanted}. Received: values of type "
        f"{held} in {column!r}. Make {wanted} of them in a map before {call}"
    )


# Times


@dataclass(frozen=True, slots=True)
class TimeParts:
    """Parts of times as features, int32[rows] each: named `since_hour` for the hour in column `since`."""

    #: The column of times, which says what its numbers stand for.
    column: Column
    #: The parts, such as "hour".
    parts: tuple[str, ...]

    def __call__(self, values: Any) -> dict[str, Any]:
        import pyarrow as pa
        import pyarrow.compute as pc

        from insitu.grid.sources import logical_type  # readers of files come with it, which few scripts need

        kind = logical_type(self.column)
        numbers = pa.array(np.ascontiguousarray(values))
        try:
            times = (numbers.cast(pa.int32()) if kind == pa.date32() else numbers).cast(kind)
            found = {part: getattr(pc, (_DATES | _HOURS)[part])(times) for part in self.parts}
        except pa.ArrowInvalid as error:
            raise InputError(
                f"times needs the system's time zones. Received: {error} for {self.column.name!r}. Install "
                f"the system's package tzdata"
            ) from error
        return {f"{self.column.name}_{part}": np.asarray(of, np.int32) for part, of in found.items()}


def make_time_parts(column: Column, parts: Sequence[str]) -> TimeParts:
    """Return a function that takes times apart. Raises InputError for other columns and parts."""
    is_date = column.logical.startswith("date")
    if not is_date and not column.logical.startswith("timestamp"):
        held = column.logical or column.dtype
        raise InputError(
            f"times takes a column of times. Received: {column.name!r}, of type {held}. `insitu import "
            f"--dtype {column.name}=timestamp` makes times of texts"
        )
    known = _DATES if is_date else _DATES | _HOURS
    wrong = next((part for part in parts if part not in known), None)
    if wrong is not None or not parts:
        raise InputError(
            f"times takes parts of {column.logical}: {', '.join(known)}. Received: {wrong!r} for "
            f"{column.name!r}{suggest_name(wrong, known)}"
        )
    return TimeParts(column, tuple(parts))
