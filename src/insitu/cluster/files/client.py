"""Reads and writes files of `insitu://`: asks about names, and has nodes keep and send blocks."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from insitu.base.errors import ClusterError, InsituError
from insitu.base.spec import NodeId
from insitu.cluster.decide import rank_nodes
from insitu.cluster.files.asking import CLIENT_SECONDS, HEDGE_SECONDS, Calls, Suspects, ask_all, ask_first
from insitu.cluster.files.names_client import Names
from insitu.cluster.files.peers import Fields, Peers, Unreachable, View
from insitu.grid.shared_files import (
    BLOCKS_A_LIST,
    FOLDER,
    MAX_LISTED,
    Block,
    Entry,
    FileManifest,
    ListedPath,
    checksum_block,
    make_block,
    pack_blocks,
    parse_entry,
    unpack_blocks,
)

logger = logging.getLogger("insitu")
VIEW_SECONDS = 5.0
"""Seconds for which the list of nodes is believed without asking for it again."""
FRESH_SECONDS = 0.1
PAUSE_SECONDS = 10.0
"""Seconds for which nobody is asked for the nodes after that has failed."""
_AT_ONCE = 8


def make_file_error(number: int, volume: str, path: str, why: str | None = None) -> OSError:
    """Return the error of Python's class for `number`, which names the path as users do."""
    return OSError(number, why or os.strerror(number), f"insitu://{volume}/{path}".rstrip("/"))


def _run_together(calls: Sequence[Callable[[], None]]) -> None:
    """Make calls at the same time. Raise the first error. A pool would refuse what a process writes at its
    end."""
    errors = list[BaseException]()

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls[1:]]
    for thread in threads:
        thread.start()
    run(calls[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class ViewCache:
    """The nodes as one process knows them.

    `read` asks for them, given whether those of now are wanted, and whether some are known. If it raises
    then, those known last count.
    """

    def __init__(self, read: Callable[[bool, bool], View]) -> None:
        self._read = read
        self._lock = threading.Lock()
        #: The nodes, and when they were asked for, on the monotonic clock.
        self._view: View | None = None
        self._read_at = 0.0

    def find(self, *, fresh: bool = False) -> View:
        """Return the nodes. Raises ClusterError if there are none."""
        with self._lock:
            age = time.monotonic() - self._read_at
            if self._view is None or age > VIEW_SECONDS or (fresh and age > FRESH_SECONDS):
                pause = 0.0
                try:
                    self._view = self._read(fresh, self._view is not None)
                except (InsituError, OSError):
                    if self._view is None:
                        raise
                    pause = PAUSE_SECONDS
                self._read_at = time.monotonic() + pause
            view = self._view
        if not view.alive and not view.away:
            raise ClusterError(
                "Files of insitu:// are on the nodes of a cluster. Received: none. `insitu nodes` shows all"
            )
        return view


class FileClient:
    """The files of a cluster, for several threads.

    Calls raise OSError, InputError, GridError, ClusterError.
    """

    def __init__(
        self,
        names: Names,
        peers: Peers,
        find_view: Callable[..., View],
        suspects: Suspects,
        *,
        writes_manifests: bool = True,
    ) -> None:
        self._names = names
        self._peers = peers
        #: Returns the nodes, with `fresh` those of now.
        self._find_view = find_view
        self._suspects = suspects
        #: Whether each file gets a manifest. Nobody keeps them up on one machine without agents.
        self._writes_manifests = writes_manifests
        #: Volumes of which the block that was written last has fewer copies than it could.
        self._short: set[str] = set()

    # Names

    def _ask(self, kind: str, volume: str, path: str, **fields: Any) -> Fields:
        return self._ask_names(kind, volume, path, is_change=False, **fields)

    def _change(self, kind: str, volume: str, path: str, **fields: Any) -> Fields:
        return self._ask_names(kind, volume, path, is_change=True, **fields)

    def _ask_names(self, kind: str, volume: str, path: str, *, is_change: bool, **fields: Any) -> Fields:
        try:
            return self._names.ask(kind, {"volume": volume, "path": path, **fields}, is_change=is_change)
        except OSError as error:
            named = path if error.filename is None else str(error.filename)
            raise make_file_error(error.errno or errno.EIO, volume, named, error.strerror) from error

    def look(self, volume: str, path: str) -> tuple[Entry | None, str | None]:
        """Return the file at a path, None: there is none, and its kind, None: nothing is there."""
        answer = self._ask("look", volume, path)
        entry = None if answer["entry"] is None else parse_entry(answer["entry"])
        return entry, answer["kind"]

    def look_to_change(self, volume: str, path: str) -> tuple[Entry | None, str | None]:
        """As `look`, for a caller that changes the path then. If nobody can say, but the change is kept until
        somebody can, nothing is there."""
        return self.look(volume, path)

    def append_later(self, volume: str, path: str, data: bytes, copies: int) -> bool:
        """Keep what is appended, if it can't be published now. Return whether that was done."""
        return False

    def find_file(self, volume: str, path: str) -> Entry:
        """Return a file. Raises FileNotFoundError, IsADirectoryError."""
        entry, kind = self.look(volume, path)
        if kind == FOLDER or not path:
            raise make_file_error(errno.EISDIR, volume, path)
        if entry is None:
            raise make_file_error(errno.ENOENT, volume, path)
        return entry

    def list_children(self, volume: str, path: str) -> list[ListedPath]:
        """Return the direct entries of a folder."""
        return list(self._list("children", volume, path))

    def list_below(self, volume: str, path: str) -> Iterator[ListedPath]:
        """Yield all entries below a folder, each folder before its content."""
        return self._list("list", volume, path)

    def _list(self, kind: str, volume: str, path: str) -> Iterator[ListedPath]:
        after = ""
        while True:
            answer = self._ask(kind, volume, path, after=after)
            listed = [ListedPath(*row) for row in answer["listed"]]
            yield from listed
            if answer["whole"] or not listed:
                return
            after = listed[-1].path if kind == "list" else listed[-1].path.rpartition("/")[2]

    def list_volumes(self) -> list[str]:
        """Return the names of all volumes."""
        return [str(volume) for volume in self._ask("volumes", "", "")["volumes"]]

    def change(self, kind: str, volume: str, path: str, change: str, *, again: bool, **fields: Any) -> Fields:
        """Make a change whose id the caller knows. Return the answer, which has `used_up` if another id is
        needed. `again`: it may have been asked for, and made, before."""
        more = {"change": change, "again": True} if again else {"change": change}
        return self._change(kind, volume, path, **fields, **more)

    def publish(
        self,
        volume: str,
        path: str,
        entry: Entry,
        expected: int | None,
        *,
        replaces: int | None = None,
        unwritten: Sequence[tuple[Block, bytes]] = (),
        appended: bytes | None = None,
    ) -> int:
        """Put a file at a path, as a whole. Return its version.

        `expected` is the version of the file that it replaces, whose content it begins with; 0: there is
        none; None: any. `replaces` is the one that was there, as far as the caller knows. `unwritten` are
        blocks that are written first. `appended` is what follows the content of `expected`, for who keeps it
        until it can be published. Raises FileExistsError, and OSError with ESTALE if another one is there.
        After a ClusterError the file may have been published, so its blocks must stay.
        """
        self.write_parts(volume, path, entry, expected if replaces is None else replaces, unwritten)
        answer = self._change("publish", volume, path, entry=entry.to_json(), expected=expected)
        return int(answer["version"])

    def write_parts(
        self,
        volume: str,
        path: str,
        entry: Entry,
        replaces: int | None,
        unwritten: Sequence[tuple[Block, bytes]] = (),
    ) -> None:
        """Write blocks of a file, and its manifest, before the file is published. `replaces` is the version
        that was there, as far as the caller knows."""
        written = [(block, data, block.key) for block, data in unwritten]
        if self._writes_manifests:
            manifest = FileManifest(volume, path, entry, replaces or 0)
            data = manifest.encode()
            written.append((make_block(data, manifest.key), data, manifest.beside))
        for start in range(0, len(written), _AT_ONCE):
            _run_together(
                [
                    partial(self.send_block, volume, block, data, entry.copies, beside)
                    for block, data, beside in written[start:][:_AT_ONCE]
                ]
            )

    def rename(self, volume: str, source: str, target: str) -> None:
        """Move a file or a folder within a volume, as a whole."""
        self._change("rename", volume, source, target=target)

    def remove(self, volume: str, path: str, *, recursive: bool) -> None:
        """Remove a file, or a folder, which must be empty without `recursive`."""
        self._change("remove", volume, path, recursive=recursive)

    def make_folder(self, volume: str, path: str) -> None:
        """Make a folder, unless it is there."""
        self._change("folder", volume, path)

    # Blocks

    def make_entry(
        self, volume: str, lists: Sequence[Block], blocks: Sequence[Block], copies: int, size: int
    ) -> Entry:
        """Return a version of a file, whose first blocks are named in `lists`. If there are too many
        others, all are written to new lists."""
        if len(blocks) > MAX_LISTED:
            every = [*self.list_blocks(volume, lists, ()), *blocks]
            parts = [every[start : start + BLOCKS_A_LIST] for start in range(0, len(every), BLOCKS_A_LIST)]
            lists = [self.write_block(volume, pack_blocks(part), copies) for part in parts]
            blocks = ()
        return Entry(size, time.time(), copies, tuple(lists), tuple(blocks))

    def list_blocks(self, volume: str, lists: Sequence[Block], blocks: Sequence[Block]) -> list[Block]:
        """Return all blocks of a file, in order."""
        named = [block for each in lists for block in unpack_blocks(self.read_block(volume, each))]
        return [*named, *blocks]

    def write_block(self, volume: str, data: bytes, copies: int) -> Block:
        """Make a block, and bring it to nodes as `send_block` does."""
        block = make_block(data)
        self.send_block(volume, block, data, copies)
        return block

    def send_block(
        self, volume: str, block: Block, data: bytes, copies: int, beside: str | None = None
    ) -> None:
        """Bring a block to as many nodes as it must have copies: those that hold the block with the key
        `beside`, if that is given. Raises OSError if none has room.

        If fewer nodes can take it, a warning says so; copies are made later. A node that is silent isn't
        waited for, one that is slow is.
        """
        view = self._find_view()
        fields = {"volume": volume, "key": block.key, "checksum": block.checksum}
        rest = self._suspects.order(rank_nodes(beside or block.key, view.alive))
        calls, done, silent = Calls(self._suspects), 0, set[NodeId]()
        failures: list[BaseException] = []

        def put(node: NodeId) -> None:
            self._peers.find(node, view).act("put", fields, data, seconds=CLIENT_SECONDS)

        while done < copies:
            while rest and done + len(set(calls.running) - silent) < copies:
                node = rest.pop(0)
                calls.begin(node, lambda node=node: put(node))  # type: ignore[misc]
            if not set(calls.running) - silent and (done or not calls.running):
                break
            found = calls.take(HEDGE_SECONDS)
            if found is None:
                silent |= self._find_silent(calls.running, view)
            elif found[2] is None:
                done += 1
            else:
                failures.append(found[2])
        if not done:
            raise _explain(failures)
        failures += [Unreachable(f"{node} gives no answer") for node in calls.running]
        self._warn_of_copies(volume, done, min(copies, len(view.alive) + len(view.away)), failures)

    def _find_silent(self, nodes: Sequence[NodeId], view: View) -> set[NodeId]:
        """Return which nodes don't answer at all."""
        _, failures = ask_all(
            nodes,
            lambda node: self._peers.find(node, view).act("ping", {}, seconds=HEDGE_SECONDS),
            self._suspects,
            HEDGE_SECONDS,
        )
        return set(failures)

    def _warn_of_copies(self, volume: str, done: int, wanted: int, failures: Sequence[BaseException]) -> None:
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
        """Return the bytes of a block from a node that has them right. Raises OSError with EIO if none
        has."""
        fields = {"volume": volume, "key": block.key, "checksum": block.checksum}
        failure: BaseException | None = None
        for attempt in range(2):
            view = self._find_view(fresh=attempt > 0)
            order = [*rank_nodes(block.key, view.alive), *rank_nodes(block.key, view.away)]

            def get(node: NodeId, view: View = view) -> bytes:
                peer = self._peers.find(node, view)
                _, data = peer.act("get", fields, seconds=CLIENT_SECONDS)
                if checksum_block(data) != block.checksum:
                    logger.warning("%s: the copy of %s is damaged, another one is read", volume, node)
                    peer.act("damaged", fields)
                    raise OSError(errno.EIO, f"the copy of {node} is damaged")
                return data

            try:
                return ask_first(self._suspects.order(order), get, self._suspects, CLIENT_SECONDS)
            except (InsituError, OSError) as error:
                failure = error
        missing = isinstance(failure, FileNotFoundError)
        raise OSError(
            errno.EIO,
            f"a block of the file can't be read: {'no node has it' if missing else failure}. The file was "
            f"replaced or removed meanwhile, or all nodes with copies of it are lost; `insitu fs repair "
            f"{volume}` says which",
        )

    def read_blocks(self, volume: str, blocks: Sequence[Block]) -> Iterator[bytes]:
        """Yield the bytes of blocks in order; several are fetched at the same time."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            waiting: list[Future[bytes]] = []
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
        """Have nodes keep blocks that will be published. Return how many are on no node that answers."""
        keys = {block.key for block in blocks}
        answers = self._ask_nodes("keep", {"volume": volume, "keys": sorted(keys)})
        return len(keys - {key for answer in answers.values() for key in answer["kept"]})

    def count_blocks(self, volume: str, blocks: Sequence[Block]) -> dict[NodeId, int]:
        """Return how many of some blocks each node holds, of those that answer."""
        keys = {block.key for block in blocks}
        answers = self._ask_nodes("held", {"volume": volume})
        found = {node: len(keys & answer["held"].keys()) for node, answer in answers.items()}
        return {node: count for node, count in sorted(found.items()) if count}

    def measure_nodes(self) -> dict[NodeId, Fields]:
        """Return the bytes of files in memory and on disk, and the limit of memory, by node that answers."""
        return dict(sorted(self._ask_nodes("usage", {}).items()))

    def _ask_nodes(self, kind: str, fields: Fields) -> dict[NodeId, Fields]:
        """Return what all nodes answer that live and aren't silent."""
        view = self._find_view()
        live = set(view.alive) - self._find_silent(list(view.alive), view)
        answers, _ = ask_all(
            live,
            lambda node: self._peers.find(node, view).act(kind, fields)[0],
            self._suspects,
            CLIENT_SECONDS,
        )
        return answers


def _explain(failures: Sequence[BaseException]) -> OSError:
    """Return why no node has taken a block."""
    full = [e for e in failures if isinstance(e, OSError) and e.errno == errno.ENOSPC]
    if full:
        return OSError(errno.ENOSPC, full[0].strerror)
    return OSError(errno.EIO, f"no node takes a block: {failures[0] if failures else 'none is alive'}")
