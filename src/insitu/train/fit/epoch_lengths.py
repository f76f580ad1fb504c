"""How many steps the epochs of a fit have, as far as that is known before they are done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpochLengths:
    """The lengths of a fit's epochs. Keras ends one when the data ends, or after `stride` steps."""

    #: Steps of the data; None if they aren't known, or none.
    whole: int | None
    #: Steps after which Keras ends an epoch though the data continues in the next; 0: it ends with the data.
    stride: int = 0

    @property
    def _lengths(self) -> tuple[int, int] | None:
        """Return (steps of what repeats, steps of each epoch in it but the last); None if not known."""
        if not self.whole:
            return (self.stride, self.stride) if self.stride else None
        return self.whole, min(self.stride, self.whole) or self.whole

    def locate(self, done: int) -> tuple[int, int] | None:
        """Return the (epoch, step) that follows `done` steps of a fit; None if that isn't known."""
        if self._lengths is None:
            return None
        whole, stride = self._lengths
        passes, rest = divmod(done, whole)
        epoch, step = divmod(rest, stride)
        return passes * -(-whole // stride) + epoch, step

    def count(self, epochs: int) -> int | None:
        """Return the steps of so many epochs from a fit's beginning; None if they aren't known."""
        if self._lengths is None:
            return None
        whole, stride = self._lengths
        passes, rest = divmod(epochs, -(-whole // stride))
        return passes * whole + rest * stride
