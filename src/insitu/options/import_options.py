"""The options of `insitu import`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from insitu.base.errors import InputError
from insitu.base.plugins import SOURCES
from insitu.options.declaring import Declared, command_line_only, option

_MOST = 100_000
"""Partitions that a cache may have."""
_MOST_PIXELS = 1 << 26
"""Pixels of an image in a row."""


def parse_split(text: str) -> dict[str, float]:
    """Return `train=0.9,test=0.1` as a dict. Raises InputError."""
    split: dict[str, float] = {}
    for part in text.split(","):
        name, equals, fraction = part.partition("=")
        try:
            if not equals or name.strip() in split:
                raise ValueError
            split[name.strip()] = float(fraction)
        except ValueError:
            raise InputError(
                f"--split lists parts, each once, with their fractions, such as train=0.9,test=0.1. "
                f"Received: {text!r}"
            ) from None
    return split


def _show_split(split: Mapping[str, float]) -> str:
    return ",".join(f"{name}={fraction}" for name, fraction in split.items())


_NOTE_LENGTH = 1000


def parse_note(text: str) -> str:
    """Return a note without white space around it. Raises InputError for one that is empty or too long."""
    note = text.strip()
    if not 0 < len(note) <= _NOTE_LENGTH:
        raise InputError(
            f"--version-note has 1 to {_NOTE_LENGTH} characters. Received: {len(note)}. "
            f"{'Shorten it' if note else 'Leave it out'}"
        )
    return note


def parse_images(text: str) -> tuple[int, int, int]:
    """Return `64x48x3` as (height, width, channels). Raises InputError."""
    found = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})x([134])", text.strip().lower())
    height, width, channels = map(int, found.groups()) if found else (0, 0, 0)
    if not 1 <= height * width <= _MOST_PIXELS:
        raise InputError(
            f"--images is HEIGHTxWIDTHxCHANNELS, such as 64x64x3: at most {_MOST_PIXELS} pixels of 1 (grey), "
            f"3 (RGB) or 4 (RGBA) channels. Received: {text!r}"
        )
    return height, width, channels


def show_images(shape: tuple[int, int, int]) -> str:
    """Return the text that `parse_images` makes the same of."""
    return "x".join(map(str, shape))


@dataclass(frozen=True, slots=True)
class ImportOptions(Declared):
    """Options of `insitu import`."""

    #: Name of the cache.
    cache: str
    #: Files, folders, globs, URLs, or a cache of Apache Ignite.
    sources: tuple[str, ...]

    # fmt: off
    partitions: int | None = option(
        None, "Number of partitions.", default_text="one a GiB, 8 at least", least=1, most=_MOST,
        label="Partitions", common=True
    )
    backups: int = option(
        0, "Copies of each partition on further nodes.", least=0, most=100, label="Backups", common=True
    )
    format: Literal[
        "npy", "npz", "parquet", "csv", "arrow", "tfrecord", "ndjson", "images", "webdataset", "text"
    ] | None = option(
        None, "npy, npz, parquet, csv, arrow, tfrecord, ndjson, images, webdataset, text, or a plug-in.",
        metavar="TEXT",
        default_text="by the files' suffixes", label="Format of the files", plugins=SOURCES
    )
    column: str | None = option(None, "The column that the values of .npy files make.", default_text="x")
    key: str | None = option(None, "Column whose hash chooses the partition.", default_text="the row's index")
    label_from_filename: bool = option(False, "One file per class: add a column label.", common=True)
    label_from_folder: bool = option(False, "One folder per class: add a column label.", common=True)
    split: Mapping[str, float] | None = option(
        None, "Make CACHE/train and CACHE/test instead, by train=0.9,test=0.1.", metavar="PARTS",
        label="Split into parts, such as train=0.9,test=0.1", common=True, parse=parse_split, show=_show_split
    )
    columns: tuple[str, ...] = option(
        (), "Read these columns alone, such as age,city.", metavar="COLUMNS", label="Columns", common=True
    )
    without: tuple[str, ...] = option((), "A column that is left out.", metavar="COLUMN")
    rename: tuple[str, ...] = option((), "The name that a column gets.", metavar="COLUMN=NAME")
    dtype: tuple[str, ...] = option(
        (), "The type of a column: float32, str, json, timestamp, %d.%m.%Y, ...", metavar="COLUMN=DTYPE"
    )
    fill: tuple[str, ...] = option(
        (), "What takes the place of missing values: a value, mean, most, or null (and a mask).",
        metavar="COLUMN=VALUE"
    )
    drop_nulls: tuple[str, ...] = option(
        (), "Drop rows in which this column misses its value; all: any column.", metavar="COLUMN"
    )
    where: str | None = option(
        None, "Keep the rows that fulfil this, such as 'age > 18 and city == \"Rome\"'.", metavar="CONDITION"
    )
    limit: int | None = option(None, "Stop after so many rows.", metavar="ROWS", least=1)
    sample: float | None = option(
        None, "Keep about this part of the rows, drawn at random.", metavar="FRACTION", least=0, above=True,
        most=1
    )
    row_id: str | None = option(
        None, "Add a column of this name: the row's number in the sources.", metavar="NAME"
    )
    ragged: tuple[str, ...] = option(
        (), "A column of lists of different lengths, such as token ids.", metavar="COLUMN"
    )
    tensor: tuple[str, ...] = option(
        (), "The form of bytes or lists, such as image=uint8[28,28].", metavar="COLUMN=DTYPE[SHAPE]"
    )
    delimiter: str | None = option(
        None, "Of CSV: the sign between fields.", metavar="SIGN", default_text="as the file shows"
    )
    decimal: Literal[".", ","] | None = option(
        None, "Of CSV: the sign before decimals.", default_text="as the file shows"
    )
    header: bool | None = option(
        None, "Of CSV: whether the first row names the columns.", default_text="as the file shows"
    )
    encoding: str | None = option(
        None, "Of CSV: such as cp1252.", metavar="NAME", default_text="UTF-8, or UTF-16 by its mark"
    )
    quote: str | None = option(None, "Of CSV: the sign around fields; '' for none.", metavar="SIGN",
        default_text='"')
    comment: str | None = option(None, "Of CSV: begins lines that are left out.", metavar="SIGN")
    null_values: tuple[str, ...] = option(
        (), "Of CSV: a field that stands for no value, also in text.", metavar="TEXT",
        default_text="of numbers: an empty one, NA, NaN, null"
    )
    sql: str | None = option(
        None, "The query whose rows are imported of a database, such as sqlite://orders.db.", metavar="QUERY"
    )
    table_version: str | None = option(
        None, "Of Delta and Iceberg tables: a version, or the id of a snapshot.", metavar="VERSION",
        default_text="the newest"
    )
    arrow: tuple[str, ...] = option((), "Of Ignite: a byte[] with Arrow IPC streams.", metavar="COLUMN")
    config: Path | None = option(  # noqa: RUF009
        None, "Of Ignite: a client's Spring XML; its servers have the cache.", flags=("--config", "-c"),
        metavar="FILE"
    )
    features: str | None = option(
        None, "Of TFRecord files: image:uint8[28,28]=image_raw,label:int64.", metavar="COLUMNS"
    )
    render: int | None = option(
        None, "Make images of the drawings in .ndjson files.", metavar="PIXELS", least=1
    )
    images: tuple[int, int, int] | None = option(
        None, "Decode images, and scale each to this size: 64x64x3; 1, 3 or 4 channels.",
        metavar="HEIGHTxWIDTHxCHANNELS", common=True, parse=parse_images, show=show_images
    )
    skip_damaged: bool = option(False, "Leave out images that can't be decoded, and name them.")
    overwrite: bool = option(False, "Put a new version in the place of an existing one.", common=True)
    append: bool = option(False, "Make a version with the rows of the latest one and these.")
    version_note: str | None = option(
        None, "Note that is kept with the version; `insitu describe` shows it.", parse=parse_note
    )
    resume: bool = option(False, "Continue where this command was interrupted; keep what it does.")
    compress: Literal["lz4", "zstd"] | None = option(
        None, "Compress the columns that it makes smaller by a tenth."
    )
    read_on: Literal["nodes", "here"] | None = option(
        None, "Who reads the files: nodes, which must all see them, or this host.",
        default_text="nodes for URLs, else here"
    )
    reader: str | None = option(
        None, "Have Ray Data read: parquet, csv, json, text, tfrecords, images or webdataset.",
        metavar="READER", default_text="insitu reads"
    )
    reader_options: tuple[str, ...] = option(
        (), "Option of the reader, such as size=64,64 for images.", flags=("--reader-option",),
        metavar="NAME=VALUE"
    )
    dry_run: bool = option(
        False, "Show what would be imported, and import nothing.",
        not_at=command_line_only("It is about what the command prints.")
    )
    as_json: bool = option(
        False, "Print JSON, in the form of docs/reference/json.md.", flags=("--json",),
        not_at=command_line_only("It is about what the command prints.")
    )
