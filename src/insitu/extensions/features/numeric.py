"""Numeric columns: numbers that enter the model as they are, or normalized by a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from insitu.base.errors import InputError
from insitu.extensions.features.raw_values import Features, get_feature, read_numbers


@dataclass(frozen=True)
class NumericColumn:
    """Numbers of one feature, `shape` for each row."""

    kind: ClassVar[str] = "numeric"
    #: The feature.
    key: str
    #: Lengths of a row's axes.
    shape: tuple[int, ...] = (1,)
    default_value: tuple[float, ...] | None = None
    """One number, or one for each value of a row, for batches that lack the feature."""
    dtype: str = "float32"
    """What the numbers are converted to before they are normalized. Where the feature has numbers that this
    dtype lacks, to one that has both."""
    #: What the numbers [rows, *shape] pass through; None: nothing.
    normalizer_fn: Callable[[Any], Any] | None = None

    @property
    def name(self) -> str:
        return self.key

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    @property
    def raw_keys(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, features: Features) -> npt.NDArray[np.float32]:
        """Return the numbers of a batch, normalized: float32[rows, width]. Raises InputError."""
        if self.default_value is not None and features.keys() and self.key not in features:
            rows = len(next(iter(features.values())))
            numbers: Any = np.broadcast_to(np.array(self.default_value), (rows, self.width))
        else:
            numbers = read_numbers(get_feature(features, self.key, self.name), self.key, self.shape)
        return self.normalized(numbers)

    def normalized(
        self, numbers: npt.NDArray[Any], batch_rows: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[np.float32]:
        """Return numbers [rows, width] as the model gets them. Raises InputError.

        `batch_rows` says from which rows of the batch they are, for messages; None: from each in turn.
        """
        # NumPy doesn't know how wide others' dtypes are, such as bfloat16.
        own = numbers.dtype if numbers.dtype.kind in "iubf" else np.dtype("float32")
        numbers = numbers.astype(np.result_type(own, self.dtype))
        if self.normalizer_fn is not None:
            numbers = self._normalize(numbers)
        found: npt.NDArray[np.float32] = numbers.astype(np.float32)
        if np.isnan(found).any():
            row = int(np.argwhere(np.isnan(found))[0][0])
            row = row if batch_rows is None else int(batch_rows[row])
            raise InputError(
                f"A numeric column has a number in each row. Received: NaN in row {row} of the batch, in "
                f"feature "
                f"{self.key!r}. Fill such values, in the data or by a normalizer_fn such as np.nan_to_num"
            )
        return found

    def _normalize(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return what the user's function makes of the numbers, which it gets in their column's shape."""
        rows = len(numbers)
        result = self.normalizer_fn(numbers.reshape(rows, *self.shape))  # type: ignore[misc]
        result = result.detach().cpu() if hasattr(result, "detach") else result
        normalized = np.asarray(result)
        if normalized.shape != (rows, *self.shape):
            raise InputError(
                f"A normalizer_fn keeps the shape of what it gets. Received: shape {normalized.shape} for "
                f"{(rows, *self.shape)}, from that of column {self.name!r}"
            )
        return normalized.reshape(rows, self.width)

    def get_config(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "shape": list(self.shape),
            "default_value": None if self.default_value is None else list(self.default_value),
            "dtype": self.dtype,
            "normalizer_fn": self.normalizer_fn,
        }
