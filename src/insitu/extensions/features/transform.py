"""`FeatureTransform`: what is looked up before the graph, by NumPy, for all columns of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.base.errors import InputError
from insitu.extensions.features.categorical import CategoricalColumn, Ids, WeightedColumn
from insitu.extensions.features.dense_columns import Column, Leaf, leaf_of
from insitu.extensions.features.numeric import NumericColumn
from insitu.extensions.features.raw_values import Features
from insitu.extensions.features.sequence import SequenceCategoricalColumn, SequenceNumericColumn, steps_of
from insitu.extensions.features.tf_columns import convert_column

VALUES, IDS, WEIGHTS, LENGTHS = "__values", "__ids", "__weights", "__lengths"
"""How the names of transformed features end."""


class FeatureTransform:
    """Turns a batch of features into the numbers that `DenseFeatures` takes, with NumPy alone.

    `transform(features)` returns a dict: `NAME__values` float32[rows, width] of each numeric column,
    `NAME__ids` int32[rows, width] of each categorical one, -1 where a row has no id, and `NAME__weights` of
    weighted ones. `transform(features, label)` returns (that dict, label), so that `dataset.map(transform)`
    transforms the batches of an `insitu.dataset`. Features that no column reads are left out.

    Args:
        columns: feature columns, of one layer or several, which may have some in common.
        lengths: ids of each row, by the name of a categorical column whose rows have different numbers of
            them. Otherwise the longest row of each batch decides, which makes compiled steps be traced again.
    """

    def __init__(self, columns: Iterable[Column], lengths: Mapping[str, int] | None = None) -> None:
        self.columns = check_columns(columns, may_repeat=True)
        self.lengths = dict(lengths or {})
        self._leaves = _find_leaves(self.columns)
        categorical = {c.name for c in self._leaves.values() if not isinstance(c, NumericColumn)}
        unknown = self.lengths.keys() - categorical
        if unknown:
            raise InputError(
                f"lengths names categorical columns. Received: {min(unknown)!r}, where there are "
                f"{sorted(categorical)}"
            )
        for name, length in self.lengths.items():
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                raise InputError(f"A length is a whole number, 1 at least. Received: {length!r} for {name!r}")

    @property
    def raw_keys(self) -> tuple[str, ...]:
        """The features of the data that the columns read, in alphabetical order."""
        return tuple(sorted({key for column in self.columns for key in column.raw_keys}))

    @property
    def numeric_keys(self) -> frozenset[str]:
        """The features of the data that are numbers, and nothing that is looked up."""
        numbers = (NumericColumn, SequenceNumericColumn)
        looked_up = (leaf for leaf in self._leaves.values() if not isinstance(leaf, numbers))
        return frozenset(self.raw_keys).difference(key for leaf in looked_up for key in leaf.looked_up_keys)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the transformed features."""
        found = []
        for name, column in self._leaves.items():
            found.append(name)
            if isinstance(column, WeightedColumn):
                found.append(column.name + WEIGHTS)
            if isinstance(column, SequenceCategoricalColumn | SequenceNumericColumn):
                found.append(column.name + LENGTHS)
        return tuple(found)

    def __call__(self, features: Features, *rest: Any) -> Any:
        """Return the transformed features, followed by what else a batch has. Raises InputError."""
        found: dict[str, npt.NDArray[Any]] = {}
        for name, column in self._leaves.items():
            if isinstance(column, NumericColumn):
                found[name] = column.read(features)
            elif isinstance(column, SequenceNumericColumn):
                values, steps = column.read(features)
                found[name] = self._fit_steps(values, steps, column)
                found[column.name + LENGTHS] = steps
            else:
                found |= self._look_up(name, column, features)
        _check_rows(found)
        return (found, *rest) if rest else found

    def _look_up(
        self, name: str, column: CategoricalColumn, features: Features
    ) -> dict[str, npt.NDArray[Any]]:
        """Return what a categorical column becomes."""
        found: dict[str, npt.NDArray[Any]] = {}
        ids, length = column.look_up(features), self.lengths.get(column.name)
        if isinstance(column, SequenceCategoricalColumn):
            steps = steps_of(ids)
            ids = Ids(*(self._fit_steps(table, steps, column) for table in (ids.values, ids.present)))
            found[column.name + LENGTHS] = steps
        elif length is not None:
            ids = _fit_length(ids, length, column.name)
        known = ids.present & (ids.values >= 0)
        found[name] = np.where(known, ids.values, -1).astype(np.int32)
        if ids.weights is not None:
            found[column.name + WEIGHTS] = np.where(known, ids.weights, 0).astype(np.float32)
        return found

    def _fit_steps(
        self, table: npt.NDArray[Any], steps: npt.NDArray[np.int32], column: Any
    ) -> npt.NDArray[Any]:
        """Return a table [rows, steps, ...] with as many steps as `lengths` says, if it does. Raises
        InputError."""
        length = self.lengths.get(column.name)
        if length is None:
            return table
        _check_length(steps, length, column.name)
        filling = column.default_value if isinstance(column, SequenceNumericColumn) else 0
        more = [(0, 0), (0, max(0, length - table.shape[1])), *[(0, 0)] * (table.ndim - 2)]
        return np.pad(table[:, :length], more, constant_values=filling)


def check_columns(columns: Iterable[Any], may_repeat: bool = False) -> tuple[Column, ...]:
    """Return columns as a tuple, each once. Raises InputError for what isn't a column, for none, and for
    several of one name. With `may_repeat` they are of several layers: a column may be given twice, and so
    may a name, as of embeddings of one column."""
    columns = convert_column(columns)
    if isinstance(columns, Mapping | str):
        raise InputError(
            f"Feature columns are a list. Received: {type(columns).__name__}. Pass such as "
            f"[numeric_column('age')]"
        )
    listed = tuple(map(convert_column, columns)) if isinstance(columns, Iterable) else (columns,)
    if not listed:
        raise InputError("A model needs a feature column at least. Received: []. Pass one or more")
    for column in listed:
        if not isinstance(column, Column):
            raise InputError(
                f"A feature column is made by the functions of insitu.feature_column. Received: {column!r}. "
                f"Wrap "
                f"the name of a feature, such as in numeric_column(name)"
            )
    if may_repeat:
        return tuple(dict.fromkeys(listed))
    names = [column.name for column in listed]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(
            f"Each feature column has a name of its own. Received: several named {twice!r}. Leave out all "
            f"but one"
        )
    return listed


def _find_leaves(columns: Iterable[Column]) -> dict[str, Leaf]:
    """Return the columns that are transformed, by the names of what they become. Raises InputError if two
    of
    a name differ."""
    leaves: dict[str, Leaf] = {}
    for column in columns:
        leaf = leaf_of(column)
        name = leaf.name + (VALUES if isinstance(leaf, NumericColumn | SequenceNumericColumn) else IDS)
        other = leaves.setdefault(name, leaf)
        if other != leaf:
            raise InputError(
                f"Columns of one name read the data in one way. Received: {leaf!r} beside {other!r}. Give "
                f"the "
                f"feature under a second name for the second column, such as by dataset.map"
            )
    return leaves


def _fit_length(ids: Ids, length: int, name: str) -> Ids:
    """Return the ids in a table of `length` columns, those of each row first. Raises InputError."""
    _check_length(ids.present.sum(axis=1), length, name)
    order = np.argsort(~ids.present, axis=1, kind="stable")[:, :length]

    def fit(table: Any) -> Any:
        return np.pad(np.take_along_axis(table, order, 1), ((0, 0), (0, length - order.shape[1])))

    return Ids(fit(ids.values), fit(ids.present), None if ids.weights is None else fit(ids.weights))


def _check_length(counts: npt.NDArray[Any], length: int, name: str) -> None:
    if counts.max(initial=0) > length:
        row = int(np.argmax(counts))
        raise InputError(
            f"A row has at most as many ids as `lengths` says. Received: {int(counts[row])} in row {row} of "
            f"the "
            f"batch, for column {name!r} with length {length}. Pass a larger length, or cut the feature"
        )


def _check_rows(found: Mapping[str, npt.NDArray[Any]]) -> None:
    rows = {name: len(values) for name, values in found.items()}
    if len(set(rows.values())) > 1:
        raise InputError(f"All features of a batch have the same number of rows. Received: {rows}")


def check_dense(columns: Iterable[Any]) -> tuple[Any, ...]:
    """Return dense columns, ordered by name. Raises InputError if one is categorical alone, or a
    sequence."""
    listed = check_columns(columns)
    for column in listed:
        _refuse_categorical(column)
        if _is_sequence(column):
            raise InputError(
                f"A dense layer has one row of numbers for each row of the data. Received: {column.name!r}, "
                f"which is "
                f"a sequence. Pass it to SequenceFeatures, or make it by the function without sequence_"
            )
    return tuple(sorted(listed, key=lambda column: column.name))


def check_sequence(columns: Iterable[Any]) -> tuple[Any, ...]:
    """Return sequence columns, ordered by name. Raises InputError if one isn't."""
    listed = check_columns(columns)
    for column in listed:
        _refuse_categorical(column)
        if not _is_sequence(column):
            raise InputError(
                f"SequenceFeatures takes sequence columns. Received: {column.name!r}, which isn't one. Pass "
                f"it to "
                f"DenseFeatures, or make it by the function that begins with sequence_"
            )
    return tuple(sorted(listed, key=lambda column: column.name))


def _is_sequence(column: Any) -> bool:
    return isinstance(leaf_of(column), SequenceCategoricalColumn | SequenceNumericColumn)


def _refuse_categorical(column: Any) -> None:
    if isinstance(column, CategoricalColumn) and not hasattr(column, "width"):
        raise InputError(
            f"A layer takes dense columns. Received: {column.name!r}, which is categorical. Wrap it: "
            f"indicator_column(column), or embedding_column(column, dimension)"
        )
