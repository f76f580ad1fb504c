"""Columns of sequences: a value for each step of a row, of which rows have different numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from insitu.base.errors import InputError
from insitu.extensions.features.categorical import CategoricalColumn, Ids, KeyedColumn
from insitu.extensions.features.numeric import NumericColumn
from insitu.extensions.features.raw_values import Features, get_feature, read_numbers


@dataclass(frozen=True)
class SequenceCategoricalColumn(CategoricalColumn):
    """The ids of another column, one for each step."""

    kind: ClassVar[str] = "sequence_categorical"
    column: KeyedColumn

    @property
    def name(self) -> str:
        return self.column.name

    @property
    def num_buckets(self) -> int:
        return self.column.num_buckets

    @property
    def raw_keys(self) -> tuple[str, ...]:
        return self.column.raw_keys

    def look_up(self, features: Features) -> Ids:
        return self.column.look_up(features)

    def get_config(self) -> dict[str, Any]:
        return {"categorical_column": self.column}


@dataclass(frozen=True)
class SequenceNumericColumn:
    """The numbers of each step. Steps that a row lacks have `default_value`."""

    kind: ClassVar[str] = "sequence_numeric"
    #: The numbers of each step.
    source: NumericColumn
    #: What fills the steps that a row lacks.
    default_value: float = 0.0

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def width(self) -> int:
        return self.source.width

    @property
    def raw_keys(self) -> tuple[str, ...]:
        return self.source.raw_keys

    def read(self, features: Features) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Return (numbers float32[rows, steps, width], steps of each row). Raises InputError."""
        key, shape = self.source.key, self.source.shape
        rows = [np.asarray(row).reshape(-1) for row in get_feature(features, key, self.name)]
        wrong = next((r for r, row in enumerate(rows) if len(row) % self.width), None)
        if wrong is not None:
            raise InputError(
                f"Each step of a row has the shape of its column. Received: {len(rows[wrong])} numbers in "
                f"row {wrong} "
                f"of the batch, in feature {key!r} with shape={shape}. Correct the rows, or pass another "
                f"shape"
            )
        lengths = np.array([len(row) // self.width for row in rows], np.int32)
        steps = max(1, int(lengths.max(initial=0)))
        table = np.full((len(rows), steps, self.width), self.default_value, np.float32)
        there = np.arange(steps) < lengths[:, None]
        filled = [row for row in rows if len(row)]
        if filled:
            flat = read_numbers(np.concatenate(filled).reshape(-1, *shape), key, shape)
            table[there] = self.source.normalized(flat, np.nonzero(there)[0])
        return table, lengths

    def get_config(self) -> dict[str, Any]:
        return {"source_column": self.source, "default_value": self.default_value}


def steps_of(ids: Ids) -> npt.NDArray[np.int32]:
    """Return the steps of each row: up to its last value."""
    numbers = np.where(ids.present, np.arange(ids.present.shape[1]) + 1, 0)
    steps: npt.NDArray[np.int32] = numbers.max(axis=1, initial=0).astype(np.int32)
    return steps
