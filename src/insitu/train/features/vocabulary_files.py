"""Vocabularies that are read as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from insitu.base.errors import InputError
from insitu.train.features.categorical import VocabularyColumn
from insitu.train.features.checks import check_count, check_dtype, check_unknown, refuse_duplicates
from insitu.train.replica import note_vocabulary_file


def read_vocabulary_column(
    key: str, file: str | Path, size: int | None, dtype: Any, default_value: int | None, oov_buckets: int
) -> VocabularyColumn:
    """Return a column whose ids are places in a file of one value a line. Raises InputError."""
    kind = check_dtype(dtype, "categorical_column_with_vocabulary_file")
    lines = _read_vocabulary(Path(file), size)
    note_vocabulary_file(str(file), lines)
    values: tuple[Any, ...] = lines
    if kind == "int64":
        try:
            values = tuple(int(line) for line in lines)
        except ValueError as error:
            raise InputError(
                f"A vocabulary of dtype 'int64' has a whole number on each line. Received: {file}: {error}. "
                "Pass dtype='string'"
            ) from error
    refuse_duplicates(values, f"{file}")
    default, buckets = check_unknown(default_value, oov_buckets, len(values))
    return VocabularyColumn(key, values, kind, default, buckets)


def _read_vocabulary(path: Path, size: int | None) -> tuple[str, ...]:
    try:
        lines = path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"vocabulary_file is a text file in UTF-8 with one value a line. Received: {path}: {error}"
        ) from error
    lines = [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
    if size is not None and check_count(size, "vocabulary_size") > len(lines):
        raise InputError(
            f"vocabulary_size is at most the number of lines. Received: {size}, where {path} has "
            f"{len(lines)}. "
            f"Leave it out to take all"
        )
    if not lines:
        raise InputError(f"A vocabulary has a value at least. Received: {path}, which is empty")
    return tuple(lines[:size])
