"""The changes of one server's state on their way to its mirror, and the answers that wait for the mirror."""

from __future__ import annotations

import logging
import time

import numpy as np

from insitu.base.errors import InsituError
from insitu.parameters.connection import Connection, ConnectionClosed
from insitu.parameters.rules import REQUEST, Message, make_failure

_LOG = logging.getLogger("insitu")


class ReplicationLog:
    """Sends each change to the mirror and holds its answer back until the mirror has it.

    Without a mirror answers are sent at once, except in the first seconds of a new primary: these answers
    wait until a mirror comes, or until it is no longer expected.
    """

    def __init__(self, server: int) -> None:
        self._server = server
        #: The mirror; None: there is none. Set by `MirrorManager`.
        self.mirror: Connection | None = None
        #: Whether the mirror has acknowledged the snapshot, and so has all of the state.
        self.mirrored = False
        #: Time on the monotonic clock until which answers wait for a mirror to come; 0: they don't wait.
        self.mirror_expected_until = 0.0
        self._last_change = 0
        #: Answers that wait, by the number of the change that the mirror must acknowledge.
        self._waiting: dict[int, list[tuple[Connection, Message]]] = {}

    def append(self, message: Message) -> int | None:
        """Send the request of a change to the mirror.

        Return the change's number, for `reply`; None if its answer needs not wait.
        """
        if self.mirror is None:
            if time.monotonic() >= self.mirror_expected_until:
                return None
            self._last_change += 1
            return self._last_change
        self._last_change += 1
        # Arrays may be in a worker's memory, which the worker may change before they are sent.
        arrays = [np.array(array) for array in message.arrays]
        try:
            self.mirror.send(Message(REQUEST, self._last_change, {**message.meta, "change": True}, arrays))
        except ConnectionClosed:
            self.lose_mirror()
            return None
        return self._last_change

    def reply(self, connection: Connection, answer: Message, change: int | None) -> None:
        """Answer a worker, once the mirror has the change of this number (None: now)."""
        if change is None:
            connection.enqueue(answer)
        else:
            self._waiting.setdefault(change, []).append((connection, answer))

    def acknowledge(self, change: int) -> None:
        """Record that the mirror has all changes up to this number, and send the answers that waited."""
        self.mirrored = True
        for number in sorted(self._waiting):
            if number <= change:
                self._send_waiting(number)

    def lose_mirror(self) -> None:
        """Continue without a mirror, and send all answers that waited."""
        _LOG.warning(
            "Server %d has lost its mirror, and continues without one until it is back", self._server
        )
        self.mirror = None
        self.mirrored = False
        self._stop_expecting()

    def expire(self, now: float) -> None:
        """Stop waiting for a mirror that didn't come in time."""
        if self.mirror is None and self.mirror_expected_until and now >= self.mirror_expected_until:
            self._stop_expecting()

    def _stop_expecting(self) -> None:
        self.mirror_expected_until = 0.0
        for number in sorted(self._waiting):
            self._send_waiting(number)

    def _send_waiting(self, number: int) -> None:
        for connection, answer in self._waiting.pop(number):
            connection.enqueue(answer)

    def fail_waiting(self, error: InsituError) -> None:
        """Fail all requests whose answers wait: this server may not acknowledge them any more."""
        waiting, self._waiting = self._waiting, {}
        for answers in waiting.values():
            for connection, answer in answers:
                connection.enqueue(make_failure(answer.request, error))
