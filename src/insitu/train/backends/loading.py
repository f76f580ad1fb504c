"""Find the backend that Keras uses, and load its folder."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from pathlib import Path

from insitu.base.config import BACKENDS
from insitu.base.errors import TrainingError
from insitu.train.backends.protocol import Backend


def active_backend() -> Backend:
    """Return Keras' backend. Raises TrainingError for one that insitu doesn't know."""
    return load_backend(active_name())


def active_name() -> str:
    """Return the name of the backend that Keras uses or would use, without importing it."""
    if "keras" in sys.modules:
        return str(sys.modules["keras"].backend.backend())
    if chosen := os.environ.get("KERAS_BACKEND"):
        return chosen
    home = Path(os.environ.get("KERAS_HOME") or "~/.keras").expanduser()
    try:
        return str(json.loads((home / "keras.json").read_text())["backend"])
    except (OSError, ValueError, KeyError, TypeError):
        return "tensorflow"


@functools.cache
def load_backend(name: str) -> Backend:
    """Return the backend of that name. Imports its folder, and not yet its library."""
    if name not in BACKENDS:
        raise TrainingError(
            "A strategy runs on the TensorFlow, JAX and PyTorch backends of Keras. Received: the "
            f"{name!r} backend. Set KERAS_BACKEND before keras is imported."
        )
    backend: Backend = importlib.import_module(f"insitu.train.backends.{name}").BACKEND
    return backend
