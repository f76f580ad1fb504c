"""Decides how long a supervisor may run its job, and which supervisors a head starts. Pure.

Both need etcd as the metadata store. There a job on hosts has a key until it ends, or a user stops it. Its
supervisor has another one, by a lease. A supervisor that can't keep its lease ends with all of its tasks,
before the lease can end. If a job has no supervisor, the head that leads starts one.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from insitu.base.spec import NodeId
from insitu.cluster.decide.holders import Failure, record_failure

JOB_LEASE_SECONDS = 8.0
"""After how long without a word of a supervisor its key goes. Its tasks end with it."""
EARLIER_SECONDS = 1.0
"""How long before its lease can end a supervisor ends."""
SETTLED_SECONDS = 1.0
"""For how long no agent has joined a new head once it doesn't wait for more."""
_MOST_AT_ONCE = 4
"""Supervisors that a head starts at the same time."""


def count_seconds_left(asked_at: float, now: float) -> float:
    """Return how long a supervisor may continue whose lease was kept last by what it has asked for at
    `asked_at`. The clock keeps running while the machine is suspended."""
    return max(0.0, asked_at + JOB_LEASE_SECONDS - EARLIER_SECONDS - now)


@dataclass(frozen=True, slots=True)
class SupervisedJob:
    """A job that should run, by the metadata."""

    #: The revision at which its key was written: each supervisor does it.
    revision: int
    #: Whether a supervisor holds a lease for it.
    is_held: bool


@dataclass(frozen=True, slots=True)
class Starts:
    """A head's actions on jobs without a supervisor."""

    #: The agents that are connected.
    connected: Set[NodeId] = frozenset()
    #: Since when these are, on the clock that gives `now`.
    connected_since: float = 0.0
    #: The jobs whose supervisors are being started.
    under_way: Set[str] = frozenset()
    #: Starts that failed.
    failures: Mapping[str, Failure] = field(default_factory=dict)

    def end(self, job_id: str, now: float, *, failed: bool) -> Starts:
        """Return what it does after a start has ended. One that failed is tried again later."""
        failures = {job: failure for job, failure in self.failures.items() if job != job_id}
        if failed:
            failures[job_id] = record_failure(self.failures.get(job_id), now)
        return replace(self, under_way=self.under_way - {job_id}, failures=failures)


def choose_starts(
    starts: Starts,
    jobs: Mapping[str, SupervisedJob],
    connected: Set[NodeId],
    expected: Set[NodeId],
    now: float,
) -> tuple[Starts, tuple[str, ...]]:
    """Return the jobs whose supervisors are started now.

    They need agents. So a head waits until all `expected` are `connected`, or no more come.
    """
    if connected != starts.connected:
        starts = replace(starts, connected=connected, connected_since=now)
    starts = replace(starts, failures={j: f for j, f in starts.failures.items() if j in jobs})
    is_settled = expected <= connected or now >= starts.connected_since + SETTLED_SECONDS
    if not connected or not is_settled:
        return starts, ()
    due = [
        job_id
        for job_id, job in sorted(jobs.items())
        if not job.is_held
        and job_id not in starts.under_way
        and (job_id not in starts.failures or now >= starts.failures[job_id].retry_at)
    ]
    begun = tuple(due[: max(0, _MOST_AT_ONCE - len(starts.under_way))])
    return replace(starts, under_way=starts.under_way | set(begun)), begun
