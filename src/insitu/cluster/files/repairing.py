"""Brings the copies of a volume's blocks to the number that their files are to have."""

from __future__ import annotations

import time
from dataclasses import dataclass

from insitu.cluster.decide import plan_repair
from insitu.cluster.files.peers import Peers, View
from insitu.errors import InsituError
from insitu.grid.shared_files import Block, Entry, checksum_block
from insitu.grid.transfer import RateLimit
from insitu.spec import NodeId

ORPHAN_SECONDS = 3600.0
"""Age from which blocks go that no file has: a file whose writing takes longer between two blocks is lost."""


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


def repair_volume(
    volume: str, files: list[Entry], peers: Peers, view: View, limit: RateLimit | None, *, clean: bool
) -> RepairReport:
    """Copy what has too few copies, from node to node, and remove what is too much.

    `files` are all of the volume. With `clean` old blocks that none of them has go, too: only where `files`
    are known to be complete. Raises InsituError or OSError where a node doesn't answer: it may have what
    seems to be missing.
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
    if clean:
        now = time.time()
        for node, keys in held.items():
            old = [k for k, at in keys.items() if k not in wanted and now - float(at) > ORPHAN_SECONDS]
            extra.setdefault(node, []).extend(old)
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
