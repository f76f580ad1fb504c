"""The supervisor's end of its connection to the server of one host; see `host_server.py`."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import JobPaths
from insitu.base.progress import Progress
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.base.typed import Count, Seconds, Text, convert, convert_exactly
from insitu.cluster.decide import SILENT_SECONDS, Failure, HostSigns
from insitu.cluster.engines import Channel, Command, Message, NodeState, ProcessState, RemoteEngine
from insitu.cluster.job_backup import FolderCopy, Mark
from insitu.cluster.task import make_writable
from insitu.exchange import measure_silence

logger = logging.getLogger("insitu")
BEAT_SECONDS = 0.25
"""Seconds between two beats, which a host's kernel acknowledges; see `cluster/decide/host_loss.py`."""
_MAX_UNSENT_BYTES = 1 << 22
_SIGNED = Annotated[int, Meta(ge=-1, lt=1 << 62)]
_CODE = Annotated[int, Meta(gt=-(1 << 62), lt=1 << 62)]
_PROGRESS = tuple[_SIGNED, _SIGNED, Count, Seconds, Text, bool, _SIGNED, bool]
_PROCESS = tuple[bool, Count, Seconds]
"""Fields of the dataclasses of these names."""
_RETRY_SECONDS = 5.0
"""Seconds after which a file is asked for again that couldn't be written here."""
_MAX_REPLIES = 4
"""Answers that may wait at most; one call at a time is answered."""


class HostLink(RemoteEngine):
    """The connection to the server of one host, and what that has said about its tasks."""

    reply_timeout = SILENT_SECONDS

    def __init__(
        self,
        node: NodeId,
        channel: Channel,
        job: JobPaths,
        wake: int | None,
        *,
        shares_folder: bool,
        door: str = "",
    ) -> None:
        super().__init__(channel, wake)
        #: The host's node.
        self.node = node
        #: True if the host sees the job's folder itself: nothing is copied then.
        self.shares_folder = shares_folder
        #: The address at which other hosts try to reach it; see `HostWitness`.
        self.door = door
        #: True if it is this machine, with which a copy there would be lost.
        self.is_near = _is_near(channel)
        #: Other hosts that this one has been asked about and has reached.
        self.seen: list[NodeId] = []
        #: True once its loss has been logged.
        self.is_noted = False
        #: When the server has said something last, on the monotonic clock.
        self.heard = time.monotonic()
        #: Why it was given up, as a sentence without its subject; "" if it has ended the connection.
        self.given_up = ""
        #: The last records of the tasks launched there, their times on this host's clock.
        self.progress: dict[TaskId, Progress] = {}
        #: The processes of tasks, as last reported.
        self.processes: dict[TaskId, ProcessState] = {}
        #: The node, as last reported.
        self.state: NodeState | None = None
        #: When the link was opened, on the monotonic clock.
        self.opened = time.monotonic()
        #: The tasks' records of their ends.
        self.failures: dict[TaskId, Failure] = {}
        #: Why the host can't keep a copy of the job, as it has said; "" if it can.
        self.copy_failed = ""
        #: Other caches whose shards tasks there want to know.
        self.wanted: list[str] = []
        #: Epochs for which tasks there want rows to be read again.
        self.wanted_refreshes: list[int] = []
        #: The files of the job's folder here that the host has as well, as they were then.
        self.held: dict[str, Mark] = {}
        #: The tasks that were launched here and whose ends haven't come. Another host's are none of its.
        self._launched: set[TaskId] = set()
        self._job = job
        self._copy = FolderCopy(job.root)
        #: Files that couldn't be written here, and when they are asked for again, on the monotonic clock.
        self._unwritten: dict[str, float] = {}

    def launch(self, task: TaskSpec, command: Command) -> int:
        self._launched.add(task.task)  # it may end before the answer is read
        try:
            return super().launch(task, command)
        except ClusterError:
            self._launched.discard(task.task)
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise self._refuse_answer(error) from None

    def reserve(self, tasks: Sequence[TaskSpec]) -> dict[TaskId, str]:
        try:
            found = super().reserve(tasks)
        except (AttributeError, InputError, KeyError, TypeError, ValueError) as error:
            raise self._refuse_answer(error) from None
        if found.keys() != {task.task for task in tasks}:
            raise self._refuse_answer(ValueError("the addresses of other tasks"))
        return found

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def events(self) -> int:
        """The events of `poll` to wait for."""
        return select.POLLIN | (select.POLLOUT if self._channel.unsent_bytes else 0)

    @property
    def unsent_bytes(self) -> int:
        """How much of what was sent waits for the host to take it."""
        return self._channel.unsent_bytes

    @property
    def has_news(self) -> bool:
        """True if `wait` would return at once."""
        return bool(self._happened)

    def beat(self) -> None:
        """Report to the server that the job continues."""
        self._send({"do": "beat"})
        now = time.monotonic()
        for path in [path for path, at in self._unwritten.items() if at <= now]:
            del self._unwritten[path]
            self._send({"do": "again", "path": path})

    def tell(self, message: Message) -> None:
        """Send what isn't answered."""
        self._send(message)

    def send_all(self, messages: Iterable[Message]) -> None:
        """Send many messages, as fast as the host takes them."""
        for message in messages:
            self._send(message)
            while not self.is_lost and self._channel.unsent_bytes > _MAX_UNSENT_BYTES:
                self._receive(BEAT_SECONDS)
                self.check_silence()

    def ask(self, message: Message) -> Message:
        """Send a call and return its answer. Raises ClusterError."""
        return self._request(message)

    def take_in(self) -> None:
        """Take in what has come."""
        self._receive(0.0)

    def take_answer(self, name: str, kind: type) -> Any:
        """Return a field of the answer to a call that `tell` has sent. Raises ClusterError."""
        found = self._wait_for_reply().get(name)
        if type(found) is not kind:
            raise self._refuse_answer(TypeError(f"{name} is no {kind.__name__}"))
        return found

    def abandon(self) -> None:
        """End the connection: the server ends its tasks, and itself."""
        self._lose_server()

    def read_signs(self) -> HostSigns:
        """Return the signs by which it is decided whether the host is lost."""
        if time.monotonic() - self.heard > SILENT_SECONDS:
            self._receive(0.0)  # what has come while nobody looked
        if self.is_lost:
            return HostSigns(0.0, 0.0)
        kernel = measure_silence(self._channel.connection)
        return HostSigns(kernel.seconds, time.monotonic() - self.heard, kernel.round_trip)

    def give_up(self, why: str) -> None:
        """Count the host as lost, and its tasks as killed."""
        if not self.is_lost:
            self.given_up = why
            self._lose_server()

    def check_silence(self) -> None:
        """Give the server up if it has said nothing for too long."""
        if not self.is_lost and self.read_signs().silent > SILENT_SECONDS:
            self.give_up(f"said nothing for {SILENT_SECONDS:g} s")

    def _describe_loss(self) -> str:
        return f"{self.node} can't be reached, so its tasks count as killed"

    def _lose_server(self) -> None:
        if not self.is_lost:
            self._channel.shut_down()
        self._copy.drop()
        super()._lose_server()

    def _refuse_answer(self, error: Exception) -> ClusterError:
        """Give the server up, whose answer can't be understood. Returns what to raise."""
        logger.warning("%s answered what can't be understood: %s: %s", self.node, type(error).__name__, error)
        self._lose_server()
        return ClusterError(self._describe_loss())

    def _take(self, message: Message) -> None:
        """Take in one message. One that can't be understood costs the host its tasks, not the job its
        supervisor."""
        try:
            self._take_checked(message)
        except Exception as error:
            logger.warning("%s sent what can't be understood: %s: %s", self.node, type(error).__name__, error)
            self._lose_server()

    def _take_checked(self, message: Message) -> None:
        self.heard = time.monotonic()
        if "report" in message:
            self._take_report(message["report"])
        elif "file" in message:
            self._take_file(message)
        elif "wanted" in message:
            self.wanted.append(_text(message["wanted"]))
        elif "wanted_refresh" in message:
            self.wanted_refreshes.append(convert("epoch", message["wanted_refresh"], Count, ClusterError))
        elif "copy_failed" in message:
            self.copy_failed = _text(message["copy_failed"]) or "unknown"
            logger.warning("%s keeps no copy of the job: %s", self.node, self.copy_failed)
        elif "seen" in message:
            self.seen.append(NodeId(_text(message["seen"])))
        elif "removed" in message:
            for path in message["removed"]:
                self._copy.remove(path)
                self.held.pop(path, None)
        elif "ended" in message:
            task = TaskId.parse(message["ended"])
            if task not in self._launched:
                raise ValueError(f"{task} doesn't run there")
            convert("code", message["code"], _CODE, ClusterError)
            if message.get("failure"):
                self.failures[task] = _parse_failure(message["failure"])
            self._launched.discard(task)
            super()._take(message)
        elif "output" in message:
            if TaskId.parse(message["output"]) not in self._launched:
                raise ValueError(f"{message['output']} doesn't run there")
            super()._take(message)
        else:
            if len(self._replies) >= _MAX_REPLIES:
                raise ValueError("answers to what wasn't asked")
            super()._take(message)

    def _take_report(self, report: Message) -> None:
        now = time.monotonic()
        for task, values in report.get("progress", ()):
            found = Progress(*convert("progress", values, _PROGRESS, ClusterError))
            found.place.encode()  # the file of records can hold it
            self.progress[TaskId.parse(task)] = replace(found, at=now - found.at)
        if "node" in report:
            self.processes = {
                TaskId.parse(t): ProcessState(*convert("process", state, _PROCESS, ClusterError))
                for t, state in report["processes"]
            }
            self.state = NodeState(*convert("node", report["node"], tuple[Count, bool], ClusterError))

    def _take_file(self, message: Message) -> None:
        try:
            path = self._copy.take(message)
            if path is not None:
                self.held[path] = Mark.of((self._job.root / path).stat())
        except OSError as error:  # a full disk costs no task
            path = str(message["file"])
            if path not in self._unwritten:
                logger.warning("%s from %s can't be written here yet: %s", path, self.node, error)
            self._unwritten[path] = time.monotonic() + _RETRY_SECONDS


def _is_near(channel: Channel) -> bool:
    """Return whether both ends of a connection have one address."""
    try:
        return bool(channel.connection.getpeername()[0] == channel.connection.getsockname()[0])
    except (OSError, IndexError):
        return False


def _parse_failure(values: dict[str, Any]) -> Failure:
    found = convert_exactly("failure", values, Failure, ClusterError)
    return replace(
        found,
        type=make_writable(found.type),
        message=make_writable(found.message),
        fingerprint=make_writable(found.fingerprint),
    )


def _text(value: Any) -> str:
    """Return a text that can be written to a file."""
    if type(value) is not str:
        raise TypeError(f"no text: {value!r:.100}")
    value.encode()
    return value
