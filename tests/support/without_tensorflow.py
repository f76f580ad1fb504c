"""Runs a script of this folder as where TensorFlow isn't installed: without_tensorflow.py SCRIPT ARGUMENTS...

On JAX nothing needs it; but `keras.utils.set_random_seed` loads it where it can, for seconds in each process.
"""

from __future__ import annotations

import runpy
import sys

sys.modules["tensorflow"] = None  # type: ignore[assignment]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
