"""Gives random generators of a process the job's seed, where the script has given them none."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

_state = {"seeded_here": False}
"""Whether `seed_unseeded` has set TensorFlow's global seed."""


def seed_unseeded(seed: int) -> None:
    """Set TensorFlow's global seed, unless the script has set it: shuffles of tf.data without a seed of their
    own then draw the same order in each process, and in one that replaces another.

    Other generators stay as they are. PyTorch's has the same seed in each process anyway. Whether a script
    has seeded NumPy's is unknown; `check_same_data` notices what follows.
    """
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return
    from tensorflow.python.eager import context

    if context.global_seed() is None:
        tensorflow.random.set_seed(seed)
        _state["seeded_here"] = True


@contextlib.contextmanager
def draw_by_worker(seed: int, worker: int | None) -> Iterator[None]:
    """While open, shuffles without a seed draw another order in each worker, unless the script has set a
    global seed. `seed` is the job's; with None for `worker` nothing changes."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or worker is None or not _state["seeded_here"]:
        yield
        return
    tensorflow.random.set_seed(seed + 1 + worker)
    try:
        yield
    finally:
        tensorflow.random.set_seed(seed)
