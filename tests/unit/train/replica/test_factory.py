"""Replicas are made on the backends that have them, and refused on others."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from insitu.base.errors import TrainingError
from insitu.train.replica.factory import make_fused_replica, make_replica


@pytest.mark.parametrize("make", [make_replica, make_fused_replica])
def test_a_backend_without_replicas_is_named(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    with pytest.raises(TrainingError, match=r"Received: the 'numpy' backend.*Set KERAS_BACKEND"):
        make(None, None)
