"""How a process becomes head if etcd holds the metadata, and stays it: it wins a key, and keeps its lease.

The decisions are in `decide/leadership.py`. An agent wins the key and keeps it until the head that it has
started does so itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from dataclasses import asdict, dataclass, replace

from insitu.base.errors import ClusterError, HeadReplaced, InsituError
from insitu.cluster.decide import (
    EPOCHS_OF_A_NUMBER,
    HEAD_LEASE_SECONDS,
    KEEP_SECONDS,
    Hold,
    Kept,
    Lost,
    Unanswered,
    advance_hold,
    find_cluster_number,
)
from insitu.metadata import HEAD_KEY, FencedStore, LeaderKey, MetadataStore, Put, compare_found, read_leader

logger = logging.getLogger("insitu")
NUMBER_KEY = "head/number"
OPTIONS_KEY = "head/options"
_RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Won:
    """The key of the head, which a process of this machine has won."""

    #: The id of the lease.
    lease: int
    #: The first epoch of the number that the cluster has now.
    epoch: int
    #: Distinguishes the winner from others.
    instance: str
    #: The head's address, by the key; empty: it is being started.
    address: str = ""

    @property
    def fence(self) -> bytes:
        """The value of the key."""
        return LeaderKey(self.address, self.epoch, self.instance).encode()

    def encode(self) -> str:
        """Return it as an argument of the head's process."""
        return json.dumps(asdict(self))


def parse_won(text: str) -> Won | None:
    """Return what an argument says; None for an empty one."""
    return Won(**json.loads(text)) if text else None


def win(store: MetadataStore, epoch: int, *, own: str = "", after_down: bool = False) -> Won:
    """Win the key of the head, for an epoch above `epoch`, which this home has seen.

    A key that the head `own` of this home has left, which has ended for certain, doesn't count; nor, with
    `after_down`, one that says that nobody leads. Raises ClusterError if another head leads, MetadataError.
    """
    found, _ = store.get([HEAD_KEY, NUMBER_KEY])
    leader, number = read_leader(found.get(HEAD_KEY)), found.get(NUMBER_KEY)
    if leader is not None and leader.instance != own and not (leader.is_down and after_down):
        raise _make_refusal(leader)
    highest = max(find_cluster_number(epoch), 0 if number is None else int(number.value))
    lease = store.grant(HEAD_LEASE_SECONDS)
    won = Won(lease, (highest + 1) * EPOCHS_OF_A_NUMBER, secrets.token_hex(16))
    compare = compare_found((HEAD_KEY, NUMBER_KEY), found)
    changes = [Put(HEAD_KEY, won.fence, lease), Put(NUMBER_KEY, b"%d" % (highest + 1))]
    outcome = store.transact(compare, changes, secrets.token_hex(16))
    if not outcome.succeeded:
        store.revoke(lease)
        raise _make_refusal(read_leader(next((r for r in outcome.found if r.key == HEAD_KEY), None)))
    return won


def _make_refusal(leader: LeaderKey | None) -> ClusterError:
    if leader is not None and leader.is_down:
        return ClusterError(
            "`insitu down` has ended the cluster. `insitu up` on that machine starts it again"
        )
    where = f"the one at {leader.address}" if leader and leader.address else "another one, just being started"
    return ClusterError(
        f"A cluster has one head. Received: this home, while {where} leads. Run the command on the machine "
        f"of that head"
    )


class Lead:
    """The lease of a head. A thread keeps it until `close`, or until it is lost."""

    def __init__(self, store: MetadataStore, won: Won) -> None:
        self.store = store
        self.won = won
        self._hold = Hold(read_clock())
        self._closing = threading.Event()
        self._is_down = False
        self._pause = 0.0
        #: Whether etcd answered the last request.
        self.is_etcd_answering = True
        #: Why this process leads no more; "": it may lead.
        self.ended = ""
        #: The address of the head that leads instead, once this one leads no more; "": nobody knows.
        self.successor = ""
        #: The options that the next head takes over, and those that were written.
        self.options: dict[str, float | None] = {}
        self._written: dict[str, float | None] = {}
        self._thread = threading.Thread(target=self._run, name="insitu-lease", daemon=True)
        self._thread.start()

    def may_lead(self) -> bool:
        """Return whether no other head can lead now, by what this process knows."""
        return not self.ended and self._hold.may_lead(read_clock())

    def make_store(self) -> FencedStore:
        """Return the store for changes that this head alone may make."""
        return FencedStore(self.store, self.won.fence)

    def announce(self, address: str) -> bytes:
        """Publish the head's address. Returns the value of its key now. Raises HeadReplaced."""
        won = replace(self.won, address=address)
        self.make_store().transact([], [Put(HEAD_KEY, won.fence, won.lease)], secrets.token_hex(16))
        self.won = won
        return won.fence

    def read_options(self) -> dict[str, float | None]:
        """Return what the head before has had, and keep it."""
        found, _ = self.store.get([OPTIONS_KEY])
        if OPTIONS_KEY in found:
            self.options = self._written = dict(json.loads(found[OPTIONS_KEY].value))
        return self.options

    def close(self) -> None:
        """Keep the lease no more. A process that has taken it over continues."""
        self._closing.set()

    def resign(self, *, down: bool = False) -> None:
        """Let another head lead; `down`: nobody, until a person says so."""
        self.close()
        if self.ended or self._is_down:
            return
        try:
            if down:
                key = LeaderKey("", self.won.epoch, self.won.instance, is_down=True)
                self.make_store().transact([], [Put(HEAD_KEY, key.encode())], secrets.token_hex(16))
                self._is_down = True
            self.store.revoke(self.won.lease)
        except InsituError as error:
            logger.warning("etcd doesn't know that this head has ended: %s", error)

    def _run(self) -> None:
        while not self._closing.wait(self._pause):
            self._pause = KEEP_SECONDS
            asked_at = read_clock()
            try:
                is_kept = self.store.keep(self.won.lease) and self._find_leader() is None
                self._note(Kept(asked_at) if is_kept else Lost())
                self._write_options()
            except HeadReplaced:
                self._note(Lost())
            except InsituError as error:
                self._pause = _RETRY_SECONDS
                self._note(Unanswered(), str(error))

    def _find_leader(self) -> LeaderKey | None:
        """Return what the key says if another head has it, or nobody; None: this one has it. Raises
        MetadataError."""
        found, _ = self.store.get([HEAD_KEY])
        leader = read_leader(found.get(HEAD_KEY)) or LeaderKey("", 0, "")
        return None if leader.instance == self.won.instance else leader

    def _write_options(self) -> None:
        options = dict(self.options)
        if options != self._written and not self.ended:
            put = Put(OPTIONS_KEY, json.dumps(options).encode())
            self.make_store().transact([], [put], secrets.token_hex(16))
            self._written = options

    def _note(self, event: Kept | Unanswered | Lost, why: str = "") -> None:
        self.is_etcd_answering = not isinstance(event, Unanswered)
        self._hold, action = advance_hold(self._hold, event, read_clock())
        if action == "say_silent":
            logger.warning(
                "etcd hasn't answered for %g s. Nothing is changed until it does: another head may lead. %s",
                HEAD_LEASE_SECONDS,
                why,
            )
        elif action == "say_heard":
            logger.warning("etcd answers again, and this head leads")
        elif action == "stop":
            self._end()

    def _end(self) -> None:
        with contextlib.suppress(InsituError):
            leader = self._find_leader()
            self.successor = "" if leader is None else leader.address
        by = f", and the one at {self.successor} leads" if self.successor else ""
        self.ended = f"the lease of this head has ended{by}: this one ends, and has changed nothing since"
        self._closing.set()


def read_clock() -> float:
    """Return the seconds of a clock that keeps running while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
