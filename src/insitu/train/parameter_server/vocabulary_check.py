"""Compare, over the servers, the vocabularies that the workers look words up in.

Workers on servers don't meet. Each writes what it has before it reads what others have written, so of two
that differ at least the one that comes later finds it, before its first gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from insitu.train.parameter_server.server_marks import ServerMarks
from insitu.train.replica import find_vocabularies, refuse_vocabularies

_FIT = 0
"""What is kept of all fits, under the names of vocabularies, which no place in a fit has."""
_LARGEST = 1 << 52
"""Above all fingerprints: what a float64 holds."""


def check_vocabularies(marks: ServerMarks, shards: Sequence[int], model: Any = None) -> None:
    """Raise TrainingError where `model`, or a file that this task has read, has another vocabulary than that
    of the same name in another task. `shards` are those of this task."""
    different, others = [], set()
    for name, digest in sorted(find_vocabularies(model).items()):
        place, own = f"vocabulary: {name}", int(digest, 16) % _LARGEST or 1
        marks.set_data(_FIT, place, shards, own)
        strange = [s for s, known in enumerate(marks.read_data(_FIT, place)) if known not in (0, own)]
        if strange:
            different.append(name)
            others.update(strange)
    if different:
        where = ", ".join(map(str, sorted(others)))
        refuse_vocabularies(
            different, f"the workers of shards {where} have another one than that of shard {shards[0]}"
        )
