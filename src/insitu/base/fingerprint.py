"""FarmHash's Fingerprint64, which TensorFlow's hash buckets are made with, for many texts at once. Pure.

Texts of one length are hashed together: each step of the algorithm is one call of NumPy over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

CROSS_KEY = 0xDECAFCAFFE
"""What TensorFlow begins the hash of a crossed column with, unless a key is given."""

_K0 = np.uint64(0xC3A5C85C97CB3127)
_K1 = np.uint64(0xB492B66FBE98F273)
_K2 = np.uint64(0x9AE16A3B2F90404F)
_CAT = np.uint64(0xC6A4A7935BD1E995)
_WORD = np.dtype("<u8")


def fingerprints(texts: Sequence[bytes]) -> Hashes:
    """Return Fingerprint64 of each text: uint64[texts]."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    hashes = np.empty(len(texts), np.uint64)
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        data = np.frombuffer(b"".join(texts[row] for row in rows.tolist()), np.uint8)
        with np.errstate(over="ignore"):
            hashes[rows] = _hash_rows(data.reshape(len(rows), length))
    return hashes


def join_fingerprints(first: Hashes, second: Hashes) -> Hashes:
    """Return FingerprintCat64 of each pair: the hash of both together, in this order."""
    with np.errstate(over="ignore"):
        result = first ^ _CAT
        result = result ^ _mix(second * _CAT) * _CAT
        result = _mix(result * _CAT) * _CAT
        return _mix(result)


def _hash_rows(rows: npt.NDArray[np.uint8]) -> Hashes:
    length = rows.shape[1]
    if length > 64:
        return _hash_long(rows)
    if length > 32:
        return _hash_33_to_64(rows)
    if length > 16:
        return _hash_17_to_32(rows)
    if length >= 4:
        return _hash_4_to_16(rows)
    if length:
        return _hash_1_to_3(rows)
    return np.full(len(rows), _K2)


def _word(rows: npt.NDArray[np.uint8], start: int, size: int = 8) -> Hashes:
    """Return the little-endian number of `size` bytes from byte `start` of each row on."""
    raw = np.ascontiguousarray(rows[:, start : start + size])
    return raw.view(_WORD if size == 8 else f"<u{size}").reshape(-1).astype(np.uint64)


def _rotate(value: Hashes, bits: int) -> Hashes:
    return (value >> np.uint64(bits)) | (value << np.uint64(64 - bits))


def _mix(value: Hashes) -> Hashes:
    return value ^ (value >> np.uint64(47))


def _join(first: Hashes, second: Hashes, factor: np.uint64 | Hashes) -> Hashes:
    """Return HashLen16 of FarmHash."""
    inner = _mix((first ^ second) * factor)
    return _mix((second ^ inner) * factor) * factor


def _factor(rows: npt.NDArray[np.uint8]) -> np.uint64:
    return np.uint64((int(_K2) + 2 * rows.shape[1]) % (1 << 64))


def _hash_1_to_3(rows: npt.NDArray[np.uint8]) -> Hashes:
    length = rows.shape[1]
    first, middle, last = (rows[:, at].astype(np.uint64) for at in (0, length >> 1, length - 1))
    low = first + (middle << np.uint64(8))
    high = np.uint64(length) + (last << np.uint64(2))
    return _mix(low * _K2 ^ high * _K0) * _K2


def _hash_4_to_16(rows: npt.NDArray[np.uint8]) -> Hashes:
    length, factor = rows.shape[1], _factor(rows)
    if length < 8:
        first = np.uint64(length) + (_word(rows, 0, 4) << np.uint64(3))
        return _join(first, _word(rows, length - 4, 4), factor)
    a, b = _word(rows, 0) + _K2, _word(rows, length - 8)
    return _join(_rotate(b, 37) * factor + a, (_rotate(a, 25) + b) * factor, factor)


def _hash_17_to_32(rows: npt.NDArray[np.uint8]) -> Hashes:
    length, factor = rows.shape[1], _factor(rows)
    a, b = _word(rows, 0) * _K1, _word(rows, 8)
    c, d = _word(rows, length - 8) * factor, _word(rows, length - 16) * _K2
    return _join(_rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c, factor)


def _hash_33_to_64(rows: npt.NDArray[np.uint8]) -> Hashes:
    length, factor = rows.shape[1], _factor(rows)
    a, b = _word(rows, 0) * _K2, _word(rows, 8)
    c, d = _word(rows, length - 8) * factor, _word(rows, length - 16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    z = _join(y, a + _rotate(b + _K2, 18) + c, factor)
    e, f = _word(rows, 16) * factor, _word(rows, 24)
    g, h = (y + _word(rows, length - 32)) * factor, (z + _word(rows, length - 24)) * factor
    return _join(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, factor)


def _hash_long(rows: npt.NDArray[np.uint8]) -> Hashes:
    """Hash texts of more than 64 bytes: a state of 56 bytes takes 64 bytes at a time, the last ones twice."""
    length, count = rows.shape[1], len(rows)
    x = np.full(count, 81, np.uint64)
    y = x * _K1 + np.uint64(113)
    z = _mix(y * _K2 + np.uint64(113)) * _K2
    v = w = (np.zeros(count, np.uint64), np.zeros(count, np.uint64))
    x = x * _K2 + _word(rows, 0)
    for start in range(0, (length - 1) // 64 * 64, 64):
        x, y, z, v, w = _take_64(rows, start, (x, y, z, v, w), _K1, (1, 1))
    factor = _K1 + ((z & np.uint64(0xFF)) << np.uint64(1))
    w = (w[0] + np.uint64((length - 1) & 63), w[1])
    v = (v[0] + w[0], v[1])
    w = (w[0] + v[0], w[1])
    x, y, z, v, w = _take_64(rows, length - 64, (x, y, z, v, w), factor, (9, 9))
    left = _join(v[0], w[0], factor) + _mix(y) * _K0 + z
    return _join(left, _join(v[1], w[1], factor) + x, factor)


_Pair = tuple[Hashes, Hashes]
_State = tuple[Hashes, Hashes, Hashes, _Pair, _Pair]


def _take_64(
    rows: npt.NDArray[np.uint8],
    start: int,
    state: _State,
    factor: np.uint64 | Hashes,
    weights: tuple[int, int],
) -> _State:
    """Return the state after the 64 bytes from `start` on. `weights` are 1, and 9 for the last bytes."""
    x, y, z, v, w = state
    x = _rotate(x + y + v[0] + _word(rows, start + 8), 37) * factor
    y = _rotate(y + v[1] + _word(rows, start + 48), 42) * factor
    x = x ^ w[1] * np.uint64(weights[0])
    y = y + v[0] * np.uint64(weights[1]) + _word(rows, start + 40)
    z = _rotate(z + w[0], 33) * factor
    v = _weak(rows, start, v[1] * factor, x + w[0])
    w = _weak(rows, start + 32, z + w[1], y + _word(rows, start + 16))
    return z, y, x, v, w


def _weak(rows: npt.NDArray[np.uint8], start: int, a: Hashes, b: Hashes) -> _Pair:
    """Return WeakHashLen32WithSeeds of the 32 bytes from `start` on."""
    first, second, third, fourth = (_word(rows, start + at) for at in (0, 8, 16, 24))
    a = a + first
    b = _rotate(b + a + fourth, 21)
    total = a + second + third
    return total + fourth, b + _rotate(total, 44) + a
