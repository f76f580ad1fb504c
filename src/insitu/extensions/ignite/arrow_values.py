"""Pure: byte[] that hold Arrow IPC streams, each of any number of rows, as columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.grid.sources import columns_of_batch, values_of_batch


def find_arrow_columns(values: Any, name: str, ragged: frozenset[str]) -> tuple[Column, ...]:
    """Return the columns of the first stream that has rows. Raises SourceError."""
    for value in values:
        batch = _read_stream(value, name)
        if batch.num_rows:
            return columns_of_batch(batch, _place(name), ragged)
    raise SourceError(
        f"Column {name} must hold Arrow data with rows where --arrow {name} is given. Received: no rows"
    )


def unpack_arrow(
    values: Any, columns: tuple[Column, ...], name: str
) -> tuple[npt.NDArray[np.int64], dict[str, Any]]:
    """Return how many rows each stream has, and the values of all of them end to end. Raises SourceError."""
    batches = [_read_stream(value, name) for value in values]
    counts = np.array([batch.num_rows for batch in batches], np.int64)
    kept = [batch for batch in batches if batch.num_rows]
    if not kept:
        empty: dict[str, Any] = {}
        return counts, empty
    different = [batch for batch in kept if not batch.schema.equals(kept[0].schema)]
    if different:
        raise SourceError(
            f"All Arrow data of column {name} must have one schema. Received: {kept[0].schema} and "
            f"{different[0].schema}"
        )
    table = pa.Table.from_batches(kept).combine_chunks()
    (batch,) = table.to_batches() or [kept[0]]
    return counts, values_of_batch(batch, columns, _place(name))


def _place(name: str) -> Path:
    return Path(f"column {name}")


def _read_stream(value: Any, name: str) -> Any:
    """Return all rows of a stream as one batch."""
    try:
        with pa.ipc.open_stream(value.as_buffer()) as reader:
            table = reader.read_all()
            # Before anything is copied: Arrow follows offsets that point out of the stream.
            table.validate(full=True)
            batches = table.combine_chunks().to_batches()
    except (pa.ArrowException, EOFError, OSError) as error:
        raise SourceError(
            f"Column {name} must hold an Arrow IPC stream in each row where --arrow {name} is given. "
            f"Received: {str(error)[:200]}"
        ) from error
    if len(batches) == 1:
        return batches[0]
    return pa.RecordBatch.from_arrays([pa.array([], kind.type) for kind in table.schema], schema=table.schema)
