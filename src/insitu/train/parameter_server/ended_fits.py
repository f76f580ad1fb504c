"""Remembers where a worker's fits on servers ended, also for a later incarnation of its task."""

from __future__ import annotations

import json

from insitu.context import Context
from insitu.grid import publish_file


class EndedFits:
    """The number of pushes of a shard up to the end of each fit that has ended, in this incarnation of the
    task or in an earlier one."""

    def __init__(self, context: Context) -> None:
        self._path = context.job.fits(context.task) if context.job is not None else None
        self._ends: list[int] = []

    def read(self) -> list[int]:
        """Return the ends, the first fit's first."""
        if not self._ends and self._path is not None and self._path.exists():
            self._ends = [int(number) for number in json.loads(self._path.read_text())]
        return self._ends

    def read_valid(self, applied: int) -> list[int]:
        """Return the ends, or none where the servers, which have `applied` so many pushes of a shard, are new
        and don't know them."""
        ends = self.read()
        if ends and applied < ends[-1]:
            ends = self._ends = []
        return ends

    def append(self, sequence: int) -> None:
        """Remember the end of the fit that follows."""
        self._ends = [*self.read(), sequence]
        if self._path is not None:
            publish_file(self._path, json.dumps(self._ends).encode())
