"""Forms the group of tasks by the controller's roster, and again whenever that changes."""

from __future__ import annotations

import atexit
import gc
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace

import insitu.exchange
from insitu.base.context import STALL_TIMEOUT_ENV, Context
from insitu.base.errors import ExchangeError, JoinTimeout, StaleGeneration, TrainingError
from insitu.base.progress import LEAVING
from insitu.base.roster import CONNECTING, JOINING, RECOVERING, Roster, RosterWatch
from insitu.exchange import Group
from insitu.train.elastic.lockstep import GenerationChanged, describe_sums
from insitu.train.elastic.progress_reporter import ProgressReporter

_ALONE = ("127.0.0.1:1",)
"""The address of a group of one, which connects to nobody: nothing listens there."""

WAITING_POLL_INTERVAL = 0.005
"""Seconds between two looks for a newer roster, while there is nothing else to do."""
VERDICT_TIMEOUT = 10.0
"""Seconds in which the controller reports whether a lost task has ended well."""
TRAINING_POLL_INTERVAL = 0.05
"""Seconds between two looks while training continues."""


_groups: weakref.WeakSet[Group] = weakref.WeakSet()
"""Groups of this process that haven't been freed."""


class Released(SystemExit):
    """The job continues without this task: it ends well."""


def _leave(group: weakref.ref[Group], reporter: ProgressReporter) -> None:
    """Leave the group at the end of the process, unless it was freed with its strategy before. The controller
    then waits for that end before it judges what the others report."""
    reporter.report_place(LEAVING)
    joined = group()
    if joined is not None:
        joined.close()


class RosterRendezvous:
    """Finds this task's rank and shards by the roster if there is one, else by TF_CONFIG."""

    def __init__(
        self,
        context: Context,
        reporter: ProgressReporter,
        transport: str,
        compression: str,
    ) -> None:
        #: Who this process is. `adopt_assignment` writes the shards that the roster gives it.
        self.context = context
        self._reporter = reporter
        self._transport = transport
        self._compression = compression
        self._watch = RosterWatch(context.job.roster) if context.job is not None else None
        #: Names of tasks that the group does without, since their scripts have ended well. Written by
        #: `adopt_assignment`.
        self.ended: tuple[str, ...] = ()
        #: When `raise_if_superseded` last looked, by the monotonic clock in seconds.
        self._last_look = 0.0
        #: The roster by which the group was formed last. Written by `adopt_assignment`.
        self._adopted: Roster | None = None

    @property
    def _recovery_timeout(self) -> float:
        """Seconds that this task, once it trains, waits for others. In a job twice the stall timeout: the
        controller, which sees who stands still, must act first."""
        return self.context.stall_timeout * (1 if self.context.job is None else 2)

    def join(self) -> Group:
        """Form the group for the first time.

        Raises JoinTimeout naming who is missing, and TrainingError if this process has another group.
        """
        self._reporter.open()
        self._check_alone()
        self._announce_cluster()
        place = self._reporter.place
        deadline = time.monotonic() + self.context.stall_timeout
        while True:
            roster = self._wait_for_assignment(deadline)
            self._reporter.report_place(CONNECTING)
            try:
                group = self._connect(roster, deadline)
            except StaleGeneration:
                if self._newest_roster(roster) is roster:
                    raise
                continue
            _groups.add(group)
            atexit.register(_leave, weakref.ref(group), self._reporter)
            self._reporter.set_generation(group.generation)
            self._reporter.sampler.watch(group)
            self._reporter.report_place(place)
            return group

    def _check_alone(self) -> None:
        """Raise TrainingError if another group of this process holds the task's port, for which this one
        would wait."""
        if self._watch is None or len(self.context.workers) <= 1 or not _groups:
            return
        # Objects that refer to each other are freed by the collector only, which doesn't run in a wait.
        gc.collect()
        if _groups:
            raise TrainingError(
                "A task of a job trains by one strategy at a time, as it has one address. Received: another "
                f"one in {self.context.task}, while the first one is still in use. Make one strategy for the "
                "whole script, or delete the first one and its models (`del`) before."
            )

    def _announce_cluster(self) -> None:
        """Print, in a cluster that the user has made by hand, for whom this process waits, and how long."""
        context = self.context
        if context.by_hand:
            sys.stderr.write(
                f"[insitu] {context.task} of {len(context.workers)} by TF_CONFIG, at "
                f"{context.workers[context.index]}; waits up to {context.stall_timeout:g} s for the others "
                f"({STALL_TIMEOUT_ENV})\n"
            )

    def _connect(self, roster: Roster | None, deadline: float) -> Group:
        context = self.context
        rank = context.index if context.workers else 0
        addresses = context.workers or _ALONE
        tasks = [f"worker:{index}" for index in range(len(addresses))]
        if roster is not None:
            rank, addresses = self.adopt_assignment(roster), roster.addresses
            tasks = [str(member.task) for member in roster.members]
        return insitu.exchange.join(
            rank,
            addresses,
            transport=self._transport,  # type: ignore[arg-type]
            compression=self._compression,  # type: ignore[arg-type]
            shards=self.context.shards,
            num_shards=context.num_shards,
            secret=context.secret(),
            timeout=max(0.0, deadline - time.monotonic()),
            stall_timeout=self._recovery_timeout,
            tasks=tasks,
            generation=roster.generation if roster else 0,
            cancelled=self._cancelled(roster),
            is_superseded=self._is_superseded,
        )

    def adopt_assignment(self, roster: Roster) -> int:
        """Take over the shards that `roster` gives this task; return its rank. Raises Released if it names
        another in its place."""
        context = self.context
        rank = roster.rank(context.task, context.incarnation)
        if rank is None:
            raise Released(0)
        self.ended = tuple(map(str, roster.ended))
        self._adopted = roster
        shards = context.replicas_of(roster.members[rank].shards)
        if shards != context.shards:
            self.context = replace(context, shards=shards)
        return rank

    def _wait_for_assignment(self, deadline: float) -> Roster | None:
        """Return the newest roster, once it names this task; None outside a job."""
        context = self.context
        while True:
            roster = self._newest_roster(None)
            if roster is None or roster.rank(context.task, context.incarnation) is not None:
                return roster
            self._reporter.report_place(JOINING)
            if time.monotonic() >= deadline:
                raise JoinTimeout(
                    f"{context.task} waited {context.stall_timeout:g} s for a place in its group."
                )
            time.sleep(WAITING_POLL_INTERVAL)

    def rejoin(self, group: Group, lost: Exception) -> None:
        """Wait for a roster of a higher generation and form `group` again by it."""
        place = self._reporter.place
        self._reporter.report_place(RECOVERING)
        known = group.generation
        # At once: the others are to notice, and not wait for this task in the generation before.
        group.leave()
        deadline = time.monotonic() + self._recovery_timeout
        while True:
            roster = self._wait_for_newer(known, deadline, lost)
            known = roster.generation
            try:
                group.rejoin(
                    known,
                    roster.addresses,
                    max(0.0, deadline - time.monotonic()),
                    rank=self.adopt_assignment(roster),
                    shards=self.context.shards,
                    tasks=[str(member.task) for member in roster.members],
                    keep_buffers=False,
                    cancelled=self._cancelled(roster),
                )
                self._reporter.set_generation(known)
                self._reporter.report_place(place)
                return
            except JoinTimeout:
                raise
            except ExchangeError as error:
                # Another was lost while the group was forming, or a connection to one that may not know it
                # yet: the controller reads that this generation has failed, and publishes the next roster.
                lost = error
                self._reporter.set_generation(known)
                self._reporter.report_place(RECOVERING)

    def _wait_for_newer(self, known: int, deadline: float, lost: Exception) -> Roster:
        """Return the next roster. Raises what was `lost` if none comes, or none could.

        A task that no other can replace waits only as long as the controller needs to report whether those
        that it lost have ended well. If they haven't, the controller stops it.
        """
        if not self._reporter.elastic:
            deadline = min(deadline, time.monotonic() + VERDICT_TIMEOUT)
        while True:
            if self._watch is None:
                raise lost
            roster = self._newest_roster(None)
            if roster is not None and roster.generation > known:
                return roster
            if time.monotonic() >= deadline:
                if not self._reporter.elastic:
                    raise lost
                raise TrainingError(
                    f"No replacement came in {self._recovery_timeout:g} s after a task was lost: {lost}"
                ) from lost
            time.sleep(WAITING_POLL_INTERVAL)

    def find_ended(self, group: Group) -> tuple[str, ...]:
        """Return the names of tasks of `group`, which has lost one, whose scripts have ended well. Waits
        until the controller reports. Returns an empty tuple if none has, or nobody knows."""
        if self._watch is None:
            return ()
        self._reporter.report_place(RECOVERING)
        group.leave()
        deadline = time.monotonic() + VERDICT_TIMEOUT
        while time.monotonic() < deadline:
            roster = self._newest_roster(None)
            if roster is not None and roster.generation > group.generation:
                return tuple(map(str, roster.ended))
            time.sleep(WAITING_POLL_INTERVAL)
        return ()

    def raise_if_superseded(self, group: Group) -> None:
        """Raise GenerationChanged if there is a newer generation. Looks only every so often."""
        now = time.monotonic()
        if now - self._last_look < TRAINING_POLL_INTERVAL or not self._reporter.elastic:
            return
        self._last_look = now
        roster = self._newest_roster(None)
        if roster is not None and roster.generation > group.generation:
            raise GenerationChanged

    def describe_sums(self) -> dict[str, str]:
        """Return this task's note on its backend's sums; empty if all tasks are on one host."""
        addresses = self._adopted.addresses if self._adopted is not None else self.context.workers
        return describe_sums(addresses, self.context.node or str(self.context.task))

    def _is_superseded(self) -> bool:
        """Return whether the newest roster lacks one that this task may wait for: it was lost or released.

        The controller knows a vanished host long before the exchange can notice.
        """
        adopted, newest = self._adopted, self._newest_roster(None)
        if adopted is None or newest is None or newest.generation <= adopted.generation:
            return False
        if not self._reporter.elastic:
            return False
        return any(newest.rank(m.task, m.incarnation) is None for m in adopted.members)

    def _newest_roster(self, otherwise: Roster | None) -> Roster | None:
        newest = self._watch.newest() if self._watch is not None else None
        return newest or otherwise

    def _cancelled(self, roster: Roster | None) -> Callable[[], bool]:
        """Return a function for the exchange to call while it forms a group by `roster`: whether to stop."""

        def cancelled() -> bool:
            return self._newest_roster(roster) is not roster

        return cancelled
