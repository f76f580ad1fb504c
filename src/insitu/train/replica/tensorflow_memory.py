"""Make tensors that share the memory of NumPy arrays."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from numpy.typing import NDArray

from insitu.exchange import ALIGNMENT


def borrow(array: NDArray[Any]) -> Any:
    """Return a tensor in the array's own memory, where its alignment and dtype allow. Use it before the array
    changes."""
    if array.ctypes.data % ALIGNMENT or array.dtype.kind == "V" or not array.flags.writeable:
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
