"""How gradients travel, as `tf.distribute` lets scripts choose it.

insitu has one way between processes (its exchange, `"ring"`) and XLA's collectives on JAX (`"xla"`), which
are NCCL between GPUs. A choice that the devices can't follow isn't followed, and a line on stderr says so, as
TensorFlow's log does: the numbers are the same.
"""

from __future__ import annotations

import enum
import json
import sys
from dataclasses import dataclass
from typing import Any

from insitu.base.context import Context
from insitu.base.errors import GridError, InputError
from insitu.grid import publish_file


class CommunicationImplementation(enum.Enum):
    """How tasks add up gradients, as `tf.distribute.experimental.CommunicationImplementation`."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """How tasks add up gradients, as `tf.distribute.experimental.CommunicationOptions`."""

    #: Bytes of gradients that are sent together. insitu sends all together; the number changes nothing.
    bytes_per_pack: int = 0
    #: Seconds that a worker waits for the others; None: those of the job's `--stall-timeout`.
    timeout_seconds: float | None = None
    #: The way that gradients take.
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise InputError(f"bytes_per_pack must be 0 or more. Received: {self.bytes_per_pack}")
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise InputError(f"timeout_seconds must be above 0. Received: {self.timeout_seconds}")
        _name_of(self.implementation)


def CollectiveHints(bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> CommunicationOptions:
    """Return CommunicationOptions, as TensorFlow's old name for them does."""
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


def _name_of(implementation: Any) -> str:
    """Return AUTO, RING or NCCL for a member of an enum of insitu or of TensorFlow, or its name."""
    name = str(getattr(implementation, "value", implementation)).upper()
    if name not in CommunicationImplementation.__members__:
        raise InputError(
            "implementation is a CommunicationImplementation: AUTO, RING or NCCL. Received: "
            f"{implementation!r}"
        )
    return name


def choose_communication(implementation: Any, backend: str, accelerators: bool) -> tuple[str, str]:
    """Return (communication, a note for the user, maybe empty) for a CommunicationImplementation."""
    name = _name_of(implementation)
    if name == "AUTO":
        return "auto", ""
    if name == "RING":
        return "ring", ""
    if backend == "jax" and accelerators:
        return "xla", ""
    return "ring", (
        "communication: ring. NCCL was asked for, which connects GPUs and is used on JAX; here are "
        f"{'GPUs' if accelerators else 'CPUs'} on {backend}."
    )


class ReductionToOneDevice:
    """Adds up gradients on one device, and copies the sum to the others.

    Example:
        >>> strategy = insitu.MirroredStrategy(["cpu:0"], insitu.ReductionToOneDevice())
    """

    def __init__(self, reduce_to_device: Any = None, accumulation_fn: Any = None) -> None:
        if reduce_to_device is not None or accumulation_fn is not None:
            raise InputError(
                "Gradients are added in the order of the devices. Received: reduce_to_device="
                f"{reduce_to_device!r}, accumulation_fn={accumulation_fn!r}. Leave both out."
            )


class HierarchicalCopyAllReduce:
    """Adds up gradients of GPUs in groups. Here they are added on one device, as TensorFlow does on CPUs.

    Example:
        >>> strategy = insitu.MirroredStrategy(["cpu:0"], insitu.HierarchicalCopyAllReduce(num_packs=2))
    """

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = _check_packs(num_packs)


class NcclAllReduce:
    """Adds up gradients of GPUs by NCCL: on JAX. Elsewhere they are added on one device.

    Example:
        >>> strategy = insitu.MirroredStrategy(["cpu:0"], insitu.NcclAllReduce())
    """

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = _check_packs(num_packs)


def _check_packs(packs: int) -> int:
    if packs < 0:
        raise InputError(f"num_packs must be 0 or more. Received: {packs}")
    return packs


CROSS_DEVICE_OPS = ("ReductionToOneDevice", "HierarchicalCopyAllReduce", "NcclAllReduce")


def choose_reduction(ops: Any, backend: str, kinds: set[str]) -> tuple[str, str]:
    """Return (how gradients of one process' devices are added up, a note for the user, maybe empty).

    `ops` is what a script gave as `cross_device_ops`, of insitu or of TensorFlow; `kinds` are those of the
    devices.
    """
    by_xla = backend == "jax"
    collective = "NCCL" if kinds == {"gpu"} else "XLA's own"
    way = f"one program over a mesh, {collective} collectives" if by_xla else "copies, added on one device"
    name = type(ops).__name__
    if ops is None or (name == "ReductionToOneDevice" and not by_xla):
        return way, ""
    if name not in CROSS_DEVICE_OPS:
        raise InputError(
            f"cross_device_ops is one of {', '.join(f'insitu.{each}()' for each in CROSS_DEVICE_OPS)}. "
            f"Received: {ops!r}"
        )
    if name == "NcclAllReduce" and by_xla and kinds == {"gpu"}:
        return way, ""
    return way, f"cross_device_ops: {name} isn't what {'/'.join(sorted(kinds))} on {backend} do here: {way}."


def tell(note: str, *, is_chief: bool) -> None:
    """Print a note on stderr, once for all tasks."""
    if note and is_chief:
        sys.stderr.write(f"[insitu] {note}\n")


def publish_choice(context: Context, strategy: str, way: str) -> None:
    """Have `insitu describe` show how the gradients of a job travel."""
    if context.job is not None and context.is_chief:
        choice = {"strategy": strategy, "gradients": way}
        try:
            publish_file(context.job.strategy(context.task), json.dumps(choice).encode())
        except (GridError, OSError) as error:
            tell(f"How gradients travel can't be written down: {error}. Training continues.", is_chief=True)


__all__ = [
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReductionToOneDevice",
]
