"""Random columns over random rows, described so that insitu's and TensorFlow's functions make them alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Features = dict[str, Any]
Described = tuple[str, dict[str, Any]]
"""The name of a function of feature columns, and its arguments; columns among them are described, too."""

WORDS = [
    "",
    "a",
    "bc",
    "def",
    "ä",
    "日本",
    "x" * 17,
    "y" * 70,
    " a",
    "a ",
    "0",
    "-1",
    "12",
    "a\x00b",
    "é" * 40,
]
NUMBERS = [-2.5, -1, 0, 1, 2, 2.5, 3, 1e30, -1e30, 0.1, 1 / 3, 16777217.0, 40.5, np.inf, -np.inf]
BOUNDARIES = [-2.5, -1, 0, 1, 2, 2.5, 3, 0.1, 1 / 3, 40.5, 16777217.0, 1e30]
IDS = [-1, 0, 1, 2, 3, 4, 7]
INTEGERS = ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"]
WEIGHTS = [0.5, 1, 2, -1, 3.25, -0.5]


def halve(values: Any) -> Any:
    return (values - 3.0) / 2.0


class Maker:
    """Makes a column and the rows that it reads, by a seed. Vocabularies are written to `folder`."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._choose = random.Random(seed)
        self._draw = np.random.default_rng(seed)
        #: Begins the names of vocabularies: TensorFlow keeps the table of a file that it has read.
        self._path = folder / f"vocabulary-{seed}"
        self.rows = self._choose.choice([1, 2, 5, 9])
        self.features: Features = {}

    def make(self) -> Described:
        """Return a column for a layer; `self.features` has its rows."""
        kinds: list[Callable[[], Described]] = [self._numeric, self._bucketized, self._sequence]
        return self._choose.choice([*kinds, *[self._wrapped] * 5])()

    def _feature(self, values: Any) -> str:
        key = f"f{len(self.features)}"
        self.features[key] = values
        return key

    def _numeric(self) -> Described:
        shape, dtype = self._choose.choice([(1,), (2,), (3,)]), self._choose.choice(["float32", "float64"])
        if is_whole := self._choose.random() < 0.3:
            values = self._draw.choice([-5, 0, 1, 40, 16777217], (self.rows, *shape)).astype("int64")
        else:
            values = self._draw.choice(NUMBERS, (self.rows, *shape)).astype(dtype)
        key = self._feature(values[:, 0] if shape == (1,) and self._choose.random() < 0.5 else values)
        # TensorFlow takes no whole numbers from a function of others.
        function = None if is_whole else self._choose.choice([None, halve])
        kept = self._choose.choice(["float32", "float64", "int32", "int64"])
        return "numeric_column", {"key": key, "shape": shape, "dtype": kept, "normalizer_fn": function}

    def _bucketized(self) -> Described:
        boundaries = sorted(self._choose.sample(BOUNDARIES, self._choose.randint(1, 4)))
        return "bucketized_column", {"source_column": self._numeric(), "boundaries": boundaries}

    def _values(self, dtype: str, form: str) -> str:
        """Return the name of a new feature: an array of one or two axes, or rows of different lengths."""

        def draw(shape: Any) -> Any:
            if dtype == "string":
                return self._draw.choice(np.array(WORDS, object), shape)
            return self._draw.choice(IDS, shape)

        if form == "rows":
            rows = np.empty(self.rows, object)
            for row in range(self.rows):
                rows[row] = draw(self._choose.randint(0, 4))
            return self._feature(rows)
        values = draw(self.rows if form == "one" else (self.rows, self._choose.randint(1, 3)))
        if dtype == "int64":
            kind = self._choose.choice(INTEGERS)
            values = (np.abs(values) if kind[0] == "u" else values).astype(kind)
        return self._feature(values)

    def _keyed(self, form: str, hashed: bool = True) -> Described:
        dtype, kind = (
            self._choose.choice(["string", "int64"]),
            self._choose.choice(
                ["identity", "vocabulary_list", "vocabulary_file", *(["hash_bucket"] if hashed else [])]
            ),
        )
        dtype = "int64" if kind == "identity" else dtype
        given: dict[str, Any] = {"key": self._values(dtype, form)}
        if kind == "identity":
            given |= {"num_buckets": 5, "default_value": self._choose.choice([0, 4])}
        elif kind == "hash_bucket":
            given |= {"hash_bucket_size": self._choose.choice([2, 100]), "dtype": dtype}
        else:
            given |= self._choose.choice([{}, {"num_oov_buckets": 3}, {"default_value": 0}])
            known: list[Any] = list(range(-3, 9)) if dtype == "int64" else WORDS[1:]
            known = self._choose.sample(known, self._choose.randint(1, 6))
            if kind == "vocabulary_list":
                given["vocabulary_list"] = known
            else:
                path = self._path.with_name(f"{self._path.name}-{given['key']}.txt")
                path.write_text("\n".join(map(str, known)) + self._choose.choice(["", "\n"]))
                given |= {"vocabulary_file": str(path), "dtype": dtype}
        return f"categorical_column_with_{kind}", given

    def _crossed(self, is_inner: bool = False) -> Described:
        def make_key() -> Any:
            kind = self._choose.choice(["feature", "feature", "column", "ranges", "cross"])
            if kind == "column":
                return self._keyed(self._choose.choice(["one", "two", "rows"]), hashed=False)
            if kind == "ranges":
                return self._bucketized()
            if kind == "cross" and not is_inner:
                return self._crossed(is_inner=True)
            return self._values(
                self._choose.choice(["string", "int64"]), self._choose.choice(["one", "two", "rows"])
            )

        keys = [make_key() for _ in range(self._choose.randint(2, 3))]
        hash_key = self._choose.choice([None, 42, 2**63 - 1])
        return "crossed_column", {"keys": keys, "hash_bucket_size": 97, "hash_key": hash_key}

    def _categorical(self) -> Described:
        kind = self._choose.choice(["keyed", "keyed", "ranges", "cross", "weighted"])
        if kind == "ranges":
            return self._bucketized()
        if kind == "cross":
            return self._crossed()
        if kind == "keyed":
            return self._keyed(self._choose.choice(["one", "two", "rows"]))
        # In arrays TensorFlow leaves out missing values and weights of 0 each by itself.
        name, given = self._keyed("rows")
        rows = np.empty(self.rows, object)
        for row, values in enumerate(self.features[given["key"]]):
            rows[row] = self._draw.choice(WEIGHTS, len(values)).astype("float32")
        weights = self._feature(rows)
        return "weighted_categorical_column", {
            "categorical_column": (name, given),
            "weight_feature_key": weights,
        }

    def _wrap(self, column: Described, **more: Any) -> Described:
        if self._choose.random() < 0.5:
            return "indicator_column", {"categorical_column": column}
        given = {"dimension": self._choose.randint(1, 4), "max_norm": self._choose.choice([None, 0.5, 1.0])}
        return "embedding_column", {"categorical_column": column, **given, **more}

    def _wrapped(self) -> Described:
        combiner = self._choose.choice(["mean", "sum", "sqrtn"])
        return self._wrap(self._categorical(), combiner=combiner)

    def _sequence(self) -> Described:
        if self._choose.random() < 0.7:
            name, given = self._keyed("rows")
            return self._wrap((f"sequence_{name}", given))
        shape = self._choose.choice([(1,), (2,), (2, 2)])
        rows = np.empty(self.rows, object)
        for row in range(self.rows):
            rows[row] = self._draw.normal(size=int(np.prod(shape)) * self._choose.randint(0, 3))
        given = {"key": self._feature(rows), "shape": shape, "default_value": -1.0}
        return "sequence_numeric_column", given


def is_sequence(column: Described) -> bool:
    name, given = column
    return name.startswith("sequence_") or given.get("categorical_column", ("",))[0].startswith("sequence_")


def build(columns: Any, described: Any, to_dtype: Callable[[str], Any]) -> Any:
    """Return the column that `columns`, a module of functions, makes of a description."""
    if isinstance(described, str):
        return described
    name, given = described
    made = dict(given)
    for argument, value in given.items():
        if argument in ("source_column", "categorical_column"):
            made[argument] = build(columns, value, to_dtype)
        elif argument == "keys":
            made[argument] = [build(columns, key, to_dtype) for key in value]
        elif argument == "dtype":
            made[argument] = to_dtype(value)
    return getattr(columns, name)(**made)


def find_texts(described: Any) -> set[str]:
    """Return the features of text among those of keyed columns: rows without values don't show it."""
    if isinstance(described, str):
        return set()
    _, given = described
    found = {given["key"]} if given.get("dtype") == "string" and "key" in given else set()
    if isinstance(next(iter(given.get("vocabulary_list", [0]))), str):
        found.add(given["key"])
    for inner in (given.get("source_column"), given.get("categorical_column"), *given.get("keys", ())):
        found |= find_texts(inner) if inner is not None else set()
    return found
