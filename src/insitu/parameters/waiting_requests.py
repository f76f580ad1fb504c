"""Requests that can't be answered yet, and what is said of those that have waited too long."""

from __future__ import annotations

from dataclasses import dataclass

from insitu.errors import ServerStalled
from insitu.parameters.connection import Connection
from insitu.parameters.rules import Message, modes
from insitu.parameters.server_state import ServerState


@dataclass(slots=True)
class WaitingRequest:
    """A request that can't be answered yet."""

    #: The connection that it came by and that the answer goes to.
    connection: Connection
    #: The request.
    message: Message
    #: Time on the monotonic clock at which it fails with ServerStalled.
    deadline: float


def make_stall_error(state: ServerState, message: Message, timeout: float) -> ServerStalled:
    """Return the error of a request that has waited `timeout` seconds, with what it has waited for."""
    if "place" in message.meta:
        awaited = state.find_shards_before(int(message.meta["sequence"]))
        return ServerStalled(
            "In mode sync all workers evaluate an insitu.dataset together, each its own shards. Received in "
            f"{timeout:g} s: nothing from some of shards {awaited}. Call evaluate in each worker, give it "
            "arrays, which each evaluates alone, or raise the stall timeout (--stall-timeout)"
        )
    shard = message.meta.get("shard")
    shard = shard if isinstance(shard, int) else None
    awaited = modes.find_awaited_shards(state.policy, state.push_state, shard)
    what = f"for pushes of shards {awaited}" if state.initialised else "for the chief's first values"
    return ServerStalled(
        f"Server {state.server} waited {timeout:g} s at version {state.push_state.version} "
        f"{what}. Look why those tasks don't go on, or raise the stall timeout (--stall-timeout)"
    )
