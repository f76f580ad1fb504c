"""Data that needs no download: small noisy pictures of upright or level stripes."""

from __future__ import annotations

import numpy as np

ROWS, BATCH = 600, 48


def pictures(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures, float32[600, 12, 12, 1], and labels, int32[600]: 1 for upright stripes."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 2, ROWS).astype("int32")
    stripes = (np.arange(12) // 2 % 2).astype("float32")
    upright = np.broadcast_to(stripes, (12, 12))
    images = np.where(kind[:, None, None] == 1, upright, upright.T)
    return (images + rng.normal(0, 0.8, images.shape)).astype("float32")[..., None], kind
