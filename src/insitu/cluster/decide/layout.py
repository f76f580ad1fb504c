"""Assigns shards to workers that come and go. Pure: the same values give the same assignment.

Which rows a shard holds never changes, so any assignment trains to the same bits; a good one reads its rows
from the node it runs on and moves few shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from insitu.base.spec import CacheSpec, NodeId, ShardMap, TaskId

ShardHolders = tuple[tuple[NodeId, ...], ...]
"""For each shard the nodes that hold partitions of it, primary or backup, its home node first."""


def find_shard_holders(shard_map: ShardMap, homes: Sequence[NodeId], cache: CacheSpec) -> ShardHolders:
    """Return, for each shard, its home node, then the others by how many of its rows they hold."""
    found = []
    for home, partitions in zip(homes, shard_map.shards, strict=True):
        rows: Counter[NodeId] = Counter()
        for index in partitions:
            for owner in cache.partitions[index].owners:
                rows[owner] += cache.partitions[index].rows
        rows.pop(home, None)
        found.append((home, *sorted(rows, key=lambda node: (-rows[node], node))))
    return tuple(found)


def assign_contiguous_shards(workers: int, shards: int) -> tuple[tuple[int, ...], ...]:
    """Return the shards of each worker at a start: worker w of W runs [w*S/W, (w+1)*S/W)."""
    return tuple(tuple(range(w * shards // workers, (w + 1) * shards // workers)) for w in range(workers))


def choose_node(shards: Sequence[int], holders: ShardHolders, lost: Collection[NodeId] = ()) -> NodeId | None:
    """Return the node to run `shards` on: the home of most of them, else the node with most of their backups.

    `lost` nodes are left out; None if no other holds any of them.
    """
    primaries = Counter(holders[s][0] for s in shards if holders[s][0] not in lost)
    others = Counter(node for s in shards for node in holders[s] if node not in lost)
    best = primaries.most_common(1) or others.most_common(1)
    return best[0][0] if best else None


def find_successors(
    running: Iterable[tuple[NodeId, Collection[int]]], holders: ShardHolders, lost: Collection[NodeId] = ()
) -> dict[NodeId, set[int]]:
    """Return the shards that each node would get if any one of the others were lost.

    `running`: the node and the shards of each task. `lost` nodes get nothing.
    """
    found: dict[NodeId, set[int]] = {}
    for node, shards in running:
        if shards and (successor := choose_node(sorted(shards), holders, {*lost, node})) is not None:
            found.setdefault(successor, set()).update(shards)
    return found


def reassign(
    held: Mapping[TaskId, Sequence[int]], nodes: Mapping[TaskId, NodeId | None], holders: ShardHolders
) -> dict[TaskId, tuple[int, ...]]:
    """Return the shards of each task of `held` once these, and no others, run all shards.

    `held[t]` is what task t runs now (nothing: it is new), `nodes[t]` its node. Loads end up differing by one
    at most; within that a task keeps what it has, and a shard that must move goes to a task on a node that
    holds it, the earlier in `holders` the better.
    """
    tasks = sorted(held)
    least, spare = divmod(len(holders), len(tasks))
    keep: dict[TaskId, list[int]] = {}
    for task in sorted(tasks, key=lambda t: (-len(held[t]), t)):
        room = least + (1 if spare > 0 and len(held[task]) > least else 0)
        spare -= room > least
        at_home = sorted(held[task], key=lambda s: (_distance(nodes[task], holders[s]), s))
        keep[task] = at_home[:room]
    taken = {shard for shards in keep.values() for shard in shards}
    for shard in (s for s in range(len(holders)) if s not in taken):
        open_to = [t for t in tasks if len(keep[t]) < least + (spare > 0)]
        task = min(open_to, key=lambda t: (_distance(nodes[t], holders[shard]), len(keep[t]), t))
        keep[task].append(shard)
        spare -= len(keep[task]) > least
    return {task: tuple(sorted(keep[task])) for task in tasks}


def _distance(node: NodeId | None, holders: Sequence[NodeId]) -> int:
    return holders.index(node) if node in holders else len(holders)
