"""Features as they come with the data, brought into one form: tables of whole numbers or texts, and numbers.

A feature is an array [rows] or [rows, n], of numbers or texts, or an array or list of rows of different
lengths. A list of lists is the latter also where all have one length: what a row becomes must not depend on
the rows beside it. Tensors are taken as arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.errors import InputError

Features = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entries:
    """The values of one feature of a batch: a table with as many columns as the longest row has values."""

    #: The values: whole numbers, or places in `texts`; int64[rows, width]. 0 if nothing is present.
    values: npt.NDArray[np.int64]
    #: Distinct texts; None where the values are whole numbers.
    texts: Sequence[bytes] | None
    #: Where the table has values: bool[rows, width].
    present: npt.NDArray[np.bool_]
    #: Whether rows may have different lengths. TensorFlow calls that a sparse feature.
    is_ragged: bool
    #: Whether the rows came as lists, all of one length: they may have been meant as an array.
    may_be_array: bool = False

    def without_missing(self) -> Entries:
        """Return the entries without those that stand for a missing one: -1 and the empty text.

        Rows of different lengths just leave out what is missing, so nothing in them stands for it. Raises
        InputError where it isn't known which of both the rows are.
        """
        if self.is_ragged and not self.may_be_array:
            return self
        if self.texts is None:
            absent = self.values == -1
        else:
            absent = _take(np.array([not text for text in self.texts], bool), self.values)
        if not self.is_ragged:
            return Entries(self.values, self.texts, self.present & ~absent, False)
        if absent.any():
            raise InputError(
                "-1 and the empty text stand for a missing value in an array, and for nothing in rows of "
                f"different lengths. Received: {self.named(absent)}, in lists that have one length by now. "
                "Pass a NumPy array where it stands for a missing value, and leave it out of the lists else"
            )
        return self

    def named(self, mask: npt.NDArray[np.bool_]) -> str:
        """Return the first entry that `mask` has, with its place, for a message."""
        row, place = np.argwhere(mask)[0].tolist()
        value = int(self.values[row, place])
        shown = repr(value) if self.texts is None else repr(self.texts[value].decode(errors="replace"))
        return f"{shown} in row {row} of the batch"


def _take(of_texts: npt.NDArray[Any], values: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return for each entry what its text has in `of_texts`. There may be no text at all."""
    return of_texts[values] if len(of_texts) else np.zeros(values.shape, of_texts.dtype)


def get_feature(features: Features, key: str, column: str) -> Any:
    """Return the feature that a column reads, on the host. Raises InputError if the data lacks it."""
    if not isinstance(features, Mapping):
        raise InputError(
            f"Feature columns read a dict of features by name. Received: {type(features).__name__} for "
            f"column {column!r}. Pass such as {{{key!r}: values}}: `insitu.dataset` makes one of two "
            f"features or more, and `.map(lambda x, y: ({{{key!r}: x}}, y))` of a single one"
        )
    if key not in features:
        raise InputError(
            f"The data must have the features of all columns. Received: features "
            f"{sorted(map(str, features))}, "
            f"where column {column!r} reads {key!r}. Add the feature, or leave the column out"
        )
    return to_host(features[key], key)


def to_host(value: Any, key: str) -> Any:
    """Return an array, or a list of rows of different lengths, of anything that holds values now.

    Raises InputError for a tensor within a graph, whose values aren't known yet.
    """
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "to_list"):  # rows of different lengths in TensorFlow
        rows = np.empty(len(value.to_list()), object)
        rows[:] = [np.asarray(row) for row in value.to_list()]
        return rows
    if isinstance(value, (list, tuple)):
        return list(value) if any(_is_row(row) for row in value) else np.asarray(value)
    try:
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except Exception as error:  # each backend has its own for a value that isn't there yet
        raise InputError(
            f"Features are looked up before the graph, where their values are known. Received: {key!r} as "
            f"{type(value).__name__} within a graph. Transform the batches first, such as by "
            f"dataset.map(insitu.feature_column.FeatureTransform(columns))"
        ) from error


def _is_row(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def read_entries(raw: Any, key: str) -> Entries:
    """Return the values of a categorical feature. Raises InputError for what is neither text nor whole
    numbers."""
    if _has_rows_of_lists(raw):
        return _read_ragged(raw, key)
    array = np.asarray(raw)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise InputError(
            f"A categorical feature has one value for each row, or rows of values. Received: {key!r} of "
            f"shape "
            f"{array.shape}"
        )
    values, texts = _encode(array.reshape(-1), key)
    return Entries(values.reshape(array.shape), texts, np.ones(array.shape, bool), False)


def _has_rows_of_lists(raw: Any) -> bool:
    """Return whether rows may have different lengths. A list is left where they do."""
    if not isinstance(raw, np.ndarray):
        return True
    return (
        raw.dtype == object
        and raw.ndim == 1
        and len(raw) > 0
        and isinstance(raw[0], (list, tuple, np.ndarray))
    )


def _read_ragged(raw: Any, key: str) -> Entries:
    rows = [np.atleast_1d(np.asarray(row)) for row in raw]
    deep = next((row for row in rows if row.ndim > 1), None)
    if deep is not None:
        raise InputError(
            f"A categorical feature has one value for each row, or rows of values. Received: {key!r} with a "
            f"row of shape {deep.shape}"
        )
    lengths = np.array([len(row) for row in rows], np.int64)
    present = np.arange(max(1, int(lengths.max()))) < lengths[:, None]
    filled = [row for row in rows if len(row)]
    flat = np.concatenate(filled) if filled else np.empty(0, np.int64)
    values = np.zeros(present.shape, np.int64)
    values[present], texts = _encode(flat, key)
    return Entries(values, texts, present, True, isinstance(raw, list) and bool(present.all()))


def _encode(flat: npt.NDArray[Any], key: str) -> tuple[npt.NDArray[np.int64], Sequence[bytes] | None]:
    """Return (whole numbers, None), or (places in the distinct texts, those texts)."""
    if not flat.size:
        return np.empty(0, np.int64), None
    if flat.dtype.kind in "iub":
        if flat.dtype.kind == "u" and flat.size and int(flat.max()) > np.iinfo(np.int64).max:
            raise InputError(f"Whole numbers must fit into int64. Received: {int(flat.max())} in {key!r}")
        return flat.astype(np.int64), None
    if flat.dtype.kind in "US":
        flat = flat.astype(object)
    if flat.dtype != object:
        raise InputError(
            f"A categorical column takes text or whole numbers. Received: {key!r} of {flat.dtype}. Make "
            f"whole "
            f"numbers of it, or ranges by bucketized_column"
        )
    wrong = next((value for value in flat if not isinstance(value, (str, bytes)) and value is not None), None)
    if wrong is not None:
        raise InputError(
            f"A feature of text has a text in each place. Received: {wrong!r} of {type(wrong).__name__} in "
            f"{key!r}. Make one type of all its values"
        )
    texts = [t.encode() if isinstance(t, str) else t or b"" for t in flat.tolist()]
    encoded = pa.array(texts, pa.large_binary()).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _join_rows(rows: Any) -> npt.NDArray[Any] | None:
    """Return rows as an array; None where they have different lengths."""
    try:
        return np.asarray(list(rows))
    except ValueError:
        return None


def read_numbers(raw: Any, key: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return a numeric feature as [rows, values of a row]. Raises InputError."""
    array = _join_rows(raw) if _has_rows_of_lists(raw) else np.asarray(raw)
    if array is None or array.dtype.kind not in "iubf":
        # A dtype beyond NumPy's own, such as bfloat16, is of numbers where it can be cast.
        kind = "rows of different lengths" if array is None else str(array.dtype)
        if array is None or array.dtype.kind in "OUSMmc":
            raise InputError(
                f"numeric_column takes numbers. Received: {key!r} of {kind}. Convert it, or read it by a "
                f"categorical column"
            )
    width = int(np.prod(shape))
    if array.ndim == 0 or array.size != len(array) * width:
        raise InputError(
            f"A row of a numeric feature has the shape of its column. Received: {key!r} with rows of shape "
            f"{array.shape[1:]}, where the column has shape={shape}. Pass shape={array.shape[1:] or (1,)} to "
            f"numeric_column, or reshape the feature"
        )
    return array.reshape(len(array), width)
