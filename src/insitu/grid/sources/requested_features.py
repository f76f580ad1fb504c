"""`--features`: which features of TFRecord files become which columns. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from insitu.errors import InputError
from insitu.grid.partitions import RAGGED, TEXT
from insitu.grid.sources.base import DTYPES, MOST_ROW_VALUES
from insitu.spec import Column

_ONE = re.compile(r"\s*([^\s:=,\[\]]+)\s*:\s*([a-z0-9]+)\s*(?:\[([^\]]*)\])?\s*(?:=\s*([^,]+?))?\s*")
_EXAMPLE = "image:uint8[28,28]=image_raw,label:int64"
_MOST_SIDE = 1024


@dataclass(frozen=True, slots=True)
class RequestedFeature:
    """One feature of a tf.train.Example, and the column that it becomes."""

    #: The name of the column.
    name: str
    #: A dtype of NumPy, or "str".
    dtype: str
    #: Lengths of a row's axes; None: rows of different lengths.
    shape: tuple[int, ...] | None
    #: The feature's key in the records.
    feature: str

    @property
    def column(self) -> Column:
        if self.shape is None:
            return Column(self.name, self.dtype + RAGGED)
        return Column(self.name, self.dtype, self.shape)

    @property
    def values(self) -> int:
        """Values of a row of fixed shape."""
        return math.prod(self.shape or ())

    def __str__(self) -> str:
        shape = "*" if self.shape is None else ",".join(map(str, self.shape))
        return f"{self.name}:{self.dtype}{f'[{shape}]' if shape else ''}={self.feature}"


def parse_features(text: str) -> tuple[RequestedFeature, ...]:
    """Return what `NAME:DTYPE[SHAPE]=FEATURE,...` asks for. Raises InputError.

    SHAPE is left out for one value a row, and `*` for rows of different lengths. FEATURE is NAME by default.
    """
    parts = re.split(r",(?![^\[]*\])", text)
    found = tuple(_parse_one(part, text) for part in parts)
    names = [one.name for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"--features names each column once. Received: {twice} twice, in {text!r}")
    return found


def _parse_one(part: str, text: str) -> RequestedFeature:
    match = _ONE.fullmatch(part)
    if match is None:
        raise InputError(
            f"--features lists columns as NAME:DTYPE[SHAPE]=FEATURE, such as {_EXAMPLE}. Received: {part!r} "
            f"in "
            f"{text!r}"
        )
    name, dtype, shape, feature = match.groups()
    if dtype not in (*DTYPES, TEXT):
        raise InputError(
            f"The dtype of a column is one of {', '.join(DTYPES)} or {TEXT}. Received: {dtype!r} in {text!r}"
        )
    lengths = _parse_shape(shape, text)
    if dtype == TEXT and lengths != ():
        raise InputError(
            f"A column of text has one text a row. Received: {part.strip()!r}. Leave out its shape"
        )
    return RequestedFeature(name, dtype, lengths, feature or name)


def _parse_shape(shape: str | None, text: str) -> tuple[int, ...] | None:
    if shape is None or not shape.strip():
        return ()
    if shape.strip() == "*":
        return None
    lengths = [part.strip() for part in shape.split(",")]
    numbers = tuple(int(part) if re.fullmatch(r"[0-9]{1,10}", part) else 0 for part in lengths)
    if 0 in numbers or math.prod(numbers) > MOST_ROW_VALUES:
        raise InputError(
            f"The shape of a row has whole numbers, 1 at least, or is * for rows of different lengths. "
            f"Received: "
            f"[{shape}] in {text!r}"
        )
    return numbers


def check_reading(features: str | None, render: int | None) -> None:
    """Raise InputError for --features or --render that no file can be read with."""
    if features is not None:
        parse_features(features)
    if render is not None and not 1 <= render <= _MOST_SIDE:
        raise InputError(
            f"--render is the side of an image in pixels, in [1, {_MOST_SIDE}]. Received: {render}"
        )
