"""Data sets of Hugging Face's `datasets`: folders of `save_to_disk`, and what their files say of columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from insitu.base.errors import SourceError
from insitu.grid.sources.file_groups import Member, folder_of

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_METADATA = b"huggingface"
"""Key of the schema's metadata in Arrow and Parquet files of data sets."""

LABEL = "label"
"""The column whose classes a cache names."""

File = TypeVar("File", bound=Member)


def keep_data_files(files: Sequence[File]) -> list[File]:
    """Return the files of a folder without those that a saved data set in it doesn't name as its own.

    Other Arrow files there are what `datasets` has kept of its computations. Raises SourceError for several
    splits, and for a data set that isn't whole.
    """
    by_folder: dict[str, dict[str, File]] = {}
    for file in files:
        by_folder.setdefault(folder_of(file), {})[file.name] = file
    saved = {folder: held for folder, held in by_folder.items() if held.keys() >= {_STATE, _INFO}}
    for folder, held in by_folder.items():
        splits = [split for split in saved if split.rpartition("/")[0] == folder]
        if _SPLITS in held and len(splits) > 1:
            named = ", ".join(split.rpartition("/")[2] for split in splits)
            raise SourceError(
                f"The splits of a data set are imported one at a time, so that none gets rows of another. "
                f"Received: {folder} with {named}. Name the folder of one, such as {splits[0]}"
            )
    kept = list[File]()
    for file in files:
        folder = folder_of(file)
        if folder not in saved:
            kept.append(file)
        elif file.name == _STATE:
            kept += _list_data(file, saved[folder])
    return kept


def _list_data(state: File, held: Mapping[str, File]) -> list[File]:
    """Return the files of a saved data set that has rows."""
    try:
        with state.open("rb") as file:
            found = json.loads(file.read())
        names = [each["filename"] for each in found["_data_files"]]
        indices = found.get("_indices_data_files")
    except OSError as error:
        raise SourceError(f"{state} can't be read: {error.strerror or error}") from error
    except (ValueError, TypeError, LookupError) as error:
        raise SourceError(
            f"{state} must say which files a data set has, as save_to_disk writes it. Received: "
            f"{type(error).__name__}: {str(error)[:200]}. Save the data set again"
        ) from error
    if indices:
        raise SourceError(
            f"A data set is saved with the rows that it selects. Received: {state}, which has a list of row "
            f"numbers beside all rows. Save it again with flatten_indices().save_to_disk(...)"
        )
    missing = [name for name in names if name not in held]
    if missing:
        raise SourceError(
            f"A data set must be whole. Received: {state}, which names {', '.join(map(str, missing[:5]))}, "
            f"without {'that file' if len(missing) == 1 else 'those files'}. Copy the whole folder"
        )
    return [held[name] for name in names]


def find_classes(schema: Any, path: Any) -> tuple[str, ...]:
    """Return the names of the classes of column `label`, by number; empty if it isn't of classes.

    They are in the metadata of the file's schema, or in `dataset_info.json` beside the file.
    """
    feature = _read_features(schema, path).get(LABEL)
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
        return ()
    names = feature.get("names") or ()
    return tuple(names) if all(isinstance(name, str) for name in names) else ()


def _read_features(schema: Any, path: Any) -> Mapping[str, Any]:
    text = (schema.metadata or {}).get(_METADATA)
    try:
        if text is not None:
            found = json.loads(text).get("info", {}).get("features")
            if found:
                return dict(found)
        beside = type(path)(f"{folder_of(path)}/{_INFO}")
        with beside.open("rb") as file:
            return dict(json.loads(file.read()).get("features") or {})
    except (OSError, ValueError, TypeError, AttributeError, SourceError):
        return {}
