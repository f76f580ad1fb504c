"""The part of the head in the file system: it answers about names, and has blocks kept up.

Neither is done in the head's own thread: a change waits for the disk, and a repair for other hosts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.decide import Member, find_cluster_number
from insitu.cluster.wire import HeadRecord, Message, change_head, parse_seconds
from insitu.grid.shared_files import record_earlier
from insitu.metadata import MetadataStore, end_calls_by, open_store, require_truth

if TYPE_CHECKING:
    from insitu.cluster.files import FileUpkeep, NameService, NamesGuard, View


logger = logging.getLogger("insitu")
MOST_PENDING = 512
"""Questions that wait at most. Further ones are refused as busy."""
_THREADS = 8
_MARGIN_SECONDS = 1.0
"""Before an agent gives up a question, it must have been answered that a silent etcd is why."""
_TICK_SECONDS = 5.0


def open_head_files(paths: Paths, record: HeadRecord, token: str) -> HeadFiles:
    """Open the metadata store of a head. Raises InputError if it had one that isn't there: then it was lost,
    and an empty one would look like a cluster without files."""
    store = open_store(paths.metadata, record.cluster, create=not record.has_metadata)
    try:
        require_truth(store, str(paths.metadata))
    except BaseException:
        store.close()
        raise
    if not record.has_metadata:
        if record.epoch > 1:  # a store was lost, here or with another head
            record_earlier(store)
        change_head(paths, has_metadata=True)
    return HeadFiles(store, token, record.epoch)


class HeadFiles:
    """Answers agents by the metadata store. The descriptor is readable once answers wait to be sent."""

    def __init__(self, store: MetadataStore, token: str, epoch: int = 0) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(_THREADS, "insitu-names")
        self._answers: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pending = threading.BoundedSemaphore(MOST_PENDING)
        self._upkeep = _Upkeep(store, token, find_cluster_number(epoch))
        self._upkeep.start()

    @cached_property
    def _service(self) -> NameService:
        from insitu.cluster.files import NameService  # loads Flight, which a head without files doesn't need

        return NameService(self._store, self._upkeep.check)

    def fileno(self) -> int:
        return self._event

    def begin(self, caller: int, message: Message) -> None:
        """Answer a question of an agent, which has the connection `caller`. Raises ClusterError."""
        left = parse_seconds("left", message.get("left"))
        if self._pending.acquire(blocking=False):
            self._threads.submit(self._answer, caller, message, time.monotonic() + left)
        else:
            self._put(caller, message, {"busy": True})

    def _answer(self, caller: int, message: Message, deadline: float) -> None:
        answer: Message = {"lost": "the head had no time for it"}
        try:
            kind, fields = message.get("kind"), message.get("fields")
            if time.monotonic() < deadline:
                with end_calls_by(deadline - _MARGIN_SECONDS):
                    answer = self._service.answer(str(kind), fields if isinstance(fields, dict) else {})
        except Exception as error:  # what is wrong with one question ends no thread
            logger.warning("a question about names failed: %s: %s", type(error).__name__, error)
            answer = {"lost": "the head couldn't answer, its log says why"}
        finally:
            self._pending.release()
            self._put(caller, message, answer)

    def _put(self, caller: int, message: Message, answer: Message) -> None:
        self._answers.put((caller, {"do": "names", "number": message.get("number"), "answer": answer}))
        os.eventfd_write(self._event, 1)

    def take_answers(self, callers: Container[int]) -> list[tuple[int, Message]]:
        """Return the answers to callers that are still there, each with the number of its connection."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._answers.get_nowait())
        return [each for each in found if each[0] in callers]

    def record_members(self, members: Mapping[NodeId, Member]) -> None:
        """Take the agents as they are now."""
        self._upkeep.members = members

    def close(self) -> None:
        """End the threads."""
        self._upkeep.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Upkeep:
    """The thread that keeps blocks up, while there are files."""

    def __init__(self, store: MetadataStore, token: str, number: int) -> None:
        self._store = store
        self._token = token
        self._number = number
        #: The agents. Written by the head's own thread.
        self.members: Mapping[NodeId, Member] = {}
        self._stopping = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="insitu-files", daemon=True).start()

    def close(self) -> None:
        """Have the thread end."""
        self._stopping.set()

    def check(self) -> None:
        """Raise GridError if names were lost with another head."""
        self._parts[0].check(make_file_view(self.members))

    @cached_property
    def _parts(self) -> tuple[NamesGuard, FileUpkeep]:
        from insitu.cluster.files import FileUpkeep, NamesGuard, RemotePeers

        peers = RemotePeers(self._token.encode(), number=self._number)
        guard = NamesGuard(self._store, peers)
        return guard, FileUpkeep(self._store, peers, lambda: make_file_view(self.members), guard)

    def _run(self) -> None:
        while not self._stopping.wait(_TICK_SECONDS):
            try:
                if self._store.range("files/", "", 1)[0]:
                    self._parts[1].advance(time.monotonic())
            except Exception as error:  # the next time may be better
                logger.warning("files aren't kept up: %s: %s", type(error).__name__, error)


# The nodes that hold files, as the head knows them


def make_file_view(members: Mapping[NodeId, Member]) -> View:
    """Return the nodes that hold files, with those that were lost and haven't left."""
    from insitu.cluster.files import View  # loads Flight
    from insitu.grid.transfer import ServerAddress

    alive, away = dict[NodeId, ServerAddress | None](), dict[NodeId, ServerAddress | None]()
    for node, member in members.items():
        facts = member.facts
        address = ServerAddress(facts.address, facts.port, facts.certificate)
        if member.state in ("alive", "silent"):
            alive[node] = address
        elif member.state == "lost":
            away[node] = address
    return View(alive, away)
