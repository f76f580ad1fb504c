"""Formats of exported models, and how the names of their files end."""

from __future__ import annotations

from pathlib import Path

from insitu.base.plugins import EXPORTERS, list_plugins

KERAS, SAVED_MODEL, ONNX, STABLEHLO = "keras", "tf_saved_model", "onnx", "stablehlo"
"""Formats, by the names of `keras.Model.export` if it has them."""
SUFFIXES = {KERAS: ".keras", SAVED_MODEL: "", ONNX: ".onnx", STABLEHLO: ".stablehlo"}
"""The part of an export's name after the step. A SavedModel is a folder; TensorFlow Serving takes its number
as version."""


def list_suffixes() -> dict[str, str]:
    """Return the suffix of each format here. That of a plug-in is a dot and its name."""
    return SUFFIXES | {name: f".{name}" for name in list_plugins(EXPORTERS) if name not in SUFFIXES}


def find_format(path: Path) -> str | None:
    """Return the format of an export by its name; None if it's none of them."""
    by_suffix = {suffix: format for format, suffix in list_suffixes().items() if suffix}
    return by_suffix.get(path.suffix, SAVED_MODEL if path.is_dir() else None)
