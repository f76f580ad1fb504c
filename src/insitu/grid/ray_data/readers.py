"""Pure: the readers of Ray Data that an import can use, and the options that they take."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from insitu.base.errors import InputError

Parse = Callable[[str], Any]
_SMALL_FILES = 64
"""Files of one row each that are one source together."""


def _parse_size(text: str) -> tuple[int, int]:
    sides = tuple(int(side) for side in text.split(","))
    if len(sides) != 2 or min(sides) < 1:
        raise ValueError
    return sides[0], sides[1]


def _parse_flag(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _parse_text(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _parse_texts(text: str) -> list[str]:
    return [_parse_text(part.strip()) for part in text.split(",")]


def _parse_count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _parse_cpus(text: str) -> float:
    if not 0 < float(text) < 1e6:
        raise ValueError
    return float(text)


@dataclass(frozen=True, slots=True)
class Reader:
    """A function of Ray Data that reads files."""

    #: Its name in `ray.data`.
    function: str
    #: How the names of its files end: these are looked for in folders.
    suffixes: tuple[str, ...]
    #: What it takes beside files: name -> (how it is written, what makes a value of it).
    options: Mapping[str, tuple[str, Parse]] = field(default_factory=dict)
    #: Packages that it needs on each node that reads: module -> what is installed.
    packages: Mapping[str, str] = field(default_factory=dict)
    #: How many files are one source.
    files_per_source: int = 1
    #: Columns that Ray adds beside those of the files.
    added: tuple[str, ...] = ()
    #: Whether types of columns are inferred from values, so that a file may have whole numbers alone.
    infers_types: bool = False
    #: Whether files say nothing about the order of columns: they are ordered by name.
    orders_columns: bool = False


_FLAG = ("true|false", _parse_flag)
COMMON: Mapping[str, tuple[str, Parse]] = {
    "concurrency": ("TASKS", _parse_count),
    "include_paths": _FLAG,
    "memory": ("BYTES", _parse_count),
    "num_cpus": ("CPUS", _parse_cpus),
}
"""What all readers take: tasks at once, a column `path`, and what each task reserves."""
READERS: Mapping[str, Reader] = {
    "parquet": Reader("read_parquet", (".parquet", ".pq"), {"columns": ("NAME[,NAME...]", _parse_texts)}),
    "csv": Reader("read_csv", (".csv", ".csv.gz", ".csv.bz2", ".csv.zst"), infers_types=True),
    "json": Reader(
        "read_json",
        (".json", ".jsonl", ".json.gz", ".jsonl.gz"),
        {"lines": _FLAG},
        infers_types=True,
    ),
    "text": Reader("read_text", (".txt",), {"encoding": ("NAME", _parse_text), "drop_empty_lines": _FLAG}),
    "tfrecords": Reader(
        "read_tfrecords",
        (".tfrecord", ".tfrecords"),
        packages={"tensorflow": "tensorflow"},
        orders_columns=True,
    ),
    "images": Reader(
        "read_images",
        (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif"),
        {"size": ("HEIGHT,WIDTH", _parse_size), "mode": ("L|RGB|RGBA|...", _parse_text)},
        packages={"PIL": "pillow"},
        files_per_source=_SMALL_FILES,
    ),
    "webdataset": Reader(
        "read_webdataset",
        (".tar", ".tar.gz"),
        {"suffixes": ("NAME[,NAME...]", _parse_texts), "expand_json": _FLAG},
        packages={"PIL": "pillow"},
        added=("__url__",),
    ),
}
"""By the name that `--reader` takes."""


@dataclass(frozen=True, slots=True)
class ReaderRequest:
    """A reader, and what the user gives it."""

    #: Its name in READERS.
    name: str
    #: Option of the reader -> value.
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reader(self) -> Reader:
        return READERS[self.name]

    def describe(self) -> list[str]:
        """Return what tells two requests from each other."""
        return [self.name, *(f"{name}={json.dumps(value)}" for name, value in sorted(self.options.items()))]


def parse_reader(name: str | None, options: Sequence[str]) -> ReaderRequest | None:
    """Return what `--reader` and `--reader-option` say; None where no reader is named. Raises InputError."""
    if name is None:
        if options:
            raise InputError(
                f"--reader-option says how a reader of Ray Data reads. Received: {options[0]!r} without "
                f"--reader. Add --reader {'|'.join(READERS)}"
            )
        return None
    if name not in READERS:
        raise InputError(f"--reader must be one of {', '.join(READERS)}. Received: {name!r}")
    return ReaderRequest(name, dict(_parse_option(name, text) for text in options))


def _parse_option(reader: str, text: str) -> tuple[str, Any]:
    known = {**COMMON, **READERS[reader].options}
    name, _, value = text.partition("=")
    if name in known:
        form, parse = known[name]
        try:
            return name, parse(value)
        except (ValueError, KeyError):
            raise InputError(
                f"--reader-option {name} has the form {name}={form}. Received: {text!r}"
            ) from None
    forms = ", ".join(f"{name}={form}" for name, (form, _) in sorted(known.items()))
    raise InputError(f"--reader {reader} takes the options {forms}. Received: {text!r}")
