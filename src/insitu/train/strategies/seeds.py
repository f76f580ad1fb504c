"""Gives random generators of a process the job's seed, where the script has given them none."""

from __future__ import annotations

import sys


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
