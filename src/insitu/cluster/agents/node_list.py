"""Which agents a cluster has, by its head or by what the head has saved last."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from insitu.cluster.agents.connection import ask_head
from insitu.cluster.agents.messages import parse_members
from insitu.cluster.agents.records import HeadRecord, is_locked, list_agents, read_head, read_token
from insitu.cluster.agents.saved_members import read_kept_members
from insitu.cluster.decide import Member
from insitu.errors import ClusterError
from insitu.paths import Paths

_START_SECONDS = 60.0
_ANSWER_SECONDS = 10.0


def wait_for_record(paths: Paths) -> HeadRecord:
    """Return the record of a head that runs, or is about to."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        record = read_head(paths)
        if record is not None and record.pid:
            return record
        time.sleep(0.05)
    raise ClusterError(f"The head of {paths.home} must listen. Received: nothing in {paths.head}")


def read_nodes(paths: Paths) -> tuple[list[Member], str]:
    """Return the agents of the cluster that this home belongs to, and a notice about them, maybe empty.

    There are none where the home belongs to no cluster. Raises ClusterError where the head doesn't answer,
    unless this is its own home: then the agents are as it left them, their states unknown.
    """
    record = read_head(paths)
    if record is not None:
        if is_locked(paths.head_lock):
            return ask_for_nodes(wait_for_record(paths).address, read_token(paths)), ""
        notice = (
            "The head doesn't run, so the states of nodes are old. `insitu up` with --hosts or --engine, as "
            "before, starts it."
        )
        if record.successor:
            notice = f"The head at {record.successor} has taken over from the one of this home: run it there."
        known = read_kept_members(paths)
        return [replace(member, connection=None) for member in known.values()], notice if known else ""
    for found in list_agents(paths).values():
        return ask_for_nodes(found.head, read_token(paths)), ""
    return [], ""


def read_taking_over(paths: Paths) -> str:
    """Return how the head that answers this home has taken over from another one; "" where it hasn't, or none
    answers. Raises InputError."""
    record = read_head(paths)
    addresses = (
        [record.address] if record is not None else [each.head for each in list_agents(paths).values()]
    )
    for address in addresses[:1]:
        with contextlib.suppress(ClusterError):
            head = ask_head(address, read_token(paths), {"do": "nodes"}, _ANSWER_SECONDS).get("head")
            taken = head.get("taken_over") if isinstance(head, dict) else None
            return describe_taking_over(taken) if isinstance(taken, dict) else ""
    return ""


def describe_taking_over(taken: Mapping[str, Any]) -> str:
    """Return which node has taken over from which head, when, and why; see `HeadRecord.taken_over`."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(taken["at"])))
    return f"{taken['node']} has taken over from the head at {taken['from']}, {when}: {taken['why']}."


def ask_for_nodes(address: str, token: str) -> list[Member]:
    """Ask the head at `address` for the agents of its cluster. Raises InputError, ClusterError."""
    answer = ask_head(address, token, {"do": "nodes"}, _ANSWER_SECONDS)
    return list(parse_members(answer.get("members")).values())
