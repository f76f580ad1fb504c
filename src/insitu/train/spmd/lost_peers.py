"""Name the lost task where a collective of XLA only says that it failed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import jax

from insitu.errors import PeerLost
from insitu.exchange import Group
from insitu.train.spmd.distributed import skip_shutdown

_COLLECTIVE_FAILED = re.compile(
    "UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION"
)
"""How XLA's account of a collective that could not be done begins."""


@contextlib.contextmanager
def report_lost_peers(group: Group | None) -> Iterator[None]:
    """Raise PeerLost, with the name of the lost task, where a collective of XLA fails inside. `group`, that
    of all tasks, knows the name; None for a single task."""
    try:
        yield
    except PeerLost:
        skip_shutdown()
        raise
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if group is None or not _COLLECTIVE_FAILED.match(str(error)):
            raise
        skip_shutdown()
        group.barrier()
        raise
