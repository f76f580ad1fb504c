"""Pure: hashes keys, and draws the first values of a table's rows from (seed, table, key) alone.

The hash of keys is the finalizer of SplitMix64 (Steele, Lea and Flood 2014). All functions
work on arrays of keys, in uint64 arithmetic modulo 2**64.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import InputError

Words = NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1, _MULTIPLIER_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BLOCK_ROWS = 4096
"""Rows drawn at a time, so that scratch memory stays in the cache."""


def mix64(words: Words) -> Words:
    """Return a hash of each word, every bit of which depends on every bit of the word."""
    mixed = words >> np.uint64(30)
    mixed ^= words
    mixed *= _MULTIPLIER_1
    spare = mixed >> np.uint64(27)
    mixed ^= spare
    mixed *= _MULTIPLIER_2
    np.right_shift(mixed, np.uint64(31), out=spare)
    mixed ^= spare
    return mixed


def stable_hash(*parts: object) -> int:
    """Return a hash of `parts` in [0, 2**64), the same in each process and on each machine."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def assign_servers(keys: NDArray[np.int64], servers: int) -> NDArray[np.int64]:
    """Return the server, in [0, servers), that holds each of `keys`, int64[n].

    Independent of the hash of `HashIndex`, so that the keys of one server still spread over its index.
    """
    if servers == 1:
        return np.zeros(len(keys), np.int64)
    high = mix64(keys.view(np.uint64) + np.uint64(_GOLDEN)) >> np.uint64(32)
    return ((high * np.uint64(servers)) >> np.uint64(32)).astype(np.int64)


class Initializer:
    """Draws the first values of rows.

    The config is `{"name": "uniform", "low": ..., "high": ...}`, `{"name": "normal", "mean": ...,
    "deviation": ...}` or `{"name": "constant", "value": ...}`.
    """

    def __init__(self, config: Mapping[str, Any] | str, seed: int, table: str) -> None:
        """Raise InputError for a config that isn't known."""
        settings = {"name": config} if isinstance(config, str) else dict(config)
        self._kind = str(settings.pop("name", ""))
        defaults = {
            "uniform": {"low": -0.05, "high": 0.05},
            "normal": {"mean": 0.0, "deviation": 0.05},
            "constant": {"value": 0.0},
        }
        if self._kind not in defaults:
            raise InputError(
                f"A table's initializer is one of {', '.join(defaults)}. Received: {self._kind!r}"
            )
        unknown = set(settings) - set(defaults[self._kind])
        if unknown:
            raise InputError(
                f"The initializer {self._kind} takes {', '.join(defaults[self._kind])}. "
                f"Received: {', '.join(sorted(unknown))}"
            )
        self._values = {**defaults[self._kind], **{k: float(v) for k, v in settings.items()}}
        self._seed = stable_hash("insitu table", seed, table)

    def fill(self, keys: NDArray[np.int64], rows: NDArray[Any]) -> None:
        """Write the first values of `keys`, int64[n], to `rows`, floating [n, width]."""
        values = self._values
        if self._kind == "constant":
            rows[...] = values["value"]
            return
        for low in range(0, len(keys), _BLOCK_ROWS):
            part = slice(low, low + _BLOCK_ROWS)
            if self._kind == "uniform":
                unit = self._draw_uniform(keys[part], rows.shape[1])
                unit *= values["high"] - values["low"]
                unit += values["low"]
                rows[part] = unit
            else:
                rows[part] = self._draw_normal(keys[part], rows.shape[1])

    def _draw_uniform(self, keys: NDArray[np.int64], width: int) -> NDArray[np.float64]:
        """Return numbers in [0, 1), [n, width], of 53 random bits."""
        starts = mix64(keys.view(np.uint64) ^ np.uint64(self._seed))
        steps = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        words = mix64(starts[:, None] + steps)
        words >>= np.uint64(11)
        unit = words.astype(np.float64)
        unit *= 2.0**-53
        return unit

    def _draw_normal(self, keys: NDArray[np.int64], width: int) -> NDArray[np.float64]:
        """Return normally distributed numbers, [n, width], by the Box-Muller transform."""
        pairs = -(-width // 2)
        unit = self._draw_uniform(keys, 2 * pairs)
        radius = np.sqrt(-2.0 * np.log1p(-unit[:, :pairs]))
        angle = unit[:, pairs:] * (2.0 * math.pi)
        drawn = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)[:, :width]
        drawn *= self._values["deviation"]
        drawn += self._values["mean"]
        return drawn
