"""Watches the places of a running job's partitions and the nodes that leave, and has its tasks move.

The moves are decided in `decide/moves.py`. Here the catalogue and the head's list of nodes are read when they
have changed, and all is made ready on the new nodes before any task is stopped. Both files are in the home of
the head, where the controller runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from insitu.base.errors import ClusterError, InsituError
from insitu.base.paths import JobPaths, Paths
from insitu.base.spec import NO_CACHE, CacheSpec, JobSpec, NodeId, Placement, TaskId, TaskSpec
from insitu.cluster.control.supervised_tasks import Tasks
from insitu.cluster.decide import (
    DataMovedEvent,
    EpochStep,
    JobState,
    LeaveEvent,
    Member,
    MoveEvent,
    Ownership,
    find_ownership,
    plan_moves,
)
from insitu.cluster.job_files import MergedLog
from insitu.cluster.wire import HOSTS_ENGINE, read_saved_members
from insitu.grid import Catalog

LOOK_SECONDS = 1.0
"""Seconds between two looks whether something has changed."""
STEADY_SECONDS = 2.0
"""Seconds for which owners stay the same before tasks follow: partitions move one after another."""
AWAY_SECONDS = 60.0
"""Seconds for which a node that couldn't be made ready isn't tried again."""
RESTART_SECONDS = 30.0
"""Seconds before a node must have left, at which tasks that can't move start again elsewhere."""
_EMPTY = Ownership((), (), {})
Mark = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class Situation:
    """Facts that have been read."""

    #: The places of rows; nothing for a job without a cache.
    ownership: Ownership
    #: Whether copies are on their way.
    moving: bool
    #: Nodes on which tasks of this job can run.
    usable: frozenset[NodeId]
    #: When nodes that are to leave must have left, in seconds since 1970.
    leaving: Mapping[NodeId, float]


class TaskMover:
    """Moves the tasks of one job on hosts."""

    def __init__(
        self, job: JobPaths, spec: JobSpec, placement: Placement, cache: CacheSpec, tasks: Tasks
    ) -> None:
        self._paths = Paths(job.root.parent.parent)
        self._spec = spec
        self._placement = placement
        self._tasks = tasks
        self._log = MergedLog(job)
        self._began_on = _list_owners(cache)
        #: Whether partitions have ever had other owners than when the job began.
        self._has_moved = False
        self._look_at = 0.0
        self._marks: tuple[Mark, Mark] | None = None
        self._situation: Situation | None = None
        #: When owners, or whether copies are on their way, changed last.
        self._changed_at = 0.0
        #: Until when nodes aren't tried that couldn't be made ready.
        self._away: dict[NodeId, float] = {}

    def advance(
        self, state: JobState, elastic: tuple[TaskId, ...], progress: EpochStep | None, now: float
    ) -> DataMovedEvent | MoveEvent | LeaveEvent | None:
        """Return what has happened to the job's data or nodes since, or None. `now`: seconds since 1970."""
        if self._spec.engine != HOSTS_ENGINE or state.phase != "running":
            return None
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._look(state, now)
        found = self._situation
        if found is None:
            return None
        steady = not found.moving and now - self._changed_at >= STEADY_SECONDS
        holders = found.ownership.holders if self._has_moved and steady else state.holders
        leaving = tuple(sorted(found.leaving))
        if (holders, leaving) != (state.holders, state.leaving_nodes):
            return DataMovedEvent(holders, leaving)
        if any(t.move_to is not None or not t.alive for t in state.members):
            return None
        moves = self._move(state, found, elastic, progress, steady, now)
        return moves or self._leave(state, found, progress)

    def _move(
        self,
        state: JobState,
        found: Situation,
        elastic: tuple[TaskId, ...],
        progress: EpochStep | None,
        steady: bool,
        now: float,
    ) -> MoveEvent | None:
        away = {node for node, until in self._away.items() if now < until}
        # Whether a node has so many GPUs that no task has isn't known here.
        may_follow = self._spec.on_rebalance == "follow" and not self._spec.gpus_per_worker
        follows = may_follow and self._has_moved and steady
        moves = {
            task: node
            for task, node in plan_moves(state, found.ownership, found.usable - away, found.leaving).items()
            if follows or state.task(task).node in found.leaving
        }
        if not moves or not self._prepare(state, moves, now):
            return None
        leaves = [str(n) for n in sorted({state.task(t).node or "" for t in moves} & {*found.leaving})]
        reason = f"{', '.join(leaves)} is to leave" if leaves else "its data has moved"
        return MoveEvent(tuple(sorted(moves.items())), reason, progress, elastic)

    def _prepare(self, state: JobState, moves: Mapping[TaskId, NodeId], now: float) -> bool:
        """Return whether all is there that tasks need on the nodes to which they move."""
        ready = True
        for task, node in moves.items():
            try:
                ready &= self._tasks.prepare([TaskSpec(task, node, state.task(task).shards)])
            except ClusterError as error:
                self._away[node] = now + AWAY_SECONDS
                self._log.log(f"{task} stays on {state.task(task).node}, since {node} isn't ready: {error}")
                ready = False
        return ready

    def _leave(self, state: JobState, found: Situation, progress: EpochStep | None) -> LeaveEvent | None:
        """Return the node that is about to leave with tasks which couldn't move."""
        used = {t.node for t in state.alive}
        for node, until in sorted(found.leaving.items()):
            if node in used and time.time() > until - RESTART_SECONDS and found.usable - found.leaving.keys():
                return LeaveEvent(node, progress)
        return None

    def _look(self, state: JobState, now: float) -> None:
        """Read what has changed. Files that can't be read now are read again later."""
        marks = _mark(self._paths.catalog), _mark(self._paths.members)
        if marks == self._marks:
            return
        try:
            found = self._read(state)
        except InsituError:
            return
        before, self._situation, self._marks = self._situation, found, marks
        if before is None or (before.ownership, before.moving) != (found.ownership, found.moving):
            self._changed_at = now

    def _read(self, state: JobState) -> Situation:
        members = read_saved_members(self._paths)
        leaving = {node: m.leave_by for node, m in members.items() if m.leave_by is not None}
        used = {t.node for t in state.tasks if t.node is not None}
        usable = _find_usable(members, used, self._spec.gpus_per_worker) & self._allow(members)
        if self._spec.cache == NO_CACHE:
            return Situation(_EMPTY, False, usable, leaving)
        catalog, version = Catalog(self._paths), self._placement.shard_map.version
        cache = catalog.get(self._spec.cache, version)
        moving = any(copy.state == "copying" for copy in catalog.placement(self._spec.cache, version))
        self._has_moved |= _list_owners(cache) != self._began_on
        ownership = find_ownership(self._placement.shard_map, self._placement.home_nodes, cache)
        allowed = self._allow({node for own in ownership.holders for node in own})
        holders = tuple(
            tuple(node for node in own if node in allowed) or (home,)
            for own, home in zip(ownership.holders, self._placement.home_nodes, strict=True)
        )
        return Situation(replace(ownership, holders=holders), moving, usable, leaving)

    def _allow(self, nodes: Iterable[NodeId]) -> frozenset[NodeId]:
        """Return those of the nodes that the job may use."""
        return frozenset(node for node in nodes if not self._spec.nodes or node in self._spec.nodes)


def _list_owners(cache: CacheSpec) -> list[frozenset[NodeId]]:
    """Return who owns each partition, in whichever order."""
    return [frozenset(info.owners) for info in cache.partitions]


def _find_usable(members: Mapping[NodeId, Member], used: Collection[NodeId], gpus: int) -> frozenset[NodeId]:
    """Return the nodes whose agents are alive, that have so many GPUs, and that compute as those in use: on
    other processors compiled kernels may round differently."""
    kinds = {_describe(members[node]) for node in used if node in members}
    return frozenset(
        node
        for node, member in members.items()
        if member.state == "alive"
        and member.connection is not None
        and _describe(member) in kinds
        and len(member.facts.gpus) >= gpus
    )


def _describe(member: Member) -> tuple[str, tuple[str, ...]]:
    return member.facts.processor, tuple(sorted(set(member.facts.gpus)))


def _mark(path: Path) -> Mark:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
