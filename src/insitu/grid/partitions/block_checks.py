"""Compares the blocks of a mapped file with their checksums, each before its rows are used first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from insitu.grid.partitions.address_space import AddressSpace
from insitu.grid.partitions.block_layout import BlockLayout, make_unreadable_error, view_of


class BlockChecks:
    """Which blocks of one mapped file are as they were written. Two threads may both check one."""

    def __init__(self, layout: BlockLayout, space: AddressSpace, offset: int, blocks: int) -> None:
        """The file is mapped from byte `offset` of `space` on."""
        self._layout = layout
        self._space = space
        self._offset = offset
        self._unchecked = np.ones(blocks, dtype=bool)
        #: Whether nothing is left to be checked.
        self.done = not blocks

    @property
    def all_blocks(self) -> npt.NDArray[np.int64]:
        """The numbers of all blocks."""
        return np.arange(len(self._unchecked))

    def check(self, blocks: npt.NDArray[np.int64]) -> None:
        """Check those of the given blocks that haven't been. Raises CorruptPartition."""
        if self.done:
            return
        for block in np.unique(blocks[self._unchecked[blocks]]).tolist():
            start, size = self._offset + self._layout.offset(block), self._layout.size(block)
            try:
                self._space.fault_in(start, size)
            except OSError as error:
                why = f"its block {block} can't be read ({error.strerror})"
                raise make_unreadable_error(self._layout.path, why) from error
            self._layout.check(block, view_of(self._space.memory[start : start + size]))
            self._unchecked[block] = False
        self.done = not self._unchecked.any()
