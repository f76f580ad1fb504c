"""This process as a member of a strategy: which shards it trains on, and with whom."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.base.context import Context
from insitu.base.errors import PeerLost, TrainingError
from insitu.exchange import Group, Mismatch
from insitu.train.collectives import squeeze_shards
from insitu.train.elastic.call_log import CallCounter, CallLog, Resumable
from insitu.train.elastic.lockstep import (
    CallRecord,
    Lockstep,
    Units,
    check_same_call,
    find_place,
    refuse_different,
    refuse_without,
)
from insitu.train.elastic.position import CALL
from insitu.train.elastic.progress_reporter import ProgressReporter
from insitu.train.elastic.roster_rendezvous import RosterRendezvous

AUTO, SILENT, BAR, LINES = "auto", 0, 1, 2
"""Values of Keras' `verbose`."""

CHECK_EVERY = 1000
"""Steps of `fit` after which it is checked that replicas are equal. Costs a hash of all variables."""


_ADVICE_BY_HAND = {
    "ps": "Start parameter servers by `insitu start --ps M - JOB_DIR SCRIPT`.",
}
"""Advice on a role in a TF_CONFIG that the user has written."""


class Membership:
    """Who this process is among the tasks. The kinds differ in what the tasks do together."""

    shards_move = False
    """Whether a task may get others' shards while it trains."""
    calls: CallCounter
    """The calls that the script has made."""
    lockstep: Units
    """Does what all tasks do together."""

    def __init__(
        self, context: Context, reporter: ProgressReporter, transport: str, compression: str
    ) -> None:
        if context.role != "worker":
            advice = f"Start the job without --{context.role}."
            if context.job is None:
                advice = _ADVICE_BY_HAND.get(context.role, "Make it a worker in TF_CONFIG.")
            raise TrainingError(
                "A strategy trains in workers; worker 0 is the chief. Received: a task with the role "
                f"{context.role!r}. {advice}"
            )
        #: The shards that the script's datasets were made for; those of `context` may change later.
        self.launched_shards = context.shards
        #: Steps of `fit` between two comparisons of replicas. Written by the strategy.
        self.check_every = CHECK_EVERY
        #: Whether a program spans the devices of all tasks, so that none can compute without the others.
        #: Written by `insitu.train.backends.jax.spmd`.
        self.program_spans_tasks = False
        #: Fits that have begun in this process. Written by `count_fit`.
        self._fits = 0
        #: Reports progress to the controller.
        self.reporter = reporter
        self._rendezvous = RosterRendezvous(context, reporter, transport, compression)

    @property
    def context(self) -> Context:
        """Who this process is now; after a change of membership it may have other shards."""
        return self._rendezvous.context

    @property
    def num_shards(self) -> int:
        """The number of shards of all tasks."""
        return self.context.num_shards

    @property
    def is_alone(self) -> bool:
        """Whether this is the only process and it has the only shard: there is nobody to exchange with."""
        return self.num_shards == 1 and len(self.context.workers) <= 1

    @property
    def feed_options(self) -> dict[str, Any]:
        """Options of `make_feed` for this task's shards."""
        context = self.context
        return {
            "shards": context.shards,
            "num_shards": context.num_shards,
            "seed": context.seed,
            "launched_shards": self.launched_shards,
            "replicas_per_shard": context.replicas_per_shard,
            "several_processes": len(context.workers) > 1,
        }

    @property
    def is_leader(self) -> bool:
        """Whether this task does what one task does for all."""
        raise NotImplementedError

    @property
    def fits(self) -> int:
        """How many fits have begun in this process."""
        return self._fits

    def count_fit(self) -> int:
        """Return the number of this fit in the process, from 0: the same fit of a restarted script has the
        same."""
        self._fits += 1
        return self._fits - 1

    def group(self) -> Group:
        """Return the group of all workers, for code that moves buffers outside of `fit`, `evaluate` and
        `predict`: a replacement can't get there, so that a loss from now on restarts all tasks. Raises
        JoinTimeout naming who is missing."""
        raise NotImplementedError

    @contextlib.contextmanager
    def explain_loss(self, name: str) -> Iterator[None]:
        """While open, a call of the method `name` moves buffers. Raises CollectiveMismatch in place of the
        exchange's errors if a task is missing since its script has ended, or calls something else."""
        try:
            yield
        except PeerLost as lost:
            ended = self._rendezvous.find_ended(self.group())
            if not ended:
                raise
            raise refuse_without(ended, self._describe_call(name)) from lost
        except Mismatch as error:
            raise refuse_different(self._describe_call(name), error) from error

    def _describe_call(self, name: str) -> CallRecord:
        return CallRecord(str(self.context.task), name, place=find_place())

    def run_call(self, trainer: Resumable, call: Callable[[], Any]) -> Any:
        """Make a call of the script, or of a callback in the middle of another."""
        return self.calls.run(trainer, call)

    def check_call(self, name: str) -> None:
        """Check that all tasks make the call of the method `name` that is under way. Here tasks needn't."""

    def chief_rank(self, group: Group) -> int | None:
        """Return the rank of worker 0; None while it has no place in the group."""
        return next((r for r in range(group.size) if group.task(r) == "worker:0"), None)

    def verbosity(self, verbose: Any) -> Any:
        """Return Keras' `verbose` for this task. Only the chief shows progress: a bar on a terminal, else a
        line an epoch."""
        if not self.context.is_chief:
            return SILENT
        if verbose == AUTO:
            return BAR if sys.stdout.isatty() else LINES
        return verbose


class SynchronousMembership(Membership):
    """The tasks do all units together. They join the group when it is first needed: building models takes
    them unequal times."""

    shards_move = True
    calls: CallLog
    lockstep: Lockstep

    def __init__(self, context: Context, transport: str, compression: str = "none") -> None:
        super().__init__(context, ProgressReporter(context), transport, compression)
        self.calls = CallLog()
        self.lockstep = Lockstep(self._rendezvous, self.calls)

    @property
    def is_leader(self) -> bool:
        """Whether this task has rank 0 in the group."""
        return self.lockstep.group.rank == 0

    def group(self) -> Group:
        self.reporter.disable_recovery()
        group = self.lockstep.group
        if self._rendezvous.ended:
            raise refuse_without(
                self._rendezvous.ended, None, f"{self.context.task} continues at {find_place()}"
            )
        return group

    def check_call(self, name: str) -> None:
        """Check that all tasks make the call of the method `name` that is under way. Collective.

        Tasks that wait for one whose script has ended continue without it: in `evaluate` and `predict` they
        run its shards. Raises CollectiveMismatch if tasks make different calls, or train on without it.
        """
        if len(self.context.workers) <= 1:
            return
        position = self.calls.position(CALL)
        own = CallRecord(str(self.context.task), name, position.call, position.depth, find_place())
        needs_all = name == "fit" or self.program_spans_tasks

        def compare(group: Group) -> NDArray[Any]:
            if needs_all and self._rendezvous.ended:
                raise refuse_without(self._rendezvous.ended, own)
            return squeeze_shards(np.tile(own.to_row(), (len(group.shards), 1)))

        try:
            rows = self.lockstep.run_unit_until_done(position, compare)
        except Mismatch as error:
            raise refuse_different(own, error) from error
        except PeerLost as lost:
            if not self.context.by_hand:
                raise
            raise TrainingError(
                "In a cluster by TF_CONFIG all workers make the same calls, to their end. Received: "
                f"{own}, and {lost.task} is gone. Make the call in every worker, or start the script by "
                "`insitu start --workers N - JOB_DIR SCRIPT`: there others may have ended."
            ) from lost
        if rows.size:
            check_same_call(rows)

    def run_call(self, trainer: Resumable, call: Callable[[], Any]) -> Any:
        """Make a call. A replacement can't get to one in the middle of another, so that recovery is paused
        for as long as that takes."""
        nested = self.calls.is_under_way
        with self.reporter.pause_recovery() if nested else contextlib.nullcontext():
            result = self.calls.run(trainer, call)
        if not self.calls.complete:
            self.reporter.disable_recovery()
        return result
