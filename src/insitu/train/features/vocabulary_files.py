"""Which vocabularies this process has read as files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import xxhash

_read: dict[str, str] = {}
"""A digest of the values by the path as it was given. Written by `note_vocabulary_file`."""


def note_vocabulary_file(path: str, values: Iterable[str]) -> None:
    """Note what was read from a file last."""
    _read[path] = xxhash.xxh3_64_hexdigest(json.dumps(list(values)).encode())


def list_vocabulary_files() -> Mapping[str, str]:
    """Return a digest of each file's values, by its path."""
    return dict(_read)
