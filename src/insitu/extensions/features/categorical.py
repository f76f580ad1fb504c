"""Categorical columns: each makes ids of one or several features, by NumPy, before the graph.

Ids equal those of TensorFlow's columns on the same rows.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from insitu.base.errors import InputError
from insitu.base.fingerprint import CROSS_KEY, fingerprints, join_fingerprints
from insitu.extensions.features.checks import check_count, check_dtype, check_unknown, refuse_duplicates
from insitu.extensions.features.numeric import NumericColumn
from insitu.extensions.features.raw_values import Entries, Features, get_feature, read_entries, read_numbers
from insitu.train.replica import record_vocabulary_file


@dataclass(frozen=True, slots=True)
class Ids:
    """The ids of a categorical column for a batch."""

    #: int64[rows, width]; anything if nothing is present.
    values: npt.NDArray[np.int64]
    #: bool[rows, width]. An id that is present may be -1: a value that the column doesn't know.
    present: npt.NDArray[np.bool_]
    #: The weight of each id, float32[rows, width]; None: 1 each.
    weights: npt.NDArray[np.float32] | None = None


class CategoricalColumn(abc.ABC):
    """A column whose values are ids in [0, num_buckets)."""

    kind: ClassVar[str]
    """How a saved model names the class."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the column, unique among those of a layer."""

    @property
    @abc.abstractmethod
    def num_buckets(self) -> int:
        """The number of ids."""

    @property
    @abc.abstractmethod
    def raw_keys(self) -> tuple[str, ...]:
        """The features of the data that the column reads."""

    @property
    def looked_up_keys(self) -> tuple[str, ...]:
        """Those that it doesn't read as numbers."""
        return self.raw_keys

    @abc.abstractmethod
    def look_up(self, features: Features) -> Ids:
        """Return the ids of a batch. Raises InputError."""

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return what makes an equal column, as JSON has it."""


class KeyedColumn(CategoricalColumn):
    """A categorical column of one feature."""

    key: str
    dtype: str
    """"string" or "int64": what the feature holds."""

    @property
    def name(self) -> str:
        return self.key

    @property
    def raw_keys(self) -> tuple[str, ...]:
        return (self.key,)

    def look_up(self, features: Features) -> Ids:
        entries = read_entries(get_feature(features, self.key, self.name), self.key).without_missing()
        self._check_dtype(entries)
        if entries.texts is None:
            values, of_entry = np.unique(entries.values, return_inverse=True)
            texts = None
        else:
            values, of_entry, texts = np.arange(len(entries.texts)), entries.values, entries.texts
        found = self.ids_of(values.astype(np.int64), texts) if len(values) else np.empty(0, np.int64)
        ids = found[of_entry.reshape(entries.values.shape)] if len(found) else entries.values
        self.check_ids(ids, entries)
        return Ids(ids, entries.present)

    def _check_dtype(self, entries: Entries) -> None:
        # Rows without a value have no type.
        if entries.present.any() and (entries.texts is not None) != (self.dtype == "string"):
            held = "whole numbers" if entries.texts is None else "text"
            other = "int64" if entries.texts is None else "string"
            raise InputError(
                f"A feature must be of its column's dtype. Received: {held} in {self.key!r}, where column "
                f"{self.name!r} has dtype {self.dtype!r}. Pass dtype={other!r}, or convert the feature"
            )

    @abc.abstractmethod
    def ids_of(self, values: npt.NDArray[np.int64], texts: Any) -> npt.NDArray[np.int64]:
        """Return the id of each of the distinct `values`, or, where there are some, `texts`."""

    def check_ids(self, ids: npt.NDArray[np.int64], entries: Entries) -> None:
        """Raise InputError if the ids of entries aren't allowed."""


def _hash_values(values: npt.NDArray[np.int64], texts: Any, buckets: int) -> npt.NDArray[np.int64]:
    """Return Fingerprint64 modulo `buckets`. Of numbers, TensorFlow hashes their decimal digits."""
    of_texts = [str(value).encode() for value in values.tolist()] if texts is None else texts
    return (fingerprints(of_texts) % np.uint64(buckets)).astype(np.int64)


@dataclass(frozen=True)
class IdentityColumn(KeyedColumn):
    """Takes whole numbers as ids."""

    kind: ClassVar[str] = "identity"
    #: The feature.
    key: str
    #: The number of ids.
    buckets: int
    #: The id of numbers outside; None: they are an error.
    default_value: int | None = None
    #: What the feature holds.
    dtype: str = "int64"

    @property
    def num_buckets(self) -> int:
        return self.buckets

    def ids_of(self, values: npt.NDArray[np.int64], texts: Any) -> npt.NDArray[np.int64]:
        if self.default_value is None:
            return values
        return np.where((values < 0) | (values >= self.buckets), self.default_value, values)

    def check_ids(self, ids: npt.NDArray[np.int64], entries: Entries) -> None:
        wrong = entries.present & ((ids < 0) | (ids >= self.buckets))
        if wrong.any():
            raise InputError(
                f"Values of an identity column are in [0, {self.buckets}). Received: "
                f"{entries.named(wrong)}, in "
                f"feature {self.key!r}. Pass default_value for values outside, or more num_buckets"
            )

    def get_config(self) -> dict[str, Any]:
        return {"key": self.key, "num_buckets": self.buckets, "default_value": self.default_value}


@dataclass(frozen=True)
class HashedColumn(KeyedColumn):
    """Takes the fingerprint of each value, modulo the number of buckets."""

    kind: ClassVar[str] = "hash_bucket"
    #: The feature.
    key: str
    #: The number of ids.
    buckets: int
    #: What the feature holds: "string" or "int64".
    dtype: str

    @property
    def num_buckets(self) -> int:
        return self.buckets

    def ids_of(self, values: npt.NDArray[np.int64], texts: Any) -> npt.NDArray[np.int64]:
        return _hash_values(values, texts, self.buckets)

    def get_config(self) -> dict[str, Any]:
        return {"key": self.key, "hash_bucket_size": self.buckets, "dtype": self.dtype}


@dataclass(frozen=True)
class VocabularyColumn(KeyedColumn):
    """Takes the place of each value in a list."""

    kind: ClassVar[str] = "vocabulary"
    #: The feature.
    key: str
    #: The values, in the order of their ids.
    vocabulary: tuple[str, ...] | tuple[int, ...] = field(repr=False)
    #: What the feature holds: "string" or "int64".
    dtype: str
    #: The id of other values; -1: they have none.
    default_value: int
    #: Further ids for other values, by their hash.
    oov_buckets: int
    #: The id of each value, texts as bytes; made with the column.
    _places: dict[Any, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        entries = [v.encode() if isinstance(v, str) else v for v in self.vocabulary]
        object.__setattr__(self, "_places", {value: place for place, value in enumerate(entries)})

    @property
    def num_buckets(self) -> int:
        return len(self.vocabulary) + self.oov_buckets

    def ids_of(self, values: npt.NDArray[np.int64], texts: Any) -> npt.NDArray[np.int64]:
        keys = values.tolist() if texts is None else texts
        ids = np.array([self._places.get(key, self.default_value) for key in keys], np.int64)
        if self.oov_buckets:
            unknown = np.array([key not in self._places for key in keys], bool)
            hashed = len(self.vocabulary) + _hash_values(values, texts, self.oov_buckets)
            ids = np.where(unknown, hashed, ids)
        return ids

    def get_config(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "vocabulary": list(self.vocabulary),
            "dtype": self.dtype,
            "default_value": self.default_value,
            "num_oov_buckets": self.oov_buckets,
        }


@dataclass(frozen=True)
class BucketizedColumn(CategoricalColumn):
    """Takes the range between boundaries that each number is in. Ids of a row's further numbers follow
    those of the ones before. A dense layer takes it as it is, too."""

    kind: ClassVar[str] = "bucketized"
    #: The numbers.
    source: NumericColumn
    #: Where ranges begin, rising.
    boundaries: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"{self.source.name}_bucketized"

    @property
    def num_buckets(self) -> int:
        return (len(self.boundaries) + 1) * self.source.width

    @property
    def width(self) -> int:
        return self.num_buckets

    @property
    def raw_keys(self) -> tuple[str, ...]:
        return self.source.raw_keys

    @property
    def looked_up_keys(self) -> tuple[str, ...]:
        return ()

    def look_up(self, features: Features) -> Ids:
        numbers = self.source.read(features)
        buckets = np.searchsorted(np.array(self.boundaries, np.float32), numbers, side="right")
        ids = buckets + np.arange(self.source.width) * (len(self.boundaries) + 1)
        return Ids(ids.astype(np.int64), np.ones(ids.shape, bool))

    def get_config(self) -> dict[str, Any]:
        return {"source_column": self.source, "boundaries": list(self.boundaries)}


@dataclass(frozen=True)
class CrossedColumn(CategoricalColumn):
    """Takes the hash of each combination of the values of several features or columns."""

    kind: ClassVar[str] = "crossed"
    #: Names of features, and columns, whose values are combined.
    keys: tuple[str | CategoricalColumn, ...]
    #: The number of ids.
    buckets: int
    #: What the hash begins with; None: CROSS_KEY.
    hash_key: int | None

    @property
    def leaves(self) -> tuple[str | CategoricalColumn, ...]:
        """The keys, with those of crossed columns among them in their place."""
        found: list[str | CategoricalColumn] = []
        for key in self.keys:
            found.extend(key.leaves if isinstance(key, CrossedColumn) else [key])
        return tuple(found)

    @property
    def name(self) -> str:
        return "_X_".join(sorted(key if isinstance(key, str) else key.name for key in self.leaves))

    @property
    def num_buckets(self) -> int:
        return self.buckets

    @property
    def raw_keys(self) -> tuple[str, ...]:
        return tuple(
            key for leaf in self.leaves for key in ([leaf] if isinstance(leaf, str) else leaf.raw_keys)
        )

    @property
    def looked_up_keys(self) -> tuple[str, ...]:
        return tuple(
            key for leaf in self.leaves for key in ([leaf] if isinstance(leaf, str) else leaf.looked_up_keys)
        )

    def look_up(self, features: Features) -> Ids:
        # TensorFlow hashes what may be missing first, and then what never is: raw features of one length.
        found = [self._hash_leaf(leaf, features) for leaf in self.leaves]
        found.sort(key=lambda part: not part[2])
        rows = len(found[0][0])
        if any(len(part) != rows for part, _, _ in found):
            raise InputError(
                f"All features of a batch have the same number of rows. Received: "
                f"{sorted({len(part) for part, _, _ in found})} rows of {', '.join(self.raw_keys)}, for "
                f"column {self.name!r}"
            )
        hashes = np.full((rows, 1), self.hash_key or CROSS_KEY, np.uint64)
        present = np.ones((rows, 1), bool)
        for part, there, _ in found:
            hashes = join_fingerprints(*np.broadcast_arrays(hashes[:, :, None], part[:, None, :]))
            hashes = hashes.reshape(rows, -1)
            present = (present[:, :, None] & there[:, None, :]).reshape(rows, -1)
        return Ids((hashes % np.uint64(self.buckets)).astype(np.int64), present)

    def _hash_leaf(
        self, leaf: str | CategoricalColumn, features: Features
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_], bool]:
        """Return (what is hashed, where it is present, whether values may be missing)."""
        if not isinstance(leaf, str):
            ids = leaf.look_up(features)
            return ids.values.astype(np.uint64), ids.present, True
        entries = read_entries(get_feature(features, leaf, self.name), leaf)
        if entries.texts is None:
            return entries.values.astype(np.uint64), entries.present, entries.is_ragged
        hashes = fingerprints(entries.texts) if entries.texts else np.zeros(1, np.uint64)
        return hashes[entries.values], entries.present, entries.is_ragged

    def get_config(self) -> dict[str, Any]:
        return {"keys": list(self.keys), "hash_bucket_size": self.buckets, "hash_key": self.hash_key}


@dataclass(frozen=True)
class WeightedColumn(CategoricalColumn):
    """Gives each id of another column the weight that a feature says."""

    kind: ClassVar[str] = "weighted"
    #: The column that has the ids.
    column: CategoricalColumn
    #: The feature that has the weights.
    weight_key: str

    @property
    def name(self) -> str:
        return f"{self.column.name}_weighted_by_{self.weight_key}"

    @property
    def num_buckets(self) -> int:
        return self.column.num_buckets

    @property
    def raw_keys(self) -> tuple[str, ...]:
        return (*self.column.raw_keys, self.weight_key)

    @property
    def looked_up_keys(self) -> tuple[str, ...]:
        return self.column.looked_up_keys

    def look_up(self, features: Features) -> Ids:
        ids = self.column.look_up(features)
        raw = get_feature(features, self.weight_key, self.name)
        weights = _read_weights(raw, self.weight_key, ids)
        return Ids(ids.values, ids.present, np.where(ids.present, weights, 0).astype(np.float32))

    def get_config(self) -> dict[str, Any]:
        return {"categorical_column": self.column, "weight_feature_key": self.weight_key}


def _read_weights(raw: Any, key: str, ids: Ids) -> npt.NDArray[Any]:
    """Return the weights in the places of the ids. Raises InputError."""
    shape = ids.values.shape
    if isinstance(raw, list) and {np.size(row) for row in raw} == {shape[1]}:
        raw = np.asarray(raw).reshape(-1, shape[1])  # ids that are missing have a weight as well
    if isinstance(raw, list) or np.asarray(raw).dtype.hasobject:
        rows = [np.asarray(row, np.float32).reshape(-1) for row in raw]
        counts = ids.present.sum(axis=1)
        wrong = next((r for r, row in enumerate(rows) if r >= shape[0] or len(row) != counts[r]), None)
        if wrong is None and len(rows) == shape[0]:
            table = np.zeros(shape, np.float32)
            table[ids.present] = np.concatenate(rows) if rows else 0
            return _check_weights(table, key)
        raise InputError(
            f"Each value has one weight. Received: {len(rows[wrong]) if wrong is not None else len(rows)} "
            f"weights "
            f"in {key!r} for row {wrong} of the batch, with other values. Give both the same lengths"
        )
    numbers = np.asarray(raw)
    if numbers.ndim == 0 or len(numbers) != shape[0] or numbers.size != ids.values.size:
        raise InputError(
            f"Each value has one weight. Received: weights {key!r} of shape {numbers.shape} for values of "
            f"shape "
            f"{shape}. Give both the same shape"
        )
    return _check_weights(read_numbers(numbers.reshape(shape), key, shape[1:]).astype(np.float32), key)


def _check_weights(weights: npt.NDArray[Any], key: str) -> npt.NDArray[Any]:
    wrong = ~np.isfinite(weights)
    if wrong.any():
        row = int(np.argwhere(wrong)[0][0])
        received = "NaN" if np.isnan(weights[wrong][0]) else str(weights[wrong][0])
        raise InputError(
            f"A weight is a finite number. Received: {received} in row {row} of the batch, in feature "
            f"{key!r}. Fill such weights, such as with 0, which leaves the value out"
        )
    return weights


def read_vocabulary_column(
    key: str, file: str | Path, size: int | None, dtype: Any, default_value: int | None, oov_buckets: int
) -> VocabularyColumn:
    """Return a column whose ids are places in a file of one value a line. Raises InputError."""
    kind = check_dtype(dtype, "categorical_column_with_vocabulary_file")
    lines = _read_vocabulary(Path(file), size)
    record_vocabulary_file(str(file), lines)
    values: tuple[Any, ...] = lines
    if kind == "int64":
        try:
            values = tuple(int(line) for line in lines)
        except ValueError as error:
            raise InputError(
                f"A vocabulary of dtype 'int64' has a whole number on each line. Received: {file}: {error}. "
                "Pass dtype='string'"
            ) from error
    refuse_duplicates(values, f"{file}")
    default, buckets = check_unknown(default_value, oov_buckets, len(values))
    return VocabularyColumn(key, values, kind, default, buckets)


def _read_vocabulary(path: Path, size: int | None) -> tuple[str, ...]:
    try:
        lines = path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"vocabulary_file is a text file in UTF-8 with one value a line. Received: {path}: {error}"
        ) from error
    lines = [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
    if size is not None and check_count(size, "vocabulary_size") > len(lines):
        raise InputError(
            f"vocabulary_size is at most the number of lines. Received: {size}, where {path} has "
            f"{len(lines)}. "
            f"Leave it out to take all"
        )
    if not lines:
        raise InputError(f"A vocabulary has a value at least. Received: {path}, which is empty")
    return tuple(lines[:size])
