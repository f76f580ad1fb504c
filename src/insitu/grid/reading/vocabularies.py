"""Finds the vocabularies of columns of a dataset, in one pass over all its partitions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from insitu.base.errors import InputError
from insitu.grid.reading.column_maps import (
    LABEL,
    UNKNOWN_NUMBER,
    UNKNOWN_TEXT,
    check_values,
    is_of_texts,
    split_words,
)
from insitu.grid.reading.partition_statistics import PartitionedRows, PartitionStatistics


def find_vocabularies(
    data: PartitionedRows, places: Mapping[str, Any], labels: Collection[str], *, of_words: bool = False
) -> dict[str, list[Any]]:
    """Return the values of each column, most frequent first, of all rows. In a job all tasks call it.

    `places` are those of `ColumnMap` by column. The vocabulary of a column that isn't in `labels` lacks the
    value that stands for all others. `of_words`: values are the words of texts. Raises InputError.
    """
    from insitu.grid.reading.value_counts import Counts  # needs Arrow, which most scripts don't

    def pick(batch: Any, column: str) -> Any:
        if places[column] is LABEL:
            return batch[1]
        features = batch[0] if isinstance(batch, tuple) else batch
        return features if places[column] is None else features[places[column]]

    def pick_words(batch: Any, column: str) -> Any:
        texts = check_values(pick(batch, column), column, "tokenize", of_texts=True)
        return np.array([word.decode() for text in texts for word in split_words(text)], object)

    kinds = {column: pick(data.element_spec, column) for column in places}
    for column, spec in kinds.items():
        if of_words and not is_of_texts(spec):
            raise InputError(f"tokenize takes columns of texts. Received: {spec.dtype} in {column!r}")
        if not (is_of_texts(spec) or spec.dtype.kind in "iu"):
            raise InputError(
                f"lookup takes columns of texts or of whole numbers. Received: {spec.dtype} in {column!r}. "
                f"insitu.adapt gives numbers to keras.layers.Normalization and Discretization"
            )
    statistics = {column: Counts(is_of_texts(spec)) for column, spec in kinds.items()}
    found = PartitionStatistics(
        data, statistics, pick_words if of_words else pick, "tokenize" if of_words else "lookup"
    ).compute()
    vocabularies = {}
    for column, counts in statistics.items():
        values = counts.by_frequency(counts.merge([part[column] for part in found]))
        unknown = UNKNOWN_TEXT if counts.of_texts else UNKNOWN_NUMBER
        vocabularies[column] = [value for value in values if column in labels or value != unknown]
    return vocabularies
