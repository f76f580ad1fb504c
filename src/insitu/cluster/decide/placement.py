"""Places a job's tasks on the nodes. Pure: the same values give the same placement.

The home nodes of shards follow from (number of shards, cache, topology) alone, and which partitions
they hold follows from that. So a job of S shards trains on the same shards whether one worker runs all of
them or S workers run one each, which is what makes their weights equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from insitu.base.errors import PlacementError
from insitu.base.spec import (
    NO_CACHE,
    CacheSpec,
    JobSpec,
    NodeId,
    PartitionInfo,
    Placement,
    ShardMap,
    TaskId,
    TaskSpec,
    Topology,
)
from insitu.cluster.decide.layout import assign_contiguous_shards


def count_rows_by_node(cache: CacheSpec, topology: Topology) -> dict[NodeId, int]:
    """Return the rows that each node is the primary owner of, for nodes that own any, in the topology's
    order.

    Raises PlacementError if a partition's primary owner isn't a node of the cluster.
    """
    rows: Counter[NodeId] = Counter()
    for partition in cache.partitions:
        rows[partition.owners[0]] += partition.rows
    strangers = sorted(set(rows) - set(topology.nodes))
    if strangers:
        raise PlacementError(
            f"Cache {cache.name!r} is on {', '.join(strangers)}, which this cluster doesn't have: its "
            f"nodes are {', '.join(topology.nodes)}. Bring the nodes up again, or import the cache again."
        )
    return {node: rows[node] for node in topology.nodes if node in rows}


def make_empty_cache(shards: int, topology: Topology) -> CacheSpec:
    """Return what stands for the cache of a job without one: each shard has a partition without rows, on the
    nodes in turn."""
    owners = [topology.nodes[shard % len(topology.nodes)] for shard in range(shards)]
    partitions = tuple(PartitionInfo(index, 0, 0, "", (node,)) for index, node in enumerate(owners))
    return CacheSpec(NO_CACHE, 0, (), partitions, 0, None, 0.0)


def choose_worker_count(cache: CacheSpec, topology: Topology) -> int:
    """Return the default number of workers: one for each node that owns data."""
    return len(count_rows_by_node(cache, topology))


def choose_thread_count(cores: int, workers: int, evaluator: bool) -> int:
    """Return the default backend threads per replica: `cores` shared by the tasks that compute, workers and
    evaluator.

    A chief beside workers coordinates and ps tasks apply updates; neither is counted.
    """
    return max(1, cores // (workers + int(evaluator)))


def apportion(count: int, weights: Sequence[int]) -> list[int]:
    """Deal out `count` things in proportion to `weights`, by largest remainders (ties: the earlier).

    If `count` allows it every weight gets at least one; if it doesn't, the `count` heaviest get one each.
    """
    if count <= len(weights):
        heaviest = sorted(range(len(weights)), key=lambda i: (-weights[i], i))[:count]
        return [int(i in heaviest) for i in range(len(weights))]
    total = sum(weights)
    spare = count - len(weights)
    quotas = [Fraction(w * count, total) if total else Fraction(count, len(weights)) for w in weights]
    shares = [1] * len(weights)
    for _ in range(spare):
        neediest = max(range(len(weights)), key=lambda i: (quotas[i] - shares[i], -i))
        shares[neediest] += 1
    return shares


def choose_home_nodes(shards: int, cache: CacheSpec, topology: Topology) -> tuple[NodeId, ...]:
    """Return the home node of each shard: shards are dealt to the owning nodes by their rows."""
    rows = count_rows_by_node(cache, topology)
    shares = apportion(shards, list(rows.values()))
    return tuple(node for node, share in zip(rows, shares, strict=True) for _ in range(share))


def lay_out_shards(
    shards: int, cache: CacheSpec, topology: Topology
) -> tuple[tuple[NodeId, ...], tuple[tuple[int, ...], ...]]:
    """Return (home node of each shard, partitions of each shard). Raises PlacementError.

    The shards of a snapshot follow from the servers that it was read from, not from the nodes beside them:
    the same rows on the same servers make the same shards on any number of nodes.
    """
    from insitu.grid.layout import shard_partitions

    servers, primaries = _find_servers(cache)
    if not servers:
        homes = choose_home_nodes(shards, cache, topology)
        return homes, shard_partitions(cache.partitions, homes)
    count_rows_by_node(cache, topology)
    beside: dict[NodeId, Counter[NodeId]] = {server: Counter() for server in servers}
    moved = []
    for partition, primary in zip(cache.partitions, primaries, strict=True):
        beside[servers[primary]][partition.owners[0]] += 1
        moved.append(replace(partition, owners=(servers[primary],)))
    by_server = replace(cache, partitions=tuple(moved))
    found = choose_home_nodes(shards, by_server, Topology(servers))
    homes = tuple(beside[server].most_common(1)[0][0] for server in found)
    return homes, shard_partitions(by_server.partitions, found)


def _find_servers(cache: CacheSpec) -> tuple[tuple[NodeId, ...], tuple[int, ...]]:
    """Return the servers that a snapshot's partitions come from, and that of each; of other caches none."""
    origin = cache.origin or {}
    primaries = tuple(origin.get("primaries", ()))
    if len(primaries) != len(cache.partitions):
        return (), ()
    return tuple(NodeId(f"server-{number}") for number in range(len(origin["servers"]))), primaries


def place_tasks(job: JobSpec, cache: CacheSpec, topology: Topology) -> Placement:
    """Place the tasks of `job` on nodes of `topology`, and the shards of `cache` on its workers.

    Worker w of W runs shards [w*S/W, (w+1)*S/W) on the home node of most of them. The ps
    tasks go round-robin over the nodes; chief and evaluator run beside worker 0. Raises PlacementError.
    """
    if job.shards > len(cache.partitions):
        raise PlacementError(
            f"Each worker needs a partition of its own: cache {cache.name!r} has {len(cache.partitions)} "
            f"partitions, fewer than the {job.shards} shards asked for. Ask for at most "
            f"{len(cache.partitions)} workers, or import the cache again with --partitions {job.shards} or "
            f"more."
        )
    homes, partitions = lay_out_shards(job.shards, cache, topology)
    workers = []
    for worker, shards in enumerate(assign_contiguous_shards(job.workers, job.shards)):
        node = Counter(homes[s] for s in shards).most_common(1)[0][0]
        workers.append(TaskSpec(TaskId("worker", worker), node, shards))
    first = workers[0].node
    chief = [TaskSpec(TaskId("chief", 0), first)] if job.chief else []
    ps = [TaskSpec(TaskId("ps", i), topology.nodes[i % len(topology.nodes)]) for i in range(job.ps)]
    evaluator = [TaskSpec(TaskId("evaluator", 0), first)] if job.evaluator else []
    shard_map = ShardMap(cache.name, cache.version, partitions)
    return Placement((*chief, *workers, *ps, *evaluator), shard_map, homes)
