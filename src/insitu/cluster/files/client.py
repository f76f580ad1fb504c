"""Reads and writes files of `insitu://`: finds the node that decides about a name, and who has blocks."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from insitu.cluster.decide import choose_holders, rank_nodes
from insitu.cluster.files.peers import Fields, Peers, Unreachable, View
from insitu.cluster.files.repairing import RepairReport, find_old_here, repair_volume
from insitu.errors import ClusterError, InsituError
from insitu.grid.shared_files import (
    FILE,
    FOLDER,
    Block,
    Entry,
    ListedPath,
    checksum_block,
    parse_entries,
    parse_entry,
)
from insitu.spec import NodeId

logger = logging.getLogger("insitu")
ASK_SECONDS = 30.0
"""Seconds for which a node is looked for that decides about a name."""
SUSPECT_SECONDS = 10.0
"""Seconds for which a node that gave no answer is asked last."""
VIEW_SECONDS = 5.0
"""Seconds for which the list of nodes is believed without asking for it again."""
_RETRY_SECONDS = 0.1
_AT_ONCE = 8


def _make_error(number: int, volume: str, path: str, why: str | None = None) -> OSError:
    """Return the error of Python's class for `number`, which names the path as users do."""
    return OSError(number, why or os.strerror(number), f"insitu://{volume}/{path}".rstrip("/"))


class FileClient:
    """The files of a cluster, for several threads. Calls raise OSError, InputError, GridError, ClusterError.

    `read_view` asks for the nodes of the cluster. It may raise, then those known last are used.
    """

    def __init__(self, peers: Peers, read_view: Callable[[], View]) -> None:
        self._peers = peers
        self._read_view = read_view
        self._lock = threading.Lock()
        #: The nodes as they were known last, and when that was, on the monotonic clock.
        self._view: View | None = None
        self._viewed_at = 0.0
        #: When a node gave no answer, on the monotonic clock.
        self._suspects: dict[NodeId, float] = {}
        #: Volumes of which the block that was written last has fewer copies than it could.
        self._short: set[str] = set()

    # Nodes

    def find_view(self, *, fresh: bool = False) -> View:
        """Return the nodes. Raises ClusterError where there are none."""
        with self._lock:
            age = time.monotonic() - self._viewed_at
            if self._view is None or age > VIEW_SECONDS or (fresh and age > _RETRY_SECONDS):
                try:
                    self._view = self._read_view()
                except (InsituError, OSError):
                    if self._view is None:
                        raise
                self._viewed_at = time.monotonic()
            view = self._view
        if not view.alive:
            raise ClusterError(
                "Files of insitu:// lie on the nodes of a cluster. Received: none that is alive. `insitu "
                "nodes` shows all"
            )
        return view

    def _ask(self, volume: str, kind: str, fields: Fields, lost: list[bool] | None = None) -> Fields:
        """Have the node do something that leads a volume, and return its answer. The first value of `lost`
        becomes True where an answer may have been lost, and another node is asked."""
        deadline, skip = time.monotonic() + ASK_SECONDS, list[NodeId]()
        view, why = self.find_view(), ""
        while True:
            left = [node for node in rank_nodes(volume, view.alive) if node not in skip]
            try:
                if not left:
                    raise OSError(errno.EAGAIN, why or "no node can be reached")
                message = {"volume": volume, **fields, "skip": skip}
                answer, _ = self._peers.find(left[0], view).act(kind, message)
                if "moved" not in answer:
                    return answer
                why = f"{left[0]} has {answer['moved']} lead {volume}, which can't be reached from here"
            except Unreachable as error:
                why = error.message
                if lost:
                    lost[0] = True
                skip.append(left[0])
                self._suspects[left[0]] = time.monotonic()
                continue
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    named = error.filename or str(fields.get("path", ""))
                    raise _make_error(error.errno or errno.EIO, volume, named, error.strerror) from error
                why = error.strerror or why
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"One node leads the volume {volume}, and must be reachable. Received: {why}. `insitu "
                    f"nodes --check` shows who can't talk with whom"
                )
            time.sleep(_RETRY_SECONDS)
            view, skip = self.find_view(fresh=True), []

    # Names

    def look(self, volume: str, path: str) -> tuple[Entry | None, str | None]:
        """Return the entry of a path, None where it has none, and its kind, None where nothing is there."""
        answer = self._ask(volume, "look", {"path": path})
        entry = None if answer["entry"] is None else parse_entry(answer["entry"])
        return entry, answer["kind"]

    def find_file(self, volume: str, path: str) -> Entry:
        """Return a file. Raises FileNotFoundError, IsADirectoryError."""
        entry, kind = self.look(volume, path)
        if kind == FOLDER or not path:
            raise _make_error(errno.EISDIR, volume, path)
        if entry is None:
            raise _make_error(errno.ENOENT, volume, path)
        return entry

    def list_children(self, volume: str, path: str) -> list[ListedPath]:
        """Return what lies directly in a folder."""
        answer = self._ask(volume, "children", {"path": path})
        return [
            ListedPath(str(name), FILE if kind == FILE else FOLDER, int(size), float(modified), int(copies))
            for name, kind, size, modified, copies in answer["children"]
        ]

    def list_below(self, volume: str, path: str) -> Iterator[Entry]:
        """Yield all files and made folders below a folder, in the order of their paths."""
        after = ""
        while True:
            answer = self._ask(volume, "list", {"path": path, "after": after})
            entries = parse_entries(answer["entries"])
            yield from entries
            if answer["whole"] or not entries:
                return
            after = entries[-1].path

    def list_volumes(self) -> list[str]:
        """Return the volumes that hold something, of which a node that can be reached knows."""
        view, found = self.find_view(), set[str]()
        answers = 0
        for node in view.alive:
            try:
                found.update(self._peers.find(node, view).act("volumes", {})[0]["volumes"])
                answers += 1
            except Unreachable:
                continue
        if not answers:
            raise ClusterError("A node must be reachable to list volumes. Received: none that answers")
        return [volume for volume in sorted(found) if self.list_children(volume, "")]

    def publish(
        self, volume: str, path: str, blocks: Sequence[Block], copies: int, expected: int | None
    ) -> Entry:
        """Put a file at a path, as a whole. `expected` is the stamp of the file that it replaces, 0: there is
        none; None: any. Raises FileExistsError, and OSError with ESTALE where another one is there."""
        entry = Entry(path, 0, "", FILE, time.time(), copies, tuple(blocks))
        answer = self._ask(volume, "publish", {"path": path, "entry": entry.to_json(), "expected": expected})
        return parse_entries(answer["entries"])[0]

    def rename(self, volume: str, source: str, target: str) -> None:
        """Move a file or a folder within a volume, as a whole."""
        self._change(volume, "rename", {"path": source, "target": target})

    def remove(self, volume: str, path: str, *, recursive: bool) -> None:
        """Remove a file, or a folder, which must be empty without `recursive`."""
        self._change(volume, "remove", {"path": path, "recursive": recursive})

    def make_folder(self, volume: str, path: str) -> None:
        """Make a folder."""
        self._change(volume, "folder", {"path": path})

    def _change(self, volume: str, kind: str, fields: Fields) -> None:
        lost = [False]
        try:
            self._ask(volume, kind, fields, lost)
        except FileNotFoundError:
            # The node that did it may have died before it answered.
            target = fields.get("target", "")
            if not lost[0] or (target and self.look(volume, target)[1] is None):
                raise

    # Blocks

    def _order(self, nodes: Sequence[NodeId]) -> list[NodeId]:
        """Put nodes last that gave no answer lately."""
        now = time.monotonic()
        return sorted(nodes, key=lambda n: now - self._suspects.get(n, -SUSPECT_SECONDS) < SUSPECT_SECONDS)

    def write_block(self, volume: str, data: bytes, copies: int) -> Block:
        """Bring a block to as many nodes as it is to have copies. Raises OSError where none has room.

        Where fewer nodes can take it, a warning says so; copies are made later.
        """
        block = Block(secrets.token_hex(16), len(data), checksum_block(data))
        view = self.find_view()
        order = self._order(rank_nodes(block.key, view.alive))
        first, rest = order[:copies], iter(order[copies:])
        failures: list[Exception] = []

        def send(node: NodeId) -> bool:
            try:
                fields = {"volume": volume, "key": block.key, "checksum": block.checksum}
                self._peers.find(node, view).act("put", fields, data)
                return True
            except Unreachable as error:
                self._suspects[node] = time.monotonic()
                failures.append(error)
            except (InsituError, OSError) as error:
                failures.append(error)
            return False

        if len(first) == 1:
            done = int(send(first[0]))
        else:
            with ThreadPoolExecutor(len(first)) as threads:
                done = sum(threads.map(send, first))
        while done < min(copies, len(order)) and (node := next(rest, None)) is not None:
            done += send(node)
        if not done:
            full = [e for e in failures if isinstance(e, OSError) and e.errno == errno.ENOSPC]
            if full:
                raise OSError(errno.ENOSPC, full[0].strerror)
            raise OSError(errno.EIO, f"no node takes a block: {failures[0]}")
        self._warn_of_copies(volume, done, min(copies, max(view.known, len(order))), failures)
        return block

    def _warn_of_copies(self, volume: str, done: int, wanted: int, failures: Sequence[Exception]) -> None:
        """Say that blocks have fewer copies than they could, once until one has all of them."""
        if done >= wanted:
            self._short.discard(volume)
        elif volume not in self._short:
            self._short.add(volume)
            why = str(failures[0]) if failures else "no more nodes are alive"
            logger.warning(
                "files of %s get %d of %d copies: %s. More are made once nodes are there",
                *(volume, done, wanted, why),
            )

    def read_block(self, volume: str, block: Block) -> bytes:
        """Return the bytes of a block, from the first node that has them right. Raises OSError with EIO where
        none has."""
        why = ""
        for attempt in range(2):
            view = self.find_view(fresh=attempt > 0)
            for node in self._order(rank_nodes(block.key, view.alive)):
                fields = {"volume": volume, "key": block.key, "checksum": block.checksum}
                try:
                    peer = self._peers.find(node, view)
                    _, data = peer.act("get", fields)
                    if checksum_block(data) == block.checksum:
                        return data
                    why = f"the copy of {node} is damaged"
                    logger.warning("%s: %s, another one is read", volume, why)
                    peer.act("damaged", fields)
                except FileNotFoundError:
                    why = why or "no node has it"
                except Unreachable as error:
                    self._suspects[node] = time.monotonic()
                    why = error.message
                except (InsituError, OSError) as error:
                    why = f"{node}: {error}"
        raise OSError(
            errno.EIO,
            f"a block of the file can't be read: {why}. The file was replaced or removed meanwhile, or all "
            f"nodes with copies of it are lost; `insitu fs repair {volume}` says which",
        )

    def read_blocks(self, volume: str, blocks: Sequence[Block]) -> Iterator[bytes]:
        """Yield the bytes of blocks in order; several are fetched at the same time."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            waiting: list[Any] = []
            try:
                for block in blocks:
                    waiting.append(threads.submit(self.read_block, volume, block))
                    if len(waiting) >= _AT_ONCE:
                        yield waiting.pop(0).result()
                while waiting:
                    yield waiting.pop(0).result()
            finally:
                threads.shutdown(cancel_futures=True)

    def keep_blocks(self, volume: str, blocks: Sequence[Block]) -> int:
        """Have nodes keep blocks that are to be published. Return how many are on no node that answers."""
        view, missing = self.find_view(), [block.key for block in blocks]
        there = set()
        for node in view.alive:
            try:
                fields = {"volume": volume, "keys": missing}
                there.update(self._peers.find(node, view).act("keep", fields)[0]["kept"])
            except Unreachable:
                continue
        return len(set(missing) - there)

    def drop_blocks(self, volume: str, blocks: Sequence[Block], copies: int) -> None:
        """Remove blocks that were written and aren't published, as far as nodes can be reached."""
        view = self.find_view()
        for block in blocks:
            for node in choose_holders(block.key, view.alive, max(copies, 2)):
                try:
                    self._peers.find(node, view).act("drop", {"volume": volume, "keys": [block.key]})
                except (InsituError, OSError):
                    continue  # it goes later, as a block that no name has

    def count_blocks(self, volume: str, entry: Entry) -> dict[NodeId, int]:
        """Return how many blocks of a file each node holds, of those that answer."""
        view, found = self.find_view(), {}
        keys = {block.key for block in entry.blocks}
        for node in sorted(view.alive):
            try:
                held = self._peers.find(node, view).act("held", {"volume": volume})[0]["held"]
            except Unreachable:
                continue
            found[node] = len(keys & held.keys())
        return {node: count for node, count in found.items() if count}

    def repair(self, volume: str) -> RepairReport:
        """Make copies that are missing. See `repair_volume`."""
        files = [entry for entry in self.list_below(volume, "") if entry.kind == FILE]
        view = self.find_view(fresh=True)
        is_here = all(address is None for address in view.alive.values())  # agents clean by themselves
        return repair_volume(volume, files, self._peers, view, None, find_old_here if is_here else None)

    def measure_nodes(self) -> dict[NodeId, Fields]:
        """Return the bytes of files in memory and on disk, and the limit of memory, by node that answers."""
        view, found = self.find_view(), {}
        for node in sorted(view.alive):
            try:
                found[node] = self._peers.find(node, view).act("usage", {})[0]
            except Unreachable:
                continue
        return found
