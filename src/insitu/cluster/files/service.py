"""The part of a node in the file system: it answers for its store, and for the volumes that it leads.

The first node of a volume's order leads it. Before a change it asks the others who know the names whether
they have seen something newer, and brings the change to them before it answers. When it can't be reached,
the next one leads: it has what was committed. A leader that doesn't reach most of the nodes changes nothing,
see `may_write`. Two nodes can lead a volume for some seconds, while just the link between them is cut: each
makes whole changes, and of each path the newer one counts later.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from insitu.cluster.decide import count_name_copies, may_write, rank_nodes
from insitu.cluster.files.peers import Fields, Peers, Unreachable, View, describe_error
from insitu.errors import InputError, InsituError
from insitu.grid.shared_files import (
    Commit,
    FileStore,
    NameTable,
    check_path,
    check_volume,
    encode_entries,
    parse_entries,
    parse_entry,
)
from insitu.spec import NodeId

logger = logging.getLogger("insitu")
DROP_SECONDS = 30.0
"""Seconds for which the blocks of a file that was replaced can still be read."""
LIST_PAGE = 1000
_AT_ONCE = 16
_REACH_SECONDS = 3.0
"""Seconds for which is believed that a node can be reached, or can't."""
_MOST_AT_ONCE = 64
"""Requests that a node serves at the same time, each with a block in memory; others wait."""
_BUSY_SECONDS = 3.0
_AT_ONCE_ALWAYS = ("ping", "newest", "states", "entries", "merge", "volumes")
_CHANGES = ("publish", "rename", "remove", "folder")


class FileService:
    """Answers for one store. For several threads."""

    def __init__(
        self,
        store: FileStore,
        peers: Peers,
        read_view: Callable[[], View],
        drop_seconds: float = DROP_SECONDS,
    ) -> None:
        """With `drop_seconds` 0 replaced blocks go at once: for processes that don't live long."""
        self._drop_seconds = drop_seconds
        self._store = store
        self._names: NameTable = store.names
        self._peers = peers
        self._read_view = read_view
        self._node = store.node
        self._locks: dict[str, threading.Lock] = {}
        #: The nodes that lived when the names of a volume were last compared with theirs, and this node's own
        #: table of names, by volume.
        self._compared: dict[str, tuple[frozenset[NodeId], tuple[int, ...]]] = {}
        #: What is to be dropped when, on the monotonic clock: (time, volume, keys).
        self._drops: list[tuple[float, str, tuple[str, ...]]] = []
        #: Whether a node could be reached, and when that was tried, on the monotonic clock.
        self._reached: dict[NodeId, tuple[bool, float]] = {}
        self._guard = threading.Lock()
        self._busy = threading.BoundedSemaphore(_MOST_AT_ONCE)

    @property
    def store(self) -> FileStore:
        """The store that it answers for."""
        return self._store

    def act(self, kind: str, fields: Fields, payload: bytes = b"") -> tuple[Fields, bytes]:
        """Do what is asked for. Raises InputError, GridError, OSError."""
        if self._store.knows(kind):
            return self._store.act(kind, fields, payload)
        if kind not in ("look", "list", "children", *_CHANGES):
            raise InputError(f"A node doesn't know this about files. Received: {kind!r:.100}")
        volume, path = check_volume(fields.get("volume")), check_path(fields.get("path"))
        view = self._read_view()
        leader = self._find_leader(volume, fields.get("skip"), view)
        if leader != self._node:
            return {"moved": leader}, b""
        lock = self._locks.setdefault(volume, threading.Lock())
        if kind in _CHANGES:
            with lock:
                return self._change(kind, volume, path, fields, view), b""
        if not self._has_compared(volume, view):
            with lock:
                self._compare_with_all(volume, view)
        return self._read(kind, volume, path, fields), b""

    def answer(self, kind: str, fields: Fields, payload: bytes) -> tuple[Fields, bytes]:
        """Do what is asked for, and return failures as answers."""
        # What other nodes ask while they change a name never waits for what may wait for them.
        waits = kind not in _AT_ONCE_ALWAYS
        if waits and not self._busy.acquire(timeout=_BUSY_SECONDS):
            return describe_error(OSError(errno.EAGAIN, "the node has too much to do")), b""
        try:
            return self.act(kind, fields, payload)
        except (InsituError, OSError) as error:
            return describe_error(error), b""
        finally:
            if waits:
                self._busy.release()

    # Who leads

    def _find_leader(self, volume: str, skip: Any, view: View) -> NodeId:
        """Return the first node that can be reached. `skip` are those that the caller can't reach."""
        skipped = skip if isinstance(skip, list) else []
        for node in rank_nodes(volume, view.alive):
            if node == self._node or node not in skipped or self._can_reach(node, view):
                return node
        raise OSError(errno.EAGAIN, "this node isn't a member of the cluster now")

    def _can_reach(self, node: NodeId, view: View) -> bool:
        known = self._reached.get(node)
        if known is None or time.monotonic() - known[1] > _REACH_SECONDS:
            try:
                self._peers.find(node, view).act("ping", {})
                known = (True, time.monotonic())
            except (InsituError, OSError):
                known = (False, time.monotonic())
            self._reached[node] = known
        return known[0]

    def _check_may_write(self, view: View) -> None:
        reachable = self._count_reachable(view)
        if may_write(reachable, view.known, is_led=view.is_led):
            return
        if view.is_led:
            raise OSError(
                errno.EROFS,
                f"half of the nodes must be reachable to change a file, and {reachable} of {view.known} are. "
                f"Bring the others up, or run `insitu drain NODE` for each that won't come back",
            )
        raise OSError(
            errno.EROFS,
            f"without a head most nodes must be reachable to change a file, and {reachable} of "
            f"{view.known} are. `insitu up` with --hosts or --engine, as before, starts the head",
        )

    def _count_reachable(self, view: View) -> int:
        """Return how many nodes can be reached, with this one; no more than are needed to change names."""
        since = time.monotonic() - _REACH_SECONDS
        recent = {n: can for n, (can, at) in list(self._reached.items()) if n in view.alive and at >= since}
        reachable = 1 + sum(recent.values())
        others = [node for node in view.alive if node != self._node and node not in recent]
        threads = ThreadPoolExecutor(_AT_ONCE)
        try:
            tries = [threads.submit(self._can_reach, node, view) for node in others]
            for each in as_completed(tries):
                if may_write(reachable, view.known, is_led=view.is_led):
                    break  # those that give no answer are not waited for
                reachable += each.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        return reachable

    # Names

    def _read(self, kind: str, volume: str, path: str, fields: Fields) -> Fields:
        if kind == "look":
            found = self._names.find(volume, path)
            listed = self._names.describe(volume, path)
            return {
                "entry": None if found is None else found.to_json(),
                "kind": None if listed is None else listed.kind,
            }
        if kind == "list":
            after = check_path(fields.get("after", ""))
            entries = self._names.list_below(volume, path, after, LIST_PAGE)
            return {"entries": encode_entries(entries), "whole": len(entries) < LIST_PAGE}
        children = self._names.list_children(volume, path)
        return {"children": [[c.path, c.kind, c.size, c.modified, c.copies] for c in children]}

    def _change(self, kind: str, volume: str, path: str, fields: Fields, view: View) -> Fields:
        """Change names, and bring the change to others before it is answered."""
        self._check_may_write(view)
        if not path and kind != "remove":
            raise InputError("What is changed has a path in its volume. Received: the volume itself")
        if not self._has_compared(volume, view):
            self._compare_with_all(volume, view)
        else:
            self._catch_up(volume, view)
        commit = self._apply(kind, volume, path, fields)
        copies = max([entry.copies for entry in commit.entries], default=1)
        self._replicate(volume, commit, count_name_copies(copies), view)
        if commit.dropped:
            with self._guard:
                self._drops.append((time.monotonic() + self._drop_seconds, volume, commit.dropped))
            if not self._drop_seconds:
                self.drop_replaced(time.monotonic())
        return {"entries": encode_entries(commit.entries) if kind == "publish" else []}

    def _apply(self, kind: str, volume: str, path: str, fields: Fields) -> Commit:
        if kind == "publish":
            entry, expected = parse_entry(fields.get("entry")), fields.get("expected")
            if entry.path != path or (expected is not None and type(expected) is not int):
                raise InputError("A file is published at its path. Received: another one")
            return self._names.publish(volume, entry, expected, self._node)
        if kind == "rename":
            target = check_path(fields.get("target"))
            if not target:
                raise InputError("A file is moved to a path in its volume. Received: the volume itself")
            return self._names.rename(volume, path, target, self._node)
        if kind == "remove":
            recursive = fields.get("recursive") is True
            return self._names.remove(volume, path, recursive=recursive, writer=self._node)
        return self._names.make_folder(volume, path, self._node)

    def _replicate(self, volume: str, commit: Commit, count: int, view: View) -> None:
        """Bring a commit to the next nodes of the volume's order that can be reached."""
        if not commit.entries:
            return
        message = {"volume": volume, "entries": encode_entries(commit.entries)}
        done = 1
        for node in rank_nodes(volume, view.alive):
            if done >= count:
                return
            if node == self._node:
                continue
            try:
                self._peers.find(node, view).act("merge", message)
                done += 1
            except (InsituError, OSError) as error:
                logger.warning("a name of %s isn't on %s yet: %s", volume, node, error)
                self._compared.pop(volume, None)

    def _catch_up(self, volume: str, view: View) -> None:
        """Take what others have committed, where one of them has something newer."""
        own = self._names.read_newest(volume)
        others = [node for node in rank_nodes(volume, view.alive) if node != self._node]
        for node in others[: count_name_copies(1) - 1]:
            try:
                newest = int(self._peers.find(node, view).act("newest", {"volume": volume})[0]["newest"])
            except (InsituError, OSError):
                continue
            if newest > own:
                self._pull(volume, node, view)
                own = self._names.read_newest(volume)

    def _has_compared(self, volume: str, view: View) -> bool:
        return self._compared.get(volume) == (frozenset(view.alive), self._names.identity)

    def _compare_with_all(self, volume: str, view: View) -> None:
        """Take what any living node knows about a volume. Those that can't be reached are asked next time."""
        others = [node for node in view.alive if node != self._node]
        mine = self._names.read_states().get(volume)

        def compare(node: NodeId) -> bool:
            try:
                states = self._peers.find(node, view).act("states", {})[0]["states"]
                theirs = states.get(volume)
                if theirs is not None and (mine is None or tuple(theirs) != mine):
                    self._pull(volume, node, view)
                return True
            except (InsituError, OSError):
                return False

        with ThreadPoolExecutor(_AT_ONCE) as threads:
            if all(list(threads.map(compare, others))):
                self._compared[volume] = frozenset(view.alive), self._names.identity

    def _pull(self, volume: str, node: NodeId, view: View) -> int:
        """Take all names of a volume that a node knows, where they are newer. Return how many changed."""
        peer, after, changed = self._peers.find(node, view), "", 0
        while True:
            answer, _ = peer.act("entries", {"volume": volume, "after": after})
            entries = parse_entries(answer["entries"])
            changed += self._names.merge(volume, entries)
            if answer["whole"] or not entries:
                return changed
            after = entries[-1].path

    # Now and then

    def compare_names(self) -> int:
        """Take newer names from other nodes, of the volumes that this one knows or is to know. Return how
        many have changed."""
        view, changed = self._read_view(), 0
        if not view.alive:
            return 0
        mine = self._names.read_states()
        for node in view.alive:
            if node == self._node:
                continue
            try:
                states = self._peers.find(node, view).act("states", {})[0]["states"]
                for volume, state in states.items():
                    to_know = self._node in rank_nodes(volume, view.alive)[: count_name_copies(1)]
                    if (volume in mine or to_know) and mine.get(volume) != tuple(state):
                        changed += self._pull(check_volume(volume), node, view)
            except (InsituError, OSError):
                continue
        return changed

    def drop_replaced(self, now: float) -> None:
        """Remove blocks of files that were replaced or removed a while ago, on all nodes. `now` is of the
        monotonic clock."""
        with self._guard:
            due = [each for each in self._drops if each[0] <= now]
            self._drops = [each for each in self._drops if each[0] > now]
        view = self._read_view()
        for _, volume, keys in due:
            for node in view.alive:
                try:
                    self._peers.find(node, view).act("drop", {"volume": volume, "keys": list(keys)})
                except Unreachable:
                    continue  # they are found later, as blocks that no name has

    def list_led(self) -> list[str]:
        """Return the volumes that this node leads now."""
        view = self._read_view()
        known = set(self._names.read_states()) | set(self._store.blocks.list_volumes())
        return [v for v in sorted(known) if rank_nodes(v, view.alive)[:1] == [self._node]]
