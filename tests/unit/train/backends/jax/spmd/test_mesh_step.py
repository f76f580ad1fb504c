"""A step over a mesh is for JAX alone."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from insitu.base.errors import TrainingError
from insitu.train.backends.jax.spmd.program import make_mesh_step


def test_another_backend_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    anything: Any = None
    for backend in ("tensorflow", "torch"):
        monkeypatch.setattr(keras.backend, "backend", lambda backend=backend: backend)
        with pytest.raises(TrainingError, match=f"Received: the '{backend}' backend. Set KERAS_BACKEND=jax"):
            make_mesh_step(anything, anything, [], anything)
