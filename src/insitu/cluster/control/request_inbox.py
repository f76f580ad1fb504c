"""Takes the requests of users: messages at the job's socket, and signals to the controller.

A client connects and sends one line, `{"id": TOKEN, "do": "stop"}`, `{"id": TOKEN, "do": "scale", "workers":
N}` or `{"id": TOKEN, "do": "signal", "task": TASK, "name": NAME}`. It gets one line back: `{"ok": true,
"text": TEXT}` or `{"error": KIND, "text": TEXT}`, where KIND is `refused`, `ended` or `invalid`. Then the
connection is closed. A client that loses it before may send the same line again: the id shows that it is the
same request.
"""

from __future__ import annotations

import contextlib
import errno
import select
import signal
import socket
import time
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import JobPaths
from insitu.base.spec import TaskId
from insitu.cluster.decide import Log, Reply, StopRequestedEvent, advance
from insitu.cluster.engines import Channel, ChannelClosed, Message, SignalName, Wakeup
from insitu.cluster.job_files import Journal, MergedLog, is_from_owner

MAX_REQUEST_BYTES = 4096
MAX_CONNECTIONS = 64
"""With more than these the one that has been silent for longest is closed, else the one that has waited for
its reply for longest."""
ACCEPT_PAUSE = 1.0
"""Seconds for which no connection is accepted if no descriptor is left for one."""
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_MAX_TOKEN = 64


@dataclass(frozen=True, slots=True)
class JobRequest:
    """One request of a user."""

    #: The action to perform.
    action: Literal["stop", "scale", "signal"]
    #: Identifies the request, also when it is sent again; "" for a signal, which gets no reply.
    token: str = ""
    #: The number of workers to scale to.
    workers: int = 0
    #: The task that gets a signal.
    task: TaskId | None = None
    #: That signal.
    signal: SignalName = "kill"


class Inbox(Protocol):
    """Gives a controller the requests of users."""

    def receive(self) -> list[JobRequest]:
        """Return the requests that have come since the last call, without waiting."""

    def reply(self, token: str, message: Message) -> None:
        """Reply to all who sent the request `token`."""


class TaskSignals(Protocol):
    """Sends signals to tasks."""

    def signal(self, task: TaskId, name: SignalName) -> None: ...


class RequestInbox:
    """Reads requests off connections to `listener`. `wakeup` becomes readable when there may be some."""

    def __init__(self, listener: socket.socket, wakeup: Wakeup) -> None:
        self._listener = listener
        self._wakeup = wakeup
        self._silent: list[Channel] = []
        """Connections that have sent no request yet, oldest first."""
        self._waiting: list[tuple[str, Channel]] = []
        """Connections that wait for the reply to the request of this token, oldest first."""
        self._paused_until: float | None = None
        """While no connection is accepted: the time of `time.monotonic` until then."""
        wakeup.watch(listener)

    def receive(self) -> list[JobRequest]:
        signals = self._wakeup.take_signals()
        requests = []
        if signal.SIGTERM in signals or signal.SIGINT in signals:
            requests.append(JobRequest("stop"))
        self._drop_disconnected()
        self._accept()
        for channel in list(self._silent):
            with contextlib.suppress(ChannelClosed):
                messages = channel.receive()
                if not messages:
                    continue
                if request := self._read(channel, messages[0]):
                    requests.append(request)
                    continue
            self._drop(channel)
        return requests

    def reply(self, token: str, message: Message) -> None:
        waiting, self._waiting = self._waiting, []
        for sent, channel in waiting:
            if sent != token:
                self._waiting.append((sent, channel))
                continue
            with contextlib.suppress(ChannelClosed):
                channel.send(message)
            channel.close()

    def close(self) -> None:
        self.leave()
        self._listener.close()

    def leave(self) -> None:
        """Close all connections, and take no more: another inbox does."""
        for channel in (*self._silent, *(channel for _, channel in self._waiting)):
            channel.close()
        self._silent.clear()
        self._waiting.clear()
        if self._paused_until is None:
            self._wakeup.unwatch(self._listener)

    def _accept(self) -> None:
        if self._paused_until is not None:
            if time.monotonic() < self._paused_until:
                return
            self._paused_until = None
            self._wakeup.watch(self._listener)
        try:
            while True:
                connection, _ = self._listener.accept()
                if not is_from_owner(connection):
                    connection.close()
                    continue
                channel = Channel(connection, MAX_REQUEST_BYTES)
                self._wakeup.watch(channel)
                self._silent.append(channel)
                self._make_room()
        except OSError as error:
            # It ends with BlockingIOError once nobody else waits.
            if error.errno in _NO_DESCRIPTORS:
                # The listener stays readable, and would wake the controller again and again.
                self._wakeup.unwatch(self._listener)
                self._paused_until = time.monotonic() + ACCEPT_PAUSE

    def _make_room(self) -> None:
        """Close connections beyond `MAX_CONNECTIONS`, never the newest: its request is still to be read."""
        while len(self._silent) + len(self._waiting) > MAX_CONNECTIONS:
            if len(self._silent) > 1:
                self._drop(self._silent[0])
            else:
                self._waiting.pop(0)[1].close()

    def _drop_disconnected(self) -> None:
        """Close the connections that wait for a reply and whose clients have closed theirs."""
        poll = select.poll()
        for _, channel in self._waiting:
            # Asks for no event: that the other end is closed is always reported.
            poll.register(channel, 0)
        closed = {descriptor for descriptor, _ in poll.poll(0)}
        waiting, self._waiting = self._waiting, []
        for token, channel in waiting:
            if channel.fileno() in closed:
                channel.close()
            else:
                self._waiting.append((token, channel))

    def _read(self, channel: Channel, message: Message) -> JobRequest | None:
        """Return the request in the first message of `channel`, which then waits for the reply, or None."""
        request = parse_request(message)
        if request is None:
            with contextlib.suppress(ChannelClosed):
                channel.send({"error": "invalid", "text": f"not a request to this job: {str(message)[:200]}"})
            return None
        self._silent.remove(channel)
        self._wakeup.unwatch(channel)
        self._waiting.append((request.token, channel))
        return request

    def _drop(self, channel: Channel) -> None:
        self._silent.remove(channel)
        channel.close()


def parse_request(message: Message) -> JobRequest | None:
    """Return the request that `message` is, or None."""
    token, workers = message.get("id"), message.get("workers", 0)
    if not isinstance(token, str) or not token.isalnum() or len(token) > _MAX_TOKEN:
        return None
    match message.get("do"):
        case "stop":
            return JobRequest("stop", token)
        case "scale" if type(workers) is int:
            return JobRequest("scale", token, workers)
        case "signal" if message.get("name") in get_args(SignalName):
            with contextlib.suppress(InputError):
                task = TaskId.parse(str(message.get("task")))
                return JobRequest("signal", token, task=task, signal=message["name"])
    return None


def send_signal(request: JobRequest, tasks: TaskSignals, inbox: Inbox) -> None:
    """Send the signal that a request asks for. It changes nothing that a journal would know."""
    if request.task is not None:
        tasks.signal(request.task, request.signal)
    inbox.reply(request.token, _encode_reply(f"sent {request.signal} to {request.task}", refused=False))


class EarlyRequests:
    """Takes the requests of users while a job waits for places, before it has a controller."""

    def __init__(self, job: JobPaths, listener: socket.socket, wakeup: Wakeup) -> None:
        self._job, self._listener, self._wakeup = job, listener, wakeup
        self._inbox: RequestInbox | None = None

    def is_stopped(self) -> bool:
        """Return whether somebody has stopped the job: the journal has its end then. Raises ClusterError."""
        inbox = self._inbox = self._inbox or RequestInbox(self._listener, self._wakeup)
        for request in inbox.receive():
            if request.action != "stop":
                text = f"{self._job.root.name} waits for places of its tasks. Ask again once it trains"
                inbox.reply(request.token, _encode_reply(text, refused=True))
                continue
            journal, now, event = Journal(self._job.journal), time.time(), StopRequestedEvent(request.token)
            state, actions = advance(journal.state(), event, now)
            journal.record(now, event, actions, state)
            for action in actions:
                if isinstance(action, Log):
                    MergedLog(self._job).log(action.text)
                elif isinstance(action, Reply):
                    inbox.reply(request.token, _encode_reply(action.text, refused=action.refused))
            return True
        return False

    def end(self) -> None:
        """Leave the requests that come to a controller."""
        if self._inbox is not None:
            self._inbox.leave()
            self._inbox = None


class ReplyBook:
    """Keeps a controller's replies to requests.

    A reply is sent once the next controller would give it too. A request sent again gets the same reply.
    """

    def __init__(self, inbox: Inbox, journal: Journal) -> None:
        self._inbox = inbox
        self._journal = journal
        self._replies: dict[str, Message] = {}
        """By the tokens of requests that this controller has decided about."""
        self._unsent: list[tuple[JobRequest, Message]] = []

    def note(self, reply: Reply) -> None:
        """Keep the decision about a request."""
        self._replies[reply.token] = _encode_reply(reply.text, refused=reply.refused)

    def find(self, token: str) -> Message | None:
        """Return what this controller or one before it has decided about the request."""
        if token and token not in self._replies:
            with contextlib.suppress(ClusterError):
                if found := self._journal.find_reply(token):
                    return _encode_reply(found["text"], refused=found["refused"])
        return self._replies.get(token)

    def queue(self, request: JobRequest, phase: str) -> None:
        """Have the reply sent; if nothing was decided, the job is over, in `phase`."""
        if request.token:
            reply = self.find(request.token) or {"error": "ended", "text": phase}
            self._unsent.append((request, reply))

    def send(self, *, is_journal_written: bool) -> None:
        """Send the replies that may be sent. A decision not in the journal is lost with this controller.

        The reply to a `stop` is sent in any case: a full disk must not keep a user from stopping a job.
        """
        held = []
        for request, reply in self._unsent:
            if is_journal_written or request.action == "stop":
                self._inbox.reply(request.token, reply)
            else:
                held.append((request, reply))
        self._unsent = held


def _encode_reply(text: str, *, refused: bool) -> Message:
    return {"error": "refused", "text": text} if refused else {"ok": True, "text": text}
