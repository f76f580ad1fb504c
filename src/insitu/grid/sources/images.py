"""Images in files of their own: a source is a group of files of one folder, each of which is a row."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import IO, Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from insitu.base.errors import DamagedImages, SizeNeeded, SourceError
from insitu.base.spec import Column
from insitu.base.wording import format_count
from insitu.grid.sources.base import Block, SourceOptions, rows_per_block
from insitu.grid.sources.file_groups import FileGroup, Member, read_file
from insitu.grid.sources.parallel import map_ordered
from insitu.grid.sources.pictures import (
    MOST_THREADS,
    SUFFIXES,
    Shape,
    Undecodable,
    batch_size,
    decode,
    load_pillow,
    measure,
    suggest_shape,
)

IMAGE = "image"
"""The column of images."""
_BATCH_FILE_BYTES = 16 << 10
"""Bytes of files from which on a thread takes no further image at once."""
_MOST_MEASURED, _MOST_MEASURED_URLS = 1000, 20
"""Images whose sizes are looked at to suggest one."""


class ImagesSource:
    format: ClassVar[str] = "images"
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES

    def __init__(self, path: Any, options: SourceOptions) -> None:
        self.path: FileGroup = path
        load_pillow()
        if options.images is None:
            raise size_needed([path])
        self._shape: Shape = options.images
        self._skips = options.skip_damaged
        self.columns: tuple[Column, ...] = (Column(IMAGE, "uint8", self._shape),)
        self.expected_rows = len(path.files)
        #: Whether `expected_rows` is exact.
        self.counts_rows = not options.skip_damaged
        #: What is wrong with each image that was passed over.
        self.skipped: list[str] = []

    def blocks(self, block_bytes: int, start: int = 0) -> Iterator[Block]:
        sizes = self.path.sizes()
        ends = list(itertools.accumulate(sizes))
        wanted = rows_per_block(math.prod(self._shape), block_bytes)
        problems: list[str] = []
        waiting: list[npt.NDArray[np.uint8]] = []
        batches = _cut_batches(sizes, start, batch_size(self._shape))
        with contextlib.closing(map_ordered(self._decode, batches, MOST_THREADS)) as decoded:
            for stop, rows, wrong in decoded:
                (self.skipped if self._skips else problems).extend(wrong)
                waiting.append(rows)
                count = sum(map(len, waiting))
                # After damage only the other damaged images are looked for, so that all can be named.
                if not problems and count and (count >= wanted or stop == len(sizes)):
                    yield Block({IMAGE: np.concatenate(waiting)}, count, ends[stop - 1], stop)
                    waiting.clear()
                elif problems:
                    waiting.clear()
        if problems:
            raise DamagedImages(tuple(problems))

    def _decode(self, batch: tuple[int, int]) -> tuple[int, npt.NDArray[np.uint8], list[str]]:
        """Return (the number behind the last image, the rows of those that are whole, what is wrong)."""
        first, stop = batch
        rows = np.empty((stop - first, *self._shape), np.uint8)
        count, problems = 0, []
        for member in self.path.files[first:stop]:
            try:
                rows[count] = decode(read_file(member), self._shape)
                count += 1
            except Undecodable as error:
                problems.append(f"{member} {error}")
        return stop, rows[:count], problems


def _cut_batches(sizes: Sequence[int], start: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield [first, stop) of images that one thread decodes at a time."""
    first, held = start, 0
    for number in range(start, len(sizes)):
        held += sizes[number]
        if held >= _BATCH_FILE_BYTES or number + 1 - first >= most:
            yield first, number + 1
            first, held = number + 1, 0
    if first < len(sizes):
        yield first, len(sizes)


def size_needed(groups: Sequence[FileGroup]) -> SizeNeeded:
    """Return the error for images whose size isn't given. It suggests the most common one."""
    files = [member for group in groups for member in group.files]
    most = _MOST_MEASURED_URLS if groups[0].is_url else _MOST_MEASURED
    shape = suggest_shape(map(_measure, files[:: -(-len(files) // most)]))
    return SizeNeeded(format_count(len(files), "image"), shape)


def _measure(member: Member) -> tuple[int, int, bool] | None:
    try:
        with member.open("rb") as file:
            return measure(cast("IO[bytes]", file))
    except OSError as error:
        raise SourceError(f"{member} can't be read: {error.strerror or error}") from error
