"""Which agents a cluster has, by its head or by what the head has saved last."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from insitu.base.errors import ClusterError, InsituError
from insitu.base.paths import Paths
from insitu.cluster.decide import Member
from insitu.cluster.wire.connection import ask_head
from insitu.cluster.wire.messages import parse_members
from insitu.cluster.wire.records import HeadRecord, is_locked, list_agents, read_head, read_token
from insitu.cluster.wire.saved_members import read_kept_members
from insitu.metadata import HEAD_KEY, open_etcd, read_leader, read_settings

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


def find_head(paths: Paths) -> str:
    """Return where the head of this home's cluster listens, as far as this home can know; empty: nowhere."""
    record = read_head(paths)
    own = "" if record is None else record.address
    settings = read_settings(paths)
    if settings is None or is_locked(paths.head_lock):
        return own
    with contextlib.suppress(InsituError), contextlib.closing(open_etcd(settings)) as store:
        leader = read_leader(store.get([HEAD_KEY])[0].get(HEAD_KEY))
        return "" if leader is None else leader.address
    return own


def find_successor(paths: Paths, record: HeadRecord) -> str:
    """Return where another head leads than that of this home, which doesn't run; empty: none does."""
    if record.replaced_by or not paths.metadata_settings.exists():
        return record.replaced_by
    found = find_head(paths)
    return "" if found == record.address else found


def read_nodes(paths: Paths, seconds: float = _ANSWER_SECONDS) -> tuple[list[Member], str]:
    """Return the agents of the cluster that this home belongs to, and a notice about them, maybe empty.

    There are none where the home belongs to no cluster. Raises ClusterError if the head doesn't answer,
    unless this is its own home: then the agents are as it left them, their states unknown.
    """
    record = read_head(paths)
    if record is not None:
        if is_locked(paths.head_lock):
            return ask_for_nodes(wait_for_record(paths).address, read_token(paths), seconds), ""
        notice = (
            "The head doesn't run, so the states of nodes are old. `insitu up` with --hosts or --engine, as "
            "before, starts it."
        )
        if address := find_successor(paths, record):
            notice = f"The head at {address} has replaced the one of this home: run it there."
        known = read_kept_members(paths)
        return [replace(member, connection=None) for member in known.values()], notice if known else ""
    for found in list_agents(paths).values():
        return ask_for_nodes(found.head, read_token(paths), seconds), ""
    return [], ""


def read_replacement(paths: Paths) -> str:
    """Return which head the one that answers this home has replaced; "" if none, or none answers. Raises
    InputError."""
    record = read_head(paths)
    addresses = (
        [record.address] if record is not None else [each.head for each in list_agents(paths).values()]
    )
    for address in addresses[:1]:
        with contextlib.suppress(ClusterError):
            head = ask_head(address, read_token(paths), {"do": "nodes"}, _ANSWER_SECONDS).get("head")
            before = head.get("replaces") if isinstance(head, dict) else None
            return describe_replacement(address, before) if isinstance(before, dict) else ""
    return ""


def describe_replacement(address: str, before: Mapping[str, Any]) -> str:
    """Return which head the one at `address` has replaced, and when; see `HeadRecord.replaces`."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(before["at"])))
    return f"The head at {address} has replaced the one at {before['head']}, {when}."


def ask_for_nodes(address: str, token: str, seconds: float = _ANSWER_SECONDS) -> list[Member]:
    """Ask the head at `address` for the agents of its cluster. Raises InputError, ClusterError."""
    answer = ask_head(address, token, {"do": "nodes"}, seconds, connect_seconds=seconds)
    return list(parse_members(answer.get("members")).values())
