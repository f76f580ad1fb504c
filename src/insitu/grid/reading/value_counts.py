"""Counts the values of a column, of which a vocabulary is made: by partition, merged in their order. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.errors import InputError
from insitu.grid.partitions import count_shared
from insitu.grid.reading.partition_statistics import Arrays


@dataclass(frozen=True, slots=True)
class Counts:
    """How often each value is there. Arrays: `keys`, whole numbers or UTF-8 texts one after another,
    `counts`, and `ends` where texts end; in no order that matters."""

    #: Whether values are texts; else whole numbers.
    of_texts: bool

    def of_partition(self, blocks: Iterable[npt.NDArray[Any]]) -> Arrays:
        return self._pack(_add_up([self._of_block(block) for block in blocks]))

    def _of_block(self, block: npt.NDArray[Any]) -> pa.Table:
        flat = np.asarray(block).reshape(-1)
        is_text = flat.dtype.kind in "OUS"
        if is_text != self.of_texts or not (is_text or flat.dtype.kind in "iub"):
            held, wanted = ("texts", "numbers")[:: 1 if is_text else -1]
            raise InputError(
                f"A vocabulary is of the values that its layer takes. Received: {held} ({flat.dtype}) for a "
                f"layer of whole {wanted}"
            )
        shared = count_shared(flat)
        if shared is not None:
            return pa.table({"key": shared[0], "count": shared[1]})
        try:
            found = pa.array(flat, pa.large_string() if is_text else pa.int64()).value_counts()
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:  # lists, bytes, or numbers above 2^63 - 1
            raise InputError(
                f"A vocabulary is of texts, or of whole numbers below 2^63. Received: {error}"
            ) from error
        return pa.table({"key": found.field("values"), "count": found.field("counts")})

    def merge(self, parts: Sequence[Arrays]) -> Arrays:
        return self._pack(_add_up([self._unpack(part) for part in parts]))

    def _pack(self, table: pa.Table | None) -> Arrays:
        if table is None:
            table = pa.table({"key": pa.array([], pa.int64()), "count": pa.array([], pa.int64())})
        counts = table["count_sum"].to_numpy() if "count_sum" in table.column_names else np.empty(0, np.int64)
        if not self.of_texts:
            return {"keys": table["key"].to_numpy(), "counts": counts}
        texts = [text.encode() for text in table["key"].to_pylist()]
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        return {"keys": np.frombuffer(b"".join(texts), np.uint8), "ends": ends, "counts": counts}

    def _unpack(self, part: Arrays) -> pa.Table:
        keys: Any = pa.array(self.keys_of(part), pa.large_string() if self.of_texts else pa.int64())
        return pa.table({"key": keys, "count": pa.array(part["counts"])})

    def keys_of(self, part: Arrays) -> list[Any]:
        """Return the values, in the order of `counts`."""
        if not self.of_texts:
            return list(part["keys"].tolist())
        data, ends = part["keys"].tobytes(), part["ends"].tolist()
        return [data[a:b].decode() for a, b in zip([0, *ends], ends, strict=False)]

    def by_frequency(self, part: Arrays) -> list[Any]:
        """Return the values, the most frequent first; equally frequent ones in falling order, as Keras has
        them."""
        keys = self.keys_of(part)
        sortable = [key.encode() for key in keys] if self.of_texts else keys
        places = sorted(range(len(keys)), key=lambda i: (part["counts"][i], sortable[i]), reverse=True)
        return [keys[place] for place in places]


def _add_up(tables: Sequence[pa.Table]) -> pa.Table | None:
    if not tables:
        return None
    found: pa.Table = (
        pa.concat_tables(tables).group_by("key", use_threads=False).aggregate([("count", "sum")])
    )
    if found["key"].null_count:
        raise InputError(
            "A vocabulary is of values. Received: missing values. Fill them, such as by dataset.map"
        )
    return found
