"""The part of an agent in the file system: it keeps blocks, and asks the head about names."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from insitu.base.errors import InsituError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.base.wording import format_count
from insitu.cluster.decide import Member
from insitu.cluster.engines import Channel
from insitu.cluster.files import NAME_KINDS, describe_error
from insitu.cluster.wire import Message, parse_seconds, save_members
from insitu.grid.shared_files import FileStore, remove_file_memory

logger = logging.getLogger("insitu")
_TICK_SECONDS = 1.0
_SWEEP_SECONDS = 300.0


class AgentFiles:
    """The files in the store of one agent."""

    def __init__(self, paths: Paths, node: NodeId) -> None:
        self._paths = paths
        self._node = node
        self._store = FileStore(paths, node)
        #: Passes questions on.
        self.head = HeadCalls(paths.metadata_settings.exists)
        #: The agents, as the head has said last, and as they were saved. Written by the agent's own thread.
        self._members: Mapping[NodeId, Member] = {}
        self._saved: Mapping[NodeId, Member] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="insitu-files", daemon=True)
        self._thread.start()

    def answer(self, kind: str, fields: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """Do what another process asks for, and return failures as answers."""
        try:
            if kind in NAME_KINDS:
                return self.head.ask(kind, fields), b""
            return self._store.act(kind, fields, payload)
        except (InsituError, OSError) as error:
            return describe_error(error), b""

    def record_members(self, members: Mapping[NodeId, Member]) -> None:
        """Take the agents that the head knows."""
        self._members = members

    def close(self, *, delete: bool) -> None:
        """Move what is in memory to the disk, or delete it."""
        self._stopping.set()
        self._thread.join(_TICK_SECONDS)
        if delete:
            remove_file_memory(self._paths.file_memory(self._node))
        elif left := self._store.blocks.spill_all():
            logger.warning(
                "%s of files left in memory: the disk has no room for them", format_count(left, "block")
            )

    def _keep_up(self) -> None:
        sweep_at = 0.0
        while not self._stopping.wait(_TICK_SECONDS):
            try:
                self._save_members()
                if time.monotonic() >= sweep_at:
                    sweep_at = time.monotonic() + _SWEEP_SECONDS
                    self._store.blocks.sweep(time.time())
            except (InsituError, OSError) as error:
                logger.warning("files aren't kept up: %s", error)

    def _save_members(self) -> None:
        """Keep the addresses of the others for processes of this home."""
        members = self._members
        if members == self._saved or self._paths.head.exists():
            return
        save_members(self._paths, members, sync=False)
        self._saved = members


# Passes questions about names on to the head, by the connection that the agent has dialled


Fields = dict[str, Any]
MOST_WAITING = 256
"""Questions that wait for the head at most. Further ones are refused as busy."""
SILENT_SECONDS = 5.0
"""Seconds without a word of the head, which answers each heartbeat, after which nothing is passed on."""
_MAX_SECONDS = 60.0
_MARGIN_SECONDS = 0.2
"""The caller learns that the head gave no answer before it gives up itself."""


class HeadCalls:
    """The questions that wait for an answer of the head.

    `ask` is for several threads, the rest for the one that has the connection. The descriptor is readable
    once something waits to be sent. `find_successor` returns whether another head may come by itself.
    """

    def __init__(self, find_successor: Callable[[], bool]) -> None:
        self._find_successor = find_successor
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        #: Unsent questions, and their callers, by number. Written under the lock.
        self._unsent: deque[Message] = deque()
        self._waiting: dict[int, Future[Fields]] = {}
        self._number = 0
        #: When the head answered last, on the monotonic clock, None: never; and whether it is connected.
        self._heard_at: float | None = None
        self._is_connected = False

    def fileno(self) -> int:
        return self._event

    def ask(self, kind: str, fields: Fields) -> Fields:
        """Return the answer of the head; `away`: there is none now. `lost`: it gave none in time.

        With `away` goes `waits`: whether there may be one soon, so that the caller tries again.
        """
        left = min(parse_seconds("left", fields.pop("left", _MAX_SECONDS)), _MAX_SECONDS)
        with self._lock:
            if away := self._describe_absence():
                return {"away": away, "waits": self._is_recent() or self._find_successor()}
            if len(self._waiting) >= MOST_WAITING:
                return {"busy": True}
            self._number += 1
            number, answer = self._number, Future[Fields]()
            self._waiting[number] = answer
            self._unsent.append(
                {"do": "names", "number": number, "kind": kind, "fields": fields, "left": left}
            )
        os.eventfd_write(self._event, 1)
        try:
            return answer.result(max(0.0, left - _MARGIN_SECONDS))
        except TimeoutError:
            return {"lost": f"the head gave no answer within {left:.3g} s"}
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def _is_recent(self) -> bool:
        """Return whether the head has said something a moment ago."""
        return self._heard_at is not None and time.monotonic() - self._heard_at < SILENT_SECONDS

    def _describe_absence(self) -> str:
        """Return why no head can be asked; "": one can be."""
        if self._is_connected and self._is_recent():
            return ""
        silent = None if self._heard_at is None else time.monotonic() - self._heard_at
        heard = "wasn't heard since the agent began" if silent is None else f"was heard {silent:.0f} s ago"
        return (
            f"the head {heard}. No file is opened or changed until it is back. `insitu up` with --hosts or "
            f"--engine, as before, starts it"
        )

    def send(self, channel: Channel) -> None:
        """Send the unsent questions. Raises ChannelClosed."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        while True:
            with self._lock:
                if not self._unsent:
                    return
                message = self._unsent.popleft()
                if message["number"] not in self._waiting:
                    continue
            channel.send(message)

    def record_heard(self) -> None:
        """Note that the head has said something."""
        self._heard_at, self._is_connected = time.monotonic(), True

    def record_answer(self, message: Message) -> None:
        """Give an answer to the one who waits for it."""
        number, answer = message.get("number"), message.get("answer")
        with self._lock:
            waiting = self._waiting.pop(number, None) if type(number) is int else None
        if waiting is not None and isinstance(answer, dict):
            waiting.set_result(answer)

    def record_lost(self) -> None:
        """Note that the connection has ended: no answer comes any more."""
        with self._lock:
            self._is_connected = False
            waiting, self._waiting = self._waiting, {}
            self._unsent.clear()
        for each in waiting.values():
            each.set_result({"lost": "the connection to the head has ended"})
