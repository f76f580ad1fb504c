"""Brings the copies of a volume's blocks to the number that their files are to have."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from insitu.cluster.decide import plan_repair
from insitu.cluster.files.peers import Peers, View
from insitu.errors import InsituError
from insitu.grid.shared_files import Block, Entry, checksum_block
from insitu.grid.transfer import RateLimit
from insitu.spec import NodeId

ORPHAN_SECONDS = 3600.0
"""Time after which blocks go that no file has. Who writes a file has them kept meanwhile."""
FindOld = Callable[[str, NodeId, Mapping[str, float]], list[str]]
"""Returns which of the blocks that no file has are to go, given volume, node, and by key when they were
written or kept last by the clock of that node."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair has done."""

    #: Copies that were made.
    copied: int
    #: Their bytes.
    bytes: int
    #: Copies that were removed: more than asked for, or of no file.
    removed: int
    #: Blocks that couldn't be copied now.
    failed: int
    #: Files of which no node has a block, by path.
    lost: tuple[str, ...]


class OrphanWatch:
    """Notes how long nodes have had blocks that no file has.

    Clocks of nodes may differ, and jump, so that alone counts which passes on this process's monotonic clock
    while a block is seen and nobody has it kept.
    """

    def __init__(self) -> None:
        #: By volume, of each node and block: when it was written or kept last by the node's clock, and since
        #: when that has been so.
        self._seen: dict[str, dict[tuple[NodeId, str], tuple[float, float]]] = {}

    def find_old(self, volume: str, node: NodeId, unnamed: Mapping[str, float]) -> list[str]:
        """Return the blocks that have been without a file for ORPHAN_SECONDS. See `FindOld`."""
        now, before = time.monotonic(), self._seen.setdefault(volume, {})
        seen = {}
        for key, mark in unnamed.items():
            known = before.get((node, key))
            seen[node, key] = known if known is not None and known[0] == mark else (mark, now)
        others = {each: since for each, since in before.items() if each[0] != node}
        self._seen[volume] = {**others, **seen}
        return [key for (_, key), (_, since) in seen.items() if now - since > ORPHAN_SECONDS]


def find_old_here(volume: str, node: NodeId, unnamed: Mapping[str, float]) -> list[str]:
    """Return the blocks that were written or kept ORPHAN_SECONDS ago, by the clock of this machine, which is
    that of all nodes. See `FindOld`."""
    now = time.time()
    return [key for key, at in unnamed.items() if now - at > ORPHAN_SECONDS]


def repair_volume(
    volume: str,
    files: list[Entry],
    peers: Peers,
    view: View,
    limit: RateLimit | None,
    find_old: FindOld | None,
) -> RepairReport:
    """Copy what has too few copies, from node to node, and remove what is too much.

    `files` are all of the volume. Blocks that none of them has go, too, if `find_old` says so, which is given
    only where `files` are known to be complete. Raises InsituError or OSError where a node doesn't answer: it
    may have what seems to be missing.
    """
    held = {}
    for node in view.alive:
        held[node] = dict(peers.find(node, view).act("held", {"volume": volume})[0]["held"])
    blocks = {block.key: block for entry in files for block in entry.blocks}
    wanted = {block.key: entry.copies for entry in files for block in entry.blocks}
    plan = plan_repair(wanted, held, list(view.alive))
    copied = moved = failed = removed = 0
    for key, sources, targets in plan.copies:
        for target in targets:
            if _copy(volume, blocks[key], sources, target, peers, view):
                copied, moved = copied + 1, moved + blocks[key].size
            else:
                failed += 1
            if limit is not None:
                limit.take(blocks[key].size)
    extra: dict[NodeId, list[str]] = {}
    for key, node in plan.surplus:
        extra.setdefault(node, []).append(key)
    if find_old is not None:
        for node, keys in held.items():
            unnamed = {key: float(at) for key, at in keys.items() if key not in wanted}
            extra.setdefault(node, []).extend(find_old(volume, node, unnamed))
    for node, unneeded in extra.items():
        if unneeded:
            answer, _ = peers.find(node, view).act("drop", {"volume": volume, "keys": unneeded})
            removed += int(answer["dropped"])
    lost = set(plan.lost)
    paths = sorted(e.path for e in files if any(block.key in lost for block in e.blocks))
    return RepairReport(copied, moved, removed, failed, tuple(paths))


def _copy(
    volume: str, block: Block, sources: tuple[NodeId, ...], target: NodeId, peers: Peers, view: View
) -> bool:
    """Copy a block to a node from the first that has its bytes right. Return whether that was done."""
    fields = {"volume": volume, "key": block.key, "checksum": block.checksum}
    for source in sources:
        try:
            _, data = peers.find(source, view).act("get", fields)
            if checksum_block(data) != block.checksum:
                peers.find(source, view).act("damaged", fields)
                continue
            peers.find(target, view).act("put", fields, data)
            return True
        except (InsituError, OSError):
            continue
    return False
