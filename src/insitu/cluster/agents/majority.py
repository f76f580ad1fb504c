"""Whether most agents still speak to the head of a home: else another node may take over by itself."""

from __future__ import annotations

import time

from insitu.cluster.agents.connection import ask_head
from insitu.cluster.agents.messages import parse_members
from insitu.cluster.agents.records import read_head, read_token
from insitu.cluster.decide import taking_over
from insitu.errors import ClusterError
from insitu.paths import Paths

_ASK_SECONDS = 2.0


def ask_for_majority(paths: Paths) -> float | None:
    """Return when most agents had last spoken to the head of this home, on this machine's monotonic clock.

    None: never. Raises InsituError where the head doesn't answer.
    """
    record = read_head(paths)
    if record is None or record.successor:
        return None
    answer = ask_head(
        record.address, read_token(paths), {"do": "nodes"}, _ASK_SECONDS, connect_seconds=_ASK_SECONDS
    )
    members = [m for m in parse_members(answer.get("members")).values() if m.state != "left"]
    return taking_over.find_last_majority(
        len(members), [m.heard for m in members if m.connection is not None]
    )


def check_majority(paths: Paths) -> None:
    """Raise ClusterError where a change of this home's catalogue may be lost: another node may take over, and
    wouldn't know of it."""
    record = read_head(paths)
    if record is None or record.take_over_after is None:
        return
    last = ask_for_majority(paths)
    seconds = record.take_over_after / 2
    if last is None or time.monotonic() - last > seconds:
        raise ClusterError(
            f"With --take-over-after the catalogue changes only while most agents reach its head. Received: "
            f"too few for {seconds:g} s. Bring them up again, or see whether another host has taken over"
        )
