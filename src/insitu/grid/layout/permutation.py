"""Pure: keyed permutations of [0, size) that need no table, however large `size` is."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from insitu.grid.layout.affinity import splitmix64

_ROUNDS = 8
_LEAST_BITS = 6
"""Halves of fewer bits don't mix well."""


class Permutation:
    """A permutation of [0, size) that follows from `key` alone, in constant memory and time per number.

    A Feistel network of eight rounds permutes the numbers of as many bits as `size` needs. A result beyond
    `size` is permuted again until it isn't ("cycle walking", Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002), on average less than twice. The rounds change the two halves in turn, so that
    halves of unequal length are possible, and mix by SplitMix64 (Steele, Lea and Flood 2014) with a key of
    their own. It is made to mix well, not to keep secrets.
    """

    def __init__(self, size: int, *key: int) -> None:
        """`size` is in [0, 2**62]; `key` are numbers in [0, 2**64), whose order matters."""
        if not 0 <= size <= 1 << 62:
            raise ValueError(f"A permutation has a size in [0, 2**62]. Received: {size}")
        self.size = size
        bits = max(_LEAST_BITS, (size - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._round_keys = _make_round_keys(key)

    def apply(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return what the permutation puts at the places `numbers`, which are in [0, size)."""
        return self._walk(numbers, forward=True)

    def invert(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the places at which the permutation has `numbers`, which are in [0, size)."""
        return self._walk(numbers, forward=False)

    def _walk(self, numbers: npt.NDArray[np.int64], *, forward: bool) -> npt.NDArray[np.int64]:
        values = self._permute(numbers.astype(np.uint64), forward)
        beyond = np.flatnonzero(values >= self.size)
        while len(beyond):
            values[beyond] = self._permute(values[beyond], forward)
            beyond = beyond[values[beyond] >= self.size]
        return values.astype(np.int64)

    def _permute(self, values: npt.NDArray[np.uint64], forward: bool) -> npt.NDArray[np.uint64]:
        """Run the network over numbers of as many bits as `size` needs, or run it backwards."""
        high, low = values >> self._low_bits, values & self._low_mask
        rounds: Iterable[int] = range(_ROUNDS) if forward else reversed(range(_ROUNDS))
        for number in rounds:
            key = self._round_keys[number]
            if number % 2:
                high ^= splitmix64(low ^ key) & self._high_mask
            else:
                low ^= splitmix64(high ^ key) & self._low_mask
        return high << self._low_bits | low


def _make_round_keys(key: Iterable[int]) -> npt.NDArray[np.uint64]:
    state: npt.NDArray[np.uint64] = np.zeros(1, np.uint64)
    for word in key:
        state = splitmix64(state ^ splitmix64(np.array([word], np.uint64)))
    return splitmix64(np.arange(_ROUNDS, dtype=np.uint64) + state)
