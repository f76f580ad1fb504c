"""Compare, over the servers, the data that the workers of a synchronous fit were given.

Each worker takes its part of each global batch, so all must be given the same. Workers on servers don't meet.
But where servers wait for gradients, what others wrote before they pushed theirs is there when a step ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from insitu.train.elastic import LoopPosition
from insitu.train.fit import check_same_data
from insitu.train.parameter_server.server_marks import ServerMarks
from insitu.train.replica import ShardBatch

CHECK_INTERVAL = 100
"""Steps of an epoch from one comparison to the next. Each compares all batches since the one before."""
_LARGEST = 1 << 52
"""Above all fingerprints: what a float64 holds."""


class DataCheck:
    """Compares fingerprints of batches in the first step of an epoch, in each `CHECK_INTERVAL`-th, and at the
    end of a fit. Gradients that come late may be of workers that haven't come to that step: they aren't
    waited for."""

    def __init__(self, marks: ServerMarks, shards: Sequence[int]) -> None:
        """`shards` are those of this task."""
        self._marks = marks
        self._shards = shards
        #: The number of the fit. Written by `begin`.
        self._fit = 0
        #: The fingerprint of all batches since the last comparison; None where some were trained before this
        #: task was restarted. Written by all methods.
        self._seen: int | None = None
        #: What was written and is to be compared: (name of the place, fingerprint, what an error calls it).
        self._written: tuple[str, int, object] | None = None
        #: The place behind the last step. Written by `note`.
        self._last: tuple[int, int] = (0, 0)

    def begin(self, fit: int, *, resumed: bool) -> None:
        """Begin a fit, or go on in its middle where it was `resumed`."""
        self._fit, self._seen, self._written = fit, None if resumed else 0, None

    def note(self, position: LoopPosition, parts: Sequence[ShardBatch]) -> None:
        """Note the batch of a step before its gradients are pushed."""
        fingerprint = parts[0].fingerprint if parts else 0
        if not fingerprint:  # nothing that must be the same
            return
        checks = position.step % CHECK_INTERVAL == 0
        if self._seen is not None:
            self._seen = (self._seen * 31 + fingerprint) % _LARGEST
            if checks:
                self._write(f"{position.epoch} {position.step}", self._seen, position)
        if checks:
            self._seen = 0
        self._last = position.epoch, position.step

    def note_end(self) -> None:
        """Note the batches since the last comparison, before the end of a fit is waited for."""
        if self._seen:
            self._write(f"{self._last} end", self._seen, f"the end of fit {self._fit}")
        self._seen = None

    def compare(self) -> None:
        """Compare what was noted, once the servers have the gradients. Raises InputError where workers were
        given different data, in each that finds it."""
        if self._written is None:
            return
        (place, own, where), self._written = self._written, None
        fingerprints = self._marks.read_data(self._fit, place)
        check_same_data([number or own for number in fingerprints], where)

    def _write(self, place: str, seen: int, where: object) -> None:
        fingerprint = seen or 1  # 0 means that there is none
        self._written = place, fingerprint, where
        self._marks.set_data(self._fit, place, self._shards, fingerprint)
