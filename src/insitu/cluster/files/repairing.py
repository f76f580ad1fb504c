"""Brings the copies of blocks to the number that their files ask for, and removes what no file has."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from insitu.base.errors import InsituError
from insitu.base.spec import NodeId
from insitu.cluster.decide import plan_repair
from insitu.cluster.files.asking import CLIENT_SECONDS, Suspects, ask_all
from insitu.cluster.files.client import FileClient
from insitu.cluster.files.peers import Peers, View
from insitu.grid.shared_files import Block, Entry, GarbageList, checksum_block
from insitu.grid.transfer import RateLimit

logger = logging.getLogger("insitu")
ORPHAN_SECONDS = 3600.0
"""Time after which blocks go that no file has. Who writes a file has them kept meanwhile."""
READ_ON_SECONDS = 30.0
"""Seconds for which the blocks of a file that was replaced or removed can still be read."""
ListFiles = Callable[[], tuple[list[tuple[str, Entry]], bool]]


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The outcome of a repair."""

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


@dataclass(slots=True)
class _Named:
    """The blocks that files have."""

    #: By key.
    blocks: dict[str, Block] = field(default_factory=dict)
    #: The number of copies that each must have, by key.
    wanted: dict[str, int] = field(default_factory=dict)
    #: The files that have each block, by key.
    paths: dict[str, str] = field(default_factory=dict)
    #: Files whose lists of blocks can't be read.
    unreadable: set[str] = field(default_factory=set)


class Repairer:
    """Repairs volumes, again and again. `read_on`: for how long blocks that no file has are read on."""

    def __init__(self, client: FileClient, peers: Peers, read_on: float = READ_ON_SECONDS) -> None:
        self._client = client
        self._peers = peers
        self._read_on = read_on
        self._suspects = Suspects()
        #: Since when a node has had a block that no file has, on the monotonic clock, by volume.
        self._unnamed: dict[str, dict[tuple[NodeId, str], float]] = {}
        #: Since when there has been a note of what is garbage, on the monotonic clock, by key.
        self._noted: dict[str, float] = {}

    def repair(
        self,
        volume: str,
        list_files: ListFiles,
        view: View,
        limit: RateLimit | None = None,
        spared: frozenset[str] | None = frozenset(),
    ) -> RepairReport:
        """Copy what has too few copies, from node to node, and remove what is too much.

        `list_files` returns the files of the volume, and whether these are all. It is called once the blocks
        are listed. So a block that was old then, and that no file has afterwards, is of no file. A writer
        that publishes it later has it kept before, and then it isn't old any more when it would be dropped.
        `spared` are blocks of no file that stay, None: all do. Raises InsituError or OSError if a node
        doesn't answer: it may have what seems to be missing.
        """
        held = self._list_held(volume, view)
        files, is_whole = list_files()
        named = self._read_blocks(volume, files)
        plan = plan_repair(named.wanted, held, list(view.alive))
        copied = moved = failed = 0
        for key, sources, targets in plan.copies:
            block = named.blocks[key]
            for target in targets:
                if self._copy(volume, block, sources, target, view):
                    copied, moved = copied + 1, moved + block.size
                else:
                    failed += 1
                if limit is not None:
                    limit.take(block.size)
        if copied and plan.surplus:  # copying takes long, and nodes may have lost theirs meanwhile
            now = plan_repair(named.wanted, self._list_held(volume, view), list(view.alive))
            plan = replace(plan, surplus=now.surplus)
        surplus: dict[NodeId, list[str]] = {}
        for key, node in plan.surplus:
            surplus.setdefault(node, []).append(key)
        removed = sum(self._drop(volume, node, keys, view, 0.0) for node, keys in surplus.items())
        if is_whole and not named.unreadable and spared is not None:
            removed += self._drop_unnamed(volume, held, named.wanted.keys() | spared, view)
        lost = {named.paths[key] for key in plan.lost} | named.unreadable
        return RepairReport(copied, moved, removed, failed, tuple(sorted(lost - {""})))

    def _list_held(self, volume: str, view: View) -> dict[NodeId, dict[str, float]]:
        answers, failures = ask_all(
            view.alive,
            lambda node: self._peers.find(node, view).act("held", {"volume": volume})[0]["held"],
            self._suspects,
            CLIENT_SECONDS,
        )
        if failures:
            raise next(iter(failures.values()))
        return {node: dict(ages) for node, ages in answers.items()}

    def _read_blocks(self, volume: str, files: list[tuple[str, Entry]]) -> _Named:
        named = _Named()
        for path, entry in files:
            every = list(entry.lists)
            try:
                every += self._client.list_blocks(volume, entry.lists, entry.blocks)
            except (InsituError, OSError):
                every += entry.blocks
                named.unreadable.add(path)
            for block in every:
                named.blocks[block.key] = block
                named.wanted[block.key] = entry.copies
                named.paths[block.key] = path
        return named

    def _drop_unnamed(
        self, volume: str, held: Mapping[NodeId, Mapping[str, float]], wanted: Collection[str], view: View
    ) -> int:
        """Remove the blocks that no file has and nobody has written or kept for ORPHAN_SECONDS."""
        now, before, removed = time.monotonic(), self._unnamed.get(volume, {}), 0
        seen = {
            (node, key): before.get((node, key), now)
            for node, ages in held.items()
            for key, age in ages.items()
            if key not in wanted and age > ORPHAN_SECONDS
        }
        for node in held:
            keys = [k for (n, k), since in seen.items() if n == node and now - since >= self._read_on]
            removed += self._drop(volume, node, keys, view, ORPHAN_SECONDS)
        self._unnamed[volume] = seen
        return removed

    def _drop(self, volume: str, node: NodeId, keys: list[str], view: View, older_than: float) -> int:
        if not keys:
            return 0
        fields = {"volume": volume, "keys": keys, "older_than": older_than}
        return int(self._peers.find(node, view).act("drop", fields)[0]["dropped"])

    def _copy(
        self, volume: str, block: Block, sources: tuple[NodeId, ...], target: NodeId, view: View
    ) -> bool:
        """Copy a block to a node from the first that has its bytes right. Return whether that was done."""
        fields = {"volume": volume, "key": block.key, "checksum": block.checksum}
        for source in self._suspects.order(sources):
            try:
                peer = self._peers.find(source, view)
                _, data = peer.act("get", fields, seconds=CLIENT_SECONDS)
                if checksum_block(data) != block.checksum:
                    peer.act("damaged", fields)
                    continue
                self._peers.find(target, view).act("put", fields, data, seconds=CLIENT_SECONDS)
                return True
            except (InsituError, OSError):
                continue
        return False

    def collect_garbage(self, garbage: GarbageList, view: View) -> None:
        """Remove the blocks of files that were replaced or removed long enough ago, on all nodes that answer.
        `repair` finds those of the others."""
        now = time.monotonic()
        self._noted = {key: self._noted.get(key, now) for key in garbage.list_keys()}
        for key in [key for key, since in self._noted.items() if now - since >= self._read_on]:
            for volume, part in garbage.collect(key):
                keys = [block.key for block in (*part.lists, *part.blocks)]
                try:
                    keys += [block.key for block in self._client.list_blocks(volume, part.lists, ())]
                except (InsituError, OSError) as error:
                    logger.warning("blocks of a file of %s go in an hour: %s", volume, error)
                if keys:
                    self._drop_everywhere(volume, keys, view)

    def _drop_everywhere(self, volume: str, keys: list[str], view: View) -> None:
        fields = {"volume": volume, "keys": keys}
        ask_all(
            view.alive,
            lambda node: self._peers.find(node, view).act("drop", fields),
            self._suspects,
            CLIENT_SECONDS,
        )
