"""Keeps files up, beside the metadata store: makes copies and manifests, and removes garbage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from insitu.base.errors import InsituError
from insitu.base.spec import NodeId
from insitu.base.wording import format_count
from insitu.cluster.decide import rank_nodes
from insitu.cluster.files.asking import CLIENT_SECONDS, Suspects, ask_all, ask_first
from insitu.cluster.files.client import FileClient
from insitu.cluster.files.names_client import LocalNames
from insitu.cluster.files.names_guard import NamesGuard
from insitu.cluster.files.peers import Peers, View
from insitu.cluster.files.repairing import Repairer
from insitu.cluster.files.service import NameService
from insitu.grid.shared_files import (
    MAX_COPIES,
    Entry,
    FileManifest,
    GarbageList,
    NameTree,
    Origin,
    checksum_block,
    parse_manifest,
    read_state,
    split_key,
)
from insitu.grid.transfer import RateLimit
from insitu.metadata import MetadataStore

# Brings manifests on nodes to what the metadata store says: writes what is missing, and removes others.
#
# Manifests are listed first and names read afterwards, as it is done for blocks. So what is removed is of
# no file, or of one that was published meanwhile and gets another one. A manifest of another metadata store
# whose file this one doesn't know stays, with its blocks, until somebody says that it isn't needed


ROUND_SECONDS = 20.0
"""Seconds between two rounds at least."""
WRITER_SECONDS = 30.0
"""Seconds after which a writer's manifest goes if its file wasn't published."""
_AT_ONCE = 8
Listed = Mapping[NodeId, Mapping[str, float]]
"""The manifests of a volume that each node holds, and their ages in seconds."""


class ManifestUpkeep:
    """Keeps manifests up, in one thread."""

    def __init__(self, store: MetadataStore, client: FileClient, peers: Peers) -> None:
        self._store = store
        self._tree = NameTree(store)
        self._client = client
        self._peers = peers
        self._suspects = Suspects()
        #: Revision of the store and nodes at which all was done; and when there may be another round, by the
        #: caller's clock.
        self._done: tuple[int, frozenset[NodeId]] | None = None
        self._next = 0.0
        #: Blocks of files of other stores, by the key of the manifest.
        self._foreign: dict[str, frozenset[str]] = {}
        #: Blocks that stay though no file has them, by volume; None: it isn't known which.
        self.spared: dict[str, frozenset[str] | None] = {}
        #: Whether no node may have manifests of files of other stores that this one doesn't know.
        self.knows_all = True

    def advance(self, view: View, now: float, *, at_once: bool = False) -> None:
        """Do what is due, or everything `at_once`. Raises InsituError, OSError."""
        revision = self._store.range("files/", "", 1)[1]
        mark = revision, frozenset(view.alive)
        if not at_once and (mark == self._done or now < self._next):
            return
        self._next = now + ROUND_SECONDS
        origin = read_state(self._store).origin
        if origin is not None:
            self._done = mark if self._bring_up(view, origin, revision) else None

    def _bring_up(self, view: View, origin: Origin, revision: int) -> bool:
        """Return whether nothing is left to be done."""
        answers, failures = ask_all(
            view.alive,
            lambda node: self._peers.find(node, view).act("manifests", {}, seconds=CLIENT_SECONDS)[0]["held"],
            self._suspects,
            CLIENT_SECONDS,
        )
        is_done = not failures
        self.knows_all = not failures and (origin.is_whole or origin.forgets)
        volumes = {volume for held in answers.values() for volume in held} | {*self._tree.list_volumes()}
        for volume in sorted(volumes):
            listed = {node: held.get(volume, {}) for node, held in answers.items()}
            now = time.time()
            files, is_whole = self._tree.list_files(volume)
            wanted = _make_manifests(volume, files, origin, revision, now, listed)
            if not is_whole or not self._bring_up_volume(volume, wanted, listed, origin, view):
                is_done = False
        return is_done

    def _bring_up_volume(
        self, volume: str, wanted: Mapping[str, FileManifest], listed: Listed, origin: Origin, view: View
    ) -> bool:
        puts: list[tuple[NodeId, FileManifest]] = []
        drops: dict[NodeId, list[str]] = {node: [] for node in listed}
        for key, manifest in wanted.items():
            order = rank_nodes(manifest.beside, listed)
            having = [node for node in order if key in listed[node]]
            lacking = [node for node in order if node not in having]
            copies = manifest.entry.copies
            puts += [(node, manifest) for node in lacking[: max(0, copies - len(having))]]
            for node in having[copies:]:
                drops[node].append(key)
        # That of the volume says that all others are there.
        is_done = self._put_all([each for each in puts if each[1].path], view)
        is_done = is_done and self._put_all([each for each in puts if not each[1].path], view)
        known = {manifest.digest for manifest in wanted.values()}
        foreign: dict[str, list[NodeId]] = {}
        young = 0
        for node, held in listed.items():
            for key, age in held.items():
                digest, store = split_key(key)
                if key in wanted:
                    continue
                if not store and digest not in known and age < WRITER_SECONDS:
                    young += 1
                elif store in ("", origin.id) or digest in known or not digest or origin.forgets:
                    drops[node].append(key)
                else:
                    foreign.setdefault(key, []).append(node)
        if is_done:  # else what was there before stays
            for node, keys in drops.items():
                if keys:
                    self._peers.find(node, view).act("drop", {"volume": volume, "keys": keys})
        self._spare(volume, foreign, view)
        return is_done and not young

    def _put_all(self, puts: Collection[tuple[NodeId, FileManifest]], view: View) -> bool:
        """Write manifests to nodes. Return whether all were written."""

        def put(node: NodeId, manifest: FileManifest) -> bool:
            data = manifest.encode()
            fields = {"volume": manifest.volume, "key": manifest.key, "checksum": checksum_block(data)}
            try:
                self._peers.find(node, view).act("put", fields, data, seconds=CLIENT_SECONDS)
                return True
            except (InsituError, OSError) as error:
                logger.warning("%s: a manifest isn't written: %s", node, error)
                return False

        with ThreadPoolExecutor(_AT_ONCE) as threads:
            done = list(threads.map(lambda each: put(*each), puts))
        return all(done)

    def _spare(self, volume: str, foreign: Mapping[str, list[NodeId]], view: View) -> None:
        """Find the blocks of files of other stores, which nobody knows here."""
        if new := len(foreign.keys() - self._foreign.keys()):
            logger.warning(
                "%s: nodes hold %s of a head of before that this one doesn't know: `insitu repair` "
                "names them",
                *(volume, format_count(new, "file")),
            )
        blocks: frozenset[str] | None = frozenset()
        for key, nodes in foreign.items():
            if key not in self._foreign:
                try:
                    self._foreign[key] = self._read_blocks(volume, key, nodes, view)
                except (InsituError, OSError) as error:
                    logger.warning("%s: no block is removed now: %s", volume, error)
                    blocks = None
            if blocks is not None:
                blocks |= self._foreign[key]
        self.spared[volume] = blocks

    def _read_blocks(self, volume: str, key: str, nodes: list[NodeId], view: View) -> frozenset[str]:
        fields = {"volume": volume, "key": key}

        def read(node: NodeId) -> Entry:
            return parse_manifest(self._peers.find(node, view).act("get", fields)[1]).entry

        entry = ask_first(nodes, read, self._suspects, CLIENT_SECONDS)
        blocks = [*entry.lists, *entry.blocks]
        blocks += self._client.list_blocks(volume, entry.lists, ())
        return frozenset(block.key for block in blocks)


def _make_manifests(
    volume: str,
    files: Collection[tuple[str, Entry]],
    origin: Origin,
    revision: int,
    now: float,
    listed: Listed,
) -> dict[str, FileManifest]:
    """Return the manifests that a volume should have, by key."""
    made = [FileManifest(volume, path, entry) for path, entry in files if path]
    if files:
        # It says that all others are there, so it has the same copies on all nodes.
        itself = Entry(0, now, min(MAX_COPIES, max(1, len(listed))), version=revision)
        made.append(FileManifest(volume, "", itself, files=len(made)))
    marked = [replace(each, store=origin.id, generation=origin.generation, seen=revision) for each in made]
    return {manifest.key: manifest for manifest in marked}


logger = logging.getLogger("insitu")
SETTLED_SECONDS = 10.0
"""Seconds for which the nodes must be the same before copies are made: one that starts again has its own."""
REPAIR_SECONDS = 300.0
"""Seconds between two repairs while the nodes stay the same."""
REPAIR_RATE = 64 << 20
"""Bytes a second that a repair reads."""


class FileUpkeep:
    """Does what is due now and then."""

    def __init__(
        self, store: MetadataStore, peers: Peers, read_view: Callable[[], View], guard: NamesGuard
    ) -> None:
        self._tree = NameTree(store)
        self._garbage = GarbageList(store)
        self._peers = peers
        self._read_view = read_view
        self._suspects = Suspects()
        names = LocalNames(NameService(store))
        client = FileClient(names, peers, lambda *, fresh=False: read_view(), self._suspects)
        self._repairer = Repairer(client, peers)
        self._manifests = ManifestUpkeep(store, client, peers)
        self._guard = guard
        #: The nodes that live, and since when; those of the last repair, and when it was, by the caller's
        #: clock.
        self._settled: tuple[frozenset[NodeId], float] = (frozenset(), 0.0)
        self._repaired: tuple[frozenset[NodeId], float] = (frozenset(), 0.0)

    def advance(self, now: float) -> None:
        """Do what is due. `now` is of the monotonic clock. Raises InsituError, OSError."""
        view = self._read_view()
        nodes = frozenset(view.alive)
        if nodes != self._settled[0]:
            self._settled = nodes, now
        if not nodes:
            return
        self._guard.check(view)
        self._repairer.collect_garbage(self._garbage, view)
        was, at = self._repaired
        is_due = (nodes != was or now - at > REPAIR_SECONDS) and now - self._settled[1] >= SETTLED_SECONDS
        self._manifests.advance(view, now, at_once=is_due)
        if is_due:
            for volume in self._list_volumes(view):
                self._repair(volume, view)
            self._repaired = nodes, now

    def _list_volumes(self, view: View) -> list[str]:
        """Return the volumes that have names or blocks."""
        answers, _ = ask_all(
            view.alive,
            lambda node: self._peers.find(node, view).act("block_volumes", {})[0]["volumes"],
            self._suspects,
            1.0,
        )
        return sorted({*self._tree.list_volumes(), *(v for found in answers.values() for v in found)})

    def _repair(self, volume: str, view: View) -> None:
        list_files = partial(self._tree.list_files, volume)
        spared = self._manifests.spared.get(volume, frozenset()) if self._manifests.knows_all else None
        report = self._repairer.repair(volume, list_files, view, RateLimit(REPAIR_RATE), spared)
        if report.copied or report.removed:
            logger.info(
                "%s: %s copied, %d removed", volume, format_count(report.copied, "block"), report.removed
            )
        for path in report.lost:
            logger.warning("%s/%s: no node has all of it", volume, path)
