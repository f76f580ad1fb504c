"""The rows that tests/ignite/Load.java loads, as columns: what an import of them must give."""

from __future__ import annotations

import uuid
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt


def expected_types(keys: npt.NDArray[np.int64]) -> dict[str, Any]:
    """The columns of cache grid16_types for these keys."""
    i = keys.astype(np.int64)
    one = {"width": 100 + i, "country": [("DE", "JP")[int(k % 2)] for k in i], "inner.depth": i % 9}
    cents = np.where(i % 2 == 0, i, -i) * 12345
    return {
        "tiny": i % 100 - 50,
        "small": i - 500,
        "whole": i * 1000 - 7,
        "large": i * 10_000_000_000,
        "single": (i / 4).astype(np.float32),
        "twice": i / 3.0,
        "letter": ord("a") + i % 26,
        "flag": i % 3 == 0,
        "boxedTiny": i % 7,
        "boxedLarge": -i,
        "maybe": np.where(i % 5 == 0, np.nan, i * 0.5),
        "text": [f"row {k} \u00e4\u6f22" for k in i],
        "id": [
            list(uuid.UUID(int=(0x0123456789ABCDEF + int(k) << 64) | (-int(k) & (1 << 64) - 1)).bytes)
            for k in i
        ],
        "date": 1_600_000_000_000 + i,
        "stamp": (1_600_000_000_000 + i) // 1000 * 10**9 + 123_000_000 + i,
        "time": 3_600_000 + i,
        "price": [float(Decimal(int(c)).scaleb(-3)) for c in cents],
        "color": i % 3,
        "image": np.repeat(i.astype(np.uint8)[:, None], 784, axis=1),
        "shorts": np.stack([i, -i], 1),
        "ints": np.stack([i, -i, np.full_like(i, 3)], 1),
        "longs": np.stack([i, -i], 1),
        "floats": np.stack([i, i / 2], 1),
        "doubles": np.stack([i, i / 2], 1),
        "chars": np.stack([np.full_like(i, ord("x")), ord("a") + i % 26], 1),
        "flags": np.stack([i % 2 == 0, np.ones(len(i), bool)], 1),
        **{f"meta.{name}": values for name, values in one.items()},
        **{f"again.{name}": values for name, values in one.items()},
    }
