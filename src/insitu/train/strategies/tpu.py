"""Train synchronously over the cores of a TPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from insitu.base.context import Context
from insitu.base.errors import TrainingError
from insitu.train.backends import active_backend, active_name
from insitu.train.devices import Device, list_devices
from insitu.train.strategies.mirrored import MirroredStrategy


class TPUStrategy(MirroredStrategy):
    """Finds and initialises a TPU, then is the mirrored strategy over its cores.

    TensorFlow: a `TPUClusterResolver` for `tpu`, connected to and initialised. JAX: the TPU devices that JAX
    has found, which it initialises itself. PyTorch: `torch_xla`, if it is installed. None of it has been
    run on a TPU.

    Args:
        tpu: the TPU's name or address as TensorFlow's resolver takes it, or a `TPUClusterResolver`; empty for
            the one of this machine.
        context: who this process is; read from the environment by default.

    Raises:
        TrainingError: if there is no TPU; the message says what was looked for.

    Example:
        >>> strategy = insitu.TPUStrategy()  # doctest: +SKIP
    """

    def __init__(
        self,
        tpu: Any = "",
        *,
        context: Context | None = None,
        find: Callable[[Any], list[Device]] | None = None,
    ) -> None:
        """`find` returns the cores of a TPU. Tests replace it."""
        super().__init__((find or find_cores)(tpu), context=context)


def find_cores(tpu: Any) -> list[Device]:
    """Return the cores of `tpu`, ready to be used. Raises TrainingError if there are none."""
    backend = active_name()
    try:
        active_backend().start_tpu(tpu)
        cores = [device for device in list_devices() if device.kind == "tpu"]
    except TrainingError:
        raise
    except Exception as error:
        # Resolvers raise whatever their transport does; the first line says what is wrong.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TrainingError(f"{_NONE} Received: tpu={tpu!r} on {backend}, and: {reason}") from error
    if not cores:
        found = ", ".join(device.name for device in list_devices())
        raise TrainingError(f"{_NONE} Received: tpu={tpu!r} on {backend}, with the devices {found}.")
    return cores


_NONE = "TPUStrategy needs a TPU. Elsewhere use MirroredStrategy, which takes the devices that there are."
