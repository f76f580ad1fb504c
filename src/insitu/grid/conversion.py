"""Converts datasets for libraries that this room doesn't import: rooms above say how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from insitu.errors import InputError

_converters: dict[str, Callable[[Any], Any]] = {}
"""Functions of a dataset, by the name of the library. Written by `register_converter`."""


def register_converter(library: str, convert: Callable[[Any], Any]) -> None:
    """Have `convert` make the library's own dataset of one of insitu's."""
    _converters[library] = convert


def convert_to_tensorflow(dataset: Any) -> Any:
    """Return the dataset as a tf.data.Dataset. Raises InputError where nothing can convert it."""
    if "tensorflow" not in _converters:
        raise InputError("A dataset for TensorFlow needs insitu's package. Import insitu first")
    return _converters["tensorflow"](dataset)
