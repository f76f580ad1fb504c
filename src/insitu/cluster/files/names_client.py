"""Asks about names: the metadata store of this machine, or agents, which pass it on to their head.

A question may be asked several times: a change carries an id, by which it is made once. The caller may give
it as `change`, and say by `again` that it was asked before. Then an id that is used up is answered.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from typing import Protocol

from insitu.base.errors import ClusterError
from insitu.base.spec import NodeId
from insitu.cluster.decide import rank_nodes
from insitu.cluster.files.asking import BUSY_SECONDS, CLIENT_SECONDS, HEDGE_SECONDS, Calls, Suspects
from insitu.cluster.files.peers import (
    SECONDS,
    Busy,
    Fields,
    Peers,
    Unreachable,
    View,
    raise_described,
)
from insitu.cluster.files.service import NameService

RETRY_SECONDS = 0.25
_UNKNOWN = ". The change may have been made or not: look whether it was"


class NamesAway(ClusterError):
    """Nobody can say what is asked about names. `may_be_made`: whether the change may have been made."""

    def __init__(self, message: str, *, may_be_made: bool = False, logs: str | None = None) -> None:
        super().__init__(message + (_UNKNOWN if may_be_made else ""), logs=logs)
        self.may_be_made = may_be_made


class Names(Protocol):
    """Knows the names of all volumes."""

    def ask(self, kind: str, fields: Fields, *, is_change: bool = False) -> Fields:
        """Return the answer to a question of `NameService`. Raises OSError, InputError, GridError, and
        NamesAway if nobody can say, or a change may have been made or not."""


class LocalNames:
    """The names in a metadata store that this process has opened. `then` is called after each change."""

    def __init__(self, service: NameService, then: Callable[[], None] = lambda: None) -> None:
        self._service = service
        self._then = then

    def ask(self, kind: str, fields: Fields, *, is_change: bool = False) -> Fields:
        asked = {"change": secrets.token_hex(16), **fields} if is_change else fields
        deadline = time.monotonic() + CLIENT_SECONDS
        while True:
            answer = self._service.answer(kind, asked)
            if "used_up" in answer:
                return answer if "change" in fields else self.ask(kind, fields, is_change=True)
            if not answer.keys() & {"busy", "lost"}:
                raise_described(answer)
                if is_change:
                    self._then()
                return answer
            if time.monotonic() > deadline:
                raise NamesAway(
                    f"Names of insitu:// can't be asked for: {answer.get('lost')}", may_be_made=is_change
                )
            asked = {**asked, "again": True} if is_change else asked
            time.sleep(BUSY_SECONDS)


class RemoteNames:
    """The names of a cluster with agents. `own` are those of this host, which are asked first."""

    def __init__(
        self, peers: Peers, find_view: Callable[..., View], suspects: Suspects, own: Collection[NodeId]
    ) -> None:
        self._peers = peers
        self._find_view = find_view
        self._suspects = suspects
        self._own = own
        #: Spreads clients over agents.
        self._key = secrets.token_hex(4)

    def ask(self, kind: str, fields: Fields, *, is_change: bool = False) -> Fields:
        deadline = time.monotonic() + CLIENT_SECONDS
        while True:
            answer = _Question(self, kind, fields, deadline, is_change=is_change).ask()
            if "used_up" not in answer or "change" in fields:
                return answer

    def order(self, *, fresh: bool) -> tuple[View, list[NodeId]]:
        """Return the nodes in the order in which they are asked."""
        view = self._find_view(fresh=fresh)
        nodes = sorted(rank_nodes(self._key, view.alive), key=lambda node: node not in self._own)
        return view, self._suspects.order(nodes)

    def are_silent(self, *nodes: NodeId) -> bool:
        """Return whether none of some nodes has answered recently."""
        return all(self._suspects.has(node) for node in nodes)

    def send(self, node: NodeId, view: View, kind: str, fields: Fields, left: float) -> Fields:
        """Ask one agent."""
        return self._peers.find(node, view).act(kind, {**fields, "left": left}, seconds=left)[0]

    def make_calls(self) -> Calls:
        return Calls(self._suspects)


class _Question:
    """One question, and those who were asked it."""

    def __init__(
        self, names: RemoteNames, kind: str, fields: Fields, deadline: float, *, is_change: bool
    ) -> None:
        self._names = names
        self._kind = kind
        self._fields = {"change": secrets.token_hex(16), **fields} if is_change else fields
        self._is_change = is_change
        self._is_again = is_change and fields.get("again") is True
        self._deadline = deadline
        self._calls = names.make_calls()
        #: The nodes that were asked, and whether they know that others were asked before.
        self._asked: dict[NodeId, bool] = {}
        self._why = ""
        #: The nodes whose last question had too little time for more than that to be the reason.
        self._hurried: set[NodeId] = set()
        #: Whether an answer may have been lost.
        self._is_lost = False
        #: Whether an agent has no head, and whether one says that it may have one soon.
        self._is_refused = False
        self._waits = False

    def ask(self) -> Fields:
        """Ask one after another. Return the first answer that counts."""
        view, waiting = self._names.order(fresh=False)
        while (left := self._deadline - time.monotonic()) > 0:
            if (
                self._is_refused
                and not self._waits
                and self._names.are_silent(*waiting, *self._calls.running)
            ):
                raise self._make_error("must be there")
            if not waiting and not self._calls.running:
                self._is_refused = self._waits = False
                time.sleep(min(RETRY_SECONDS, left))
                view, waiting = self._names.order(fresh=True)
            if waiting:
                self._begin(waiting.pop(0), view, min(SECONDS, left))
            found = self._calls.take(min(HEDGE_SECONDS if waiting or self._is_refused else SECONDS, left))
            if found is None:
                self._calls.suspect_running()
            elif (answer := self._judge(*found)) is not None:
                return answer
        raise self._make_error(f"must answer within {CLIENT_SECONDS:g} s")

    def _make_error(self, rule: str) -> NamesAway:
        return NamesAway(
            f"The head knows the names of insitu://, and {rule}. Received: {self._why or 'no answer'}",
            may_be_made=self._is_change and (self._is_lost or bool(self._calls.running)),
        )

    def _begin(self, node: NodeId, view: View, left: float) -> None:
        is_again = self._is_change and (self._is_again or bool(self._asked))
        fields = {**self._fields, "again": True} if is_again else self._fields
        self._asked[node] = is_again
        (self._hurried.add if left < HEDGE_SECONDS else self._hurried.discard)(node)
        self._calls.begin(node, lambda: self._names.send(node, view, self._kind, fields, left))

    def _judge(self, node: NodeId, answer: Fields, error: BaseException | None) -> Fields | None:
        """Return an answer that counts, None: continue. Raises an error that counts."""
        if error is None:
            if "away" not in answer and "lost" not in answer:
                return answer
            self._record_why(node, str(answer.get("away") or answer.get("lost")))
            self._is_lost |= "lost" in answer
            self._is_refused |= "away" in answer
            self._waits |= answer.get("waits") is not False
        elif isinstance(error, Unreachable | Busy):
            self._record_why(node, f"{node}: {error.message}")
            self._is_lost |= isinstance(error, Unreachable)
            self._waits |= isinstance(error, Busy)
        elif not self._is_change or len(self._asked) == 1 or self._asked[node]:
            raise error
        # Else the change may have been made by another call. Who knows of that one says so.
        return None

    def _record_why(self, node: NodeId, why: str) -> None:
        if not self._why or node not in self._hurried:
            self._why = why
