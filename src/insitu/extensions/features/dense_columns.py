"""Columns that make numbers of the ids of a categorical one, which a dense layer takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from insitu.extensions.features.categorical import BucketizedColumn, CategoricalColumn
from insitu.extensions.features.numeric import NumericColumn
from insitu.extensions.features.sequence import SequenceNumericColumn

COMBINERS = ("mean", "sqrtn", "sum")
"""How an embedding makes one row of those of several ids."""


@dataclass(frozen=True)
class IndicatorColumn:
    """How often each id is in a row, or the sum of its weights."""

    kind: ClassVar[str] = "indicator"
    categorical_column: CategoricalColumn

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_indicator"

    @property
    def width(self) -> int:
        return self.categorical_column.num_buckets

    @property
    def raw_keys(self) -> tuple[str, ...]:
        return self.categorical_column.raw_keys

    def get_config(self) -> dict[str, Any]:
        return {"categorical_column": self.categorical_column}


@dataclass(frozen=True, eq=False)
class EmbeddingColumn:
    """The rows of a trained table for the ids of a row, combined into one."""

    kind: ClassVar[str] = "embedding"
    #: The column that has the ids.
    categorical_column: CategoricalColumn
    #: Numbers of each row of the table.
    dimension: int
    #: One of COMBINERS.
    combiner: str
    #: The Keras initializer of the table.
    initializer: Any
    #: The largest norm of a row; None: any.
    max_norm: float | None
    #: Whether the table is trained.
    trainable: bool
    shared_name: str | None = None
    """The table that other columns use, too; None: it has its own."""

    @property
    def name(self) -> str:
        suffix = "_embedding" if self.shared_name is None else "_shared_embedding"
        return f"{self.categorical_column.name}{suffix}"

    @property
    def table_name(self) -> str:
        """The name of the variable that holds the table."""
        return f"{self.shared_name or self.name}_weights"

    @property
    def width(self) -> int:
        return self.dimension

    @property
    def raw_keys(self) -> tuple[str, ...]:
        return self.categorical_column.raw_keys

    def get_config(self) -> dict[str, Any]:
        return {
            "categorical_column": self.categorical_column,
            "dimension": self.dimension,
            "combiner": self.combiner,
            "initializer": self.initializer,
            "max_norm": self.max_norm,
            "trainable": self.trainable,
            "shared_name": self.shared_name,
        }


DenseColumn = NumericColumn | SequenceNumericColumn | BucketizedColumn | IndicatorColumn | EmbeddingColumn
Column = DenseColumn | CategoricalColumn
Leaf = NumericColumn | SequenceNumericColumn | CategoricalColumn


def leaf_of(column: Column) -> Leaf:
    """Return the column whose values the graph needs: the categorical one that is wrapped, or itself."""
    return column.categorical_column if isinstance(column, IndicatorColumn | EmbeddingColumn) else column
