"""Keras' functions of structures as they are on PyTorch, which do otherwise with dictionaries."""

from __future__ import annotations

import keras
import pytest


def use_torch_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put PyTorch's functions in place of those of the backend, for one test that is marked `torch`."""
    from keras.src.tree import torchtree_impl

    for name in ("flatten", "map_structure", "pack_sequence_as"):
        monkeypatch.setattr(keras.tree, name, getattr(torchtree_impl, name))
