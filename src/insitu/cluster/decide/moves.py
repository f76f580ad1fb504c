"""Moves tasks to other nodes while training continues, after their data has moved or since a node leaves.

A shard keeps its partitions and the order of its rows. Only who runs it changes, so weights and ledger stay
the same. A task that moves gets SIGTERM. The step that is under way then is done again by all, with its next
incarnation on the new node, as after a loss (see `recovery.py`). That counts as no failure. With `on_loss`
"adopt" the others run its shards meanwhile, else they wait for it.

Pure. Other code finds the places of data, and has all ready on the new nodes before anything is stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from insitu.base.spec import CacheSpec, NodeId, ShardMap, TaskId
from insitu.cluster.decide import recovery
from insitu.cluster.decide.events import (
    Action,
    DataMovedEvent,
    LeaveEvent,
    Log,
    MoveEvent,
    Result,
    Signal,
    TaskExitedEvent,
)
from insitu.cluster.decide.job_state import Cause, JobState, Recovery, TaskState
from insitu.cluster.decide.layout import ShardHolders
from insitu.cluster.decide.placement import apportion

MOVE_GRACE = 10.0
"""Seconds that a task that moves has to end after SIGTERM."""

HeldRows = Sequence[Mapping[NodeId, int]]
"""For each shard how many of its rows are on each node, as primary or backup."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """The places of the rows of a job's shards now."""

    #: For each shard the nodes that hold partitions of it, the one with most of them first.
    holders: ShardHolders
    #: For each shard the number of its rows on each node.
    held: tuple[Mapping[NodeId, int], ...]
    #: How many rows each node is the primary owner of.
    owned: Mapping[NodeId, int]


def find_ownership(shard_map: ShardMap, homes: Sequence[NodeId], cache: CacheSpec) -> Ownership:
    """Return the places of rows by the owners in `cache`.

    `homes`: the home node that each shard has had. It keeps it if no other is primary owner of more rows.
    """
    holders, held = [], []
    owned: Counter[NodeId] = Counter()
    for home, indices in zip(homes, shard_map.shards, strict=True):
        rows: Counter[NodeId] = Counter()
        primary: Counter[NodeId] = Counter()
        for info in (cache.partitions[index] for index in indices):
            primary[info.owners[0]] += info.rows
            for owner in info.owners:
                rows[owner] += info.rows
        owned += primary
        order = sorted(rows, key=lambda n: (-primary[n], n != home, -rows[n], n))
        holders.append(tuple(order))
        held.append(dict(rows))
    return Ownership(tuple(holders), tuple(held), dict(owned))


def plan_moves(
    state: JobState, ownership: Ownership, usable: Collection[NodeId], leaving: Collection[NodeId]
) -> dict[TaskId, NodeId]:
    """Return the nodes that workers should move to, of those in `usable`; most of the time none.

    A worker moves off a node that is `leaving`. It moves if its node has more workers than a job that started
    now would have there. It moves if its node holds less than half of its rows and another one with room
    holds more. Else it stays: what it reads is kept for it.
    """
    workers = [t for t in state.members if t.alive and not t.signal_sent and t.move_to is None]
    with_rows = {node for held in ownership.held for node in held}
    open_nodes = set(usable) - set(leaving)
    nodes = sorted(with_rows & open_nodes) or sorted(open_nodes)
    if not nodes or not state.members:
        return {}
    most = -(-len(state.members) // len(nodes))
    shares = apportion(len(state.members), [ownership.owned.get(node, 0) for node in nodes])
    room = {node: max(most, share) for node, share in zip(nodes, shares, strict=True)}
    rows = {t.task: _count_rows(t, ownership.held) for t in workers}
    moving = []
    for node in sorted({t.node for t in workers if t.node is not None}):
        here = sorted(
            (t for t in workers if t.node == node), key=lambda t: (-rows[t.task].get(node, 0), t.task)
        )
        kept = 0 if node in leaving else room.get(node, 0) if with_rows else len(here)
        room[node] = max(0, kept - len(here))
        moving += here[kept:]
    moves: dict[TaskId, NodeId] = {}
    places = [node for node, free in room.items() if free]
    best = {t.task: max((rows[t.task].get(node, 0) for node in places), default=0) for t in moving}
    for task in sorted(moving, key=lambda t: (-best[t.task], t.task)):
        _move(task, rows[task.task], room, moves, least=0)
    for task in workers if with_rows else ():
        held, total = rows[task.task], sum(_total(ownership.held[s]) for s in task.shards)
        here_now = held.get(task.node, 0) if task.node is not None else 0
        if task.task not in moves and task not in moving and 2 * here_now < total:
            _move(task, held, room, moves, least=here_now + 1)
    return {task: node for task, node in moves.items() if node != state.task(task).node}


def _total(held: Mapping[NodeId, int]) -> int:
    """Return the rows of a shard, at least: those of the node that holds most of it."""
    return max(held.values(), default=0)


def _count_rows(task: TaskState, held: HeldRows) -> dict[NodeId, int]:
    rows: Counter[NodeId] = Counter()
    for shard in task.shards:
        rows.update(held[shard] if shard < len(held) else {})
    return dict(rows)


def _move(
    task: TaskState,
    rows: Mapping[NodeId, int],
    room: dict[NodeId, int],
    moves: dict[TaskId, NodeId],
    least: int,
) -> None:
    """Choose the node with room that holds most rows of the task, and `least` at least."""
    open_to = [n for n, places in room.items() if places > 0 and n != task.node and rows.get(n, 0) >= least]
    if not open_to:
        return
    node = min(open_to, key=lambda n: (-rows.get(n, 0), -room[n], n))
    room[node] -= 1
    moves[task.task] = node


def record_data_moved(state: JobState, event: DataMovedEvent) -> Result:
    """Take into account the present places of data, and the nodes that leave: for the next launches."""
    holders = event.holders or state.holders
    return replace(state, holders=holders, leaving_nodes=event.leaving), []


def start_moves(state: JobState, event: MoveEvent, now: float) -> Result:
    """Stop the tasks that move, as far as some task stays that has the state of the training."""
    if state.phase != "running" or state.on_loss == "restart" or not all(t.alive for t in state.members):
        return state, []
    wanted = {name: node for name, node in event.moves if _can_move(state.task(name), node)}
    staying = [t for t in state.members if t.task not in wanted and t.task in event.elastic]
    if not state.has_servers and not staying and wanted:
        del wanted[min(wanted)]
        staying = [t for t in state.members if t.task not in wanted and t.task in event.elastic]
    rigid = [t for t in state.members if not t.replacement and t.task not in event.elastic]
    if not wanted or not staying or rigid:
        return state, []
    actions: list[Action] = []
    for name, node in sorted(wanted.items()):
        task = state.task(name)
        actions += [Log(f"{name} moves from {task.node} to {node}: {event.reason}"), Signal(name, "term")]
        moving = replace(task, move_to=node, signal_sent="term", escalate_at=now + MOVE_GRACE)
        state = state.with_task(moving)
    lost = tuple(n for n in state.lost_nodes if n not in wanted.values())
    return replace(state, lost_nodes=lost), actions


def _can_move(task: TaskState, node: NodeId) -> bool:
    is_worker = task.task.role == "worker" and task.member
    return is_worker and task.alive and not task.signal_sent and task.move_to is None and task.node != node


def finish_move(
    state: JobState, task: TaskState, node: NodeId, event: TaskExitedEvent, now: float
) -> Result | None:
    """Launch `task`, which has ended to move to `node`, there. Returns None if all tasks must start again, as
    when all others have died meanwhile."""
    if node in state.lost_nodes:
        node = recovery.choose_next_node(state, task) or node
    before = task.node
    task = replace(task, node=node, launch_at=now)
    state = state.with_task(task)
    if not recovery.can_go_on(state, task, event):
        return None
    text = f"{task.task} moved from {before} to {node}"
    actions: list[Action] = []
    if state.on_loss == "adopt" and recovery.can_adopt(state):
        state, actions = recovery.adopt(state, text, event.progress, now)
    else:
        moved = Recovery("moved", (task.task,), text, now, state.generation + 1, event.progress)
        state = recovery.record_recovery(state, moved)
    state, launched = recovery.relaunch(state, [task.task], now)
    return state, [*actions, *launched]


def leave_node(state: JobState, event: LeaveEvent) -> Cause | None:
    """Return why all tasks start again on other nodes; None if nothing of the job runs on the node."""
    there = [str(t.task) for t in state.alive if t.node == event.node]
    if state.phase != "running" or not there:
        return None
    return Cause(f"{event.node} leaves, and {', '.join(there)} couldn't move while the others continued", 1)
