"""Writes clicks.npz: users, the items they saw, and whether they clicked.

    python make_clicks.py [FILE] [ROWS]

Users and items are numbers in [0, 10 million), drawn by a Zipf law: few are common, most are rare. Each
number has a hidden taste, a vector of four dimensions. A user is likely to click if both tastes agree.
"""

import sys

import numpy as np

KEYS = 10_000_000
TASTES = 4


def draw(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return keys, int64[count], drawn by a Zipf law of exponent 1.15 and scattered over [0, KEYS)."""
    ranks = rng.zipf(1.15, 4 * count)
    ranks = ranks[ranks <= KEYS][:count].astype(np.int64)
    return ranks * 7_919_999 % KEYS


def tastes(keys: np.ndarray, salt: int) -> np.ndarray:
    """Return each key's taste, float64[count, TASTES]: one of 16 unit vectors, by a hash of the key."""
    chosen = ((keys + salt).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(60)
    directions = np.random.default_rng(salt).normal(size=(16, TASTES))
    return directions[chosen] / np.linalg.norm(directions, axis=1)[chosen, None]


def clicks(count: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    user, item = draw(rng, count), draw(rng, count)
    agreement = (tastes(user, 1) * tastes(item, 2)).sum(1)
    chance = 1 / (1 + np.exp(-6 * agreement))
    return {"user": user, "item": item, "label": (rng.random(count) < chance).astype(np.int64)}


if __name__ == "__main__":
    rows = int(sys.argv[2]) if len(sys.argv) > 2 else 400_000
    np.savez(sys.argv[1] if len(sys.argv) > 1 else "clicks.npz", **clicks(rows, 0))
