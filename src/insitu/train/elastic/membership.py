"""This process as a member of a strategy: which shards it trains on, and with whom."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import insitu.exchange
from insitu.context import Context
from insitu.errors import ExchangeError, JoinTimeout, StaleGeneration, TrainingError
from insitu.exchange import Group
from insitu.progress import IDLE, ProgressWriter
from insitu.roster import JOINING, RECOVERING, Roster, RosterWatch
from insitu.train.devices import ReplicaMonitor
from insitu.train.elastic.call_log import Session
from insitu.train.elastic.lockstep import Lockstep, Superseded

_ALONE = ("127.0.0.1:1",)
"""The address of a group of one, which meets nobody: nothing listens there."""

AUTO, SILENT, BAR, LINES = "auto", 0, 1, 2
"""Values of Keras' `verbose`."""

_PAUSE = 0.005
"""Seconds between two looks for a newer roster, while there is nothing else to do."""
_GLANCE = 0.05
"""Seconds between two looks while training goes on."""


CHECK_EVERY = 1000
"""Steps of `fit` after which it is checked that replicas are equal. Costs a hash of all variables."""


class Released(SystemExit):
    """The job goes on without this task: it ends well."""


class Membership:
    """Joins the group when it is first needed: building models takes tasks unequal times."""

    shards_move = True
    """Whether a task may get others' shards while it trains."""

    def __init__(self, context: Context, transport: str, compression: str = "none") -> None:
        if context.role != "worker":
            raise TrainingError(
                "A synchronous strategy runs in workers; worker 0 is the chief. Received: a task with the "
                f"role {context.role!r}. Start the job without --{context.role}."
            )
        self.context = context
        self.launched_shards = context.shards
        """What the script's datasets were made for; the shards of `context` may change later."""
        self.check_every = CHECK_EVERY
        self._fits = 0
        self.telling = Telling(context)
        self.watch = ReplicaMonitor()
        self.session = Session()
        self._places = _Places(self, transport, compression)
        self.lockstep = Lockstep(self._places, self.session)
        self.session.lockstep = self.lockstep

    @property
    def num_shards(self) -> int:
        return self.context.num_shards

    @property
    def is_alone(self) -> bool:
        """Whether this is the only process and it has the only shard: there is nobody to exchange with."""
        return self.num_shards == 1 and len(self.context.workers) <= 1

    @property
    def feed_options(self) -> dict[str, Any]:
        context = self.context
        return {
            "shards": context.shards,
            "num_shards": context.num_shards,
            "seed": context.seed,
            "launched_shards": self.launched_shards,
            "replicas_per_shard": context.replicas_per_shard,
        }

    @property
    def leads(self) -> bool:
        """Whether this task does what one task does for all: it has the first place in the group."""
        return self.lockstep.group.rank == 0

    @property
    def fits(self) -> int:
        """How many fits have begun in this process."""
        return self._fits

    def count_fit(self) -> int:
        """The number of this fit in the process, from 0: the same fit of a restarted script has the same."""
        self._fits += 1
        return self._fits - 1

    def group(self) -> Group:
        """The group of all workers, for whoever moves buffers outside of `fit`, `evaluate` and `predict`: a
        replacement can't get there, so that a loss from now on restarts all tasks. Raises JoinTimeout
        naming who is missing."""
        self.telling.stiffen()
        return self.lockstep.group

    @contextlib.contextmanager
    def apart(self, nested: bool) -> Iterator[None]:
        """A call made in the midst of another, where `nested`: a replacement can't get there."""
        if not nested:
            yield
            if not self.session.whole:
                self.telling.stiffen()
            return
        self.telling.apart(True)
        try:
            yield
        finally:
            self.telling.apart(False)

    def chief_rank(self, group: Group) -> int | None:
        """The rank of worker 0; None while it has no place in the group."""
        return next((r for r in range(group.size) if group.task(r) == "worker:0"), None)

    def verbosity(self, verbose: Any) -> Any:
        """One task shows progress: N bars on one terminal show nothing. Where nobody watches, a line an
        epoch instead of a bar."""
        if not self.context.is_chief:
            return SILENT
        if verbose == AUTO:
            return BAR if sys.stdout.isatty() else LINES
        return verbose


class Telling:
    """What this task says of itself while it trains. Outside a job nobody reads it, so nothing is said."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._writer: ProgressWriter | None = None
        self._at = (-1, -1)
        self._place = ""
        self.rows = 0
        self._stiff = False
        self._apart = False

    def open(self) -> None:
        job = self._context.job
        if job is not None and self._writer is None:
            self._writer = ProgressWriter(job.progress(self._context.task))

    def at(self, epoch: int, step: int, place: str) -> None:
        """The task is about to do `place` of a step."""
        self._at = (epoch, step)
        self.place(place)

    def place(self, place: str) -> None:
        self._place = place
        if self._writer is not None:
            self._writer.elastic = self.elastic and self._writer.generation > 0
            self._writer.write(*self._at, self.rows, place)

    def idle(self) -> None:
        self.place(IDLE)

    @property
    def elastic(self) -> bool:
        """Whether this task can go on with another in the place of one that is lost."""
        return not (self._stiff or self._apart)

    def stiffen(self) -> None:
        """From now on a loss can't be made good by a replacement."""
        if not self._stiff:
            self._stiff = True
            self.place(self._place)

    def apart(self, apart: bool) -> None:
        """A replacement can't get to where this task is now."""
        self._apart = apart
        self.place(self._place)

    def joined(self, generation: int) -> None:
        if self._writer is not None:
            self._writer.generation = generation


class _Places:
    """Finds this task's place in the group, by the roster where there is one, else by TF_CONFIG."""

    def __init__(self, membership: Membership, transport: str, compression: str) -> None:
        self._membership = membership
        self._transport = transport
        self._compression = compression
        job = membership.context.job
        self._watch = RosterWatch(job.roster) if job is not None else None
        self._glanced = 0.0

    @property
    def _context(self) -> Context:
        return self._membership.context

    @property
    def _patience(self) -> float:
        """Seconds that this task, once it trains, waits for others. In a job twice the stall timeout: the
        controller, which sees who stands still, is to act first."""
        return self._context.stall_timeout * (1 if self._context.job is None else 2)

    def join(self) -> Group:
        """Raises JoinTimeout naming who is missing."""
        telling = self._membership.telling
        telling.open()
        deadline = time.monotonic() + self._context.stall_timeout
        while True:
            roster = self._named(deadline)
            try:
                group = self._meet(roster, deadline)
            except StaleGeneration:
                if self._newest(roster) is roster:
                    raise
                continue
            atexit.register(group.close)
            telling.joined(group.generation)
            return group

    def _meet(self, roster: Roster | None, deadline: float) -> Group:
        context = self._context
        rank = context.index if context.workers else 0
        addresses = context.workers or _ALONE
        tasks = [f"worker:{index}" for index in range(len(addresses))]
        if roster is not None:
            rank, addresses = self._sit(roster), roster.addresses
            tasks = [str(member.task) for member in roster.members]
        return insitu.exchange.join(
            rank,
            addresses,
            transport=self._transport,  # type: ignore[arg-type]
            compression=self._compression,  # type: ignore[arg-type]
            shards=self._context.shards,
            num_shards=context.num_shards,
            secret=context.secret(),
            timeout=max(0.0, deadline - time.monotonic()),
            stall_timeout=self._patience,
            tasks=tasks,
            generation=roster.generation if roster else 0,
            cancelled=self._cancelled(roster),
        )

    def _sit(self, roster: Roster) -> int:
        """This task's rank in `roster`; its shards become those that it has there."""
        context = self._context
        rank = roster.rank(context.task, context.attempt)
        if rank is None:
            raise Released(0)
        shards = context.replicas_of(roster.members[rank].shards)
        if shards != context.shards:
            self._membership.context = replace(context, shards=shards)
        return rank

    def _named(self, deadline: float) -> Roster | None:
        """The newest roster, once it names this task; None outside a job."""
        context = self._context
        while True:
            roster = self._newest(None)
            if roster is None or roster.rank(context.task, context.attempt) is not None:
                return roster
            self._membership.telling.place(JOINING)
            if time.monotonic() >= deadline:
                raise JoinTimeout(
                    f"{context.task} waited {context.stall_timeout:g} s for a place in its group."
                )
            time.sleep(_PAUSE)

    def rejoin(self, group: Group, lost: Exception) -> None:
        """Waits for a roster of a higher generation and forms `group` anew by it."""
        telling = self._membership.telling
        telling.place(RECOVERING)
        known = group.generation
        # At once: the others are to notice, and not wait for this task in the generation before.
        group.leave()
        self._membership.watch.check_after_loss()
        deadline = time.monotonic() + self._patience
        while True:
            roster = self._newer(known, deadline, lost)
            known = roster.generation
            try:
                group.rejoin(
                    known,
                    roster.addresses,
                    max(0.0, deadline - time.monotonic()),
                    rank=self._sit(roster),
                    shards=self._context.shards,
                    tasks=[str(member.task) for member in roster.members],
                    keep_buffers=False,
                    cancelled=self._cancelled(roster),
                )
                telling.joined(known)
                return
            except JoinTimeout:
                raise
            except ExchangeError as error:
                # Another was lost while the group was forming, or a connection to one that may not know it
                # yet: the controller hears that this generation has come to nothing, and tells of the next
                # by a roster.
                lost = error
                telling.joined(known)
                telling.place(RECOVERING)

    def _newer(self, known: int, deadline: float, lost: Exception) -> Roster:
        """The next roster. Raises what was `lost` where none comes, or none could."""
        while True:
            if self._watch is None or not self._membership.telling.elastic:
                raise lost
            roster = self._newest(None)
            if roster is not None and roster.generation > known:
                return roster
            if time.monotonic() >= deadline:
                raise TrainingError(
                    f"No replacement came in {self._patience:g} s after a task was lost: {lost}"
                ) from lost
            time.sleep(_PAUSE)

    def heed(self, group: Group) -> None:
        now = time.monotonic()
        if now - self._glanced < _GLANCE or not self._membership.telling.elastic:
            return
        self._glanced = now
        roster = self._newest(None)
        if roster is not None and roster.generation > group.generation:
            raise Superseded

    def _newest(self, otherwise: Roster | None) -> Roster | None:
        newest = self._watch.newest() if self._watch is not None else None
        return newest or otherwise

    def _cancelled(self, roster: Roster | None) -> Callable[[], bool]:
        def cancelled() -> bool:
            self._membership.watch.check()
            return self._newest(roster) is not roster

        return cancelled
