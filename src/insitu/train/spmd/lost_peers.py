"""Names the task that was lost where a collective of XLA only says that it failed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import jax

from insitu.errors import PeerLost
from insitu.exchange import Group
from insitu.train.spmd.distributed import abandon

_BROKEN = re.compile("UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION")
"""How XLA's account of a collective that could not be done begins."""


@contextlib.contextmanager
def naming_lost_peers(group: Group | None) -> Iterator[None]:
    """Where a collective of XLA fails, the exchange knows who is gone: raises PeerLost with its name. `group`
    is that of all tasks, None where there is but one."""
    try:
        yield
    except PeerLost:
        abandon()
        raise
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if group is None or not _BROKEN.match(str(error)):
            raise
        abandon()
        group.barrier()
        raise
