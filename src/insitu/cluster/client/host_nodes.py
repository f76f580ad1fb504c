"""Nodes on which a job of a cluster of hosts can run, their cores, and whether they reach each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from insitu.base.errors import ClusterError, JobSpecError, PlacementError
from insitu.base.paths import Paths
from insitu.base.plugins import ENGINES, load_plugin
from insitu.base.spec import CacheSpec, NodeId, Placement, Topology
from insitu.base.wording import format_count, inflect
from insitu.cluster.wire import HOSTS_ENGINE, read_head

if TYPE_CHECKING:
    from insitu.cluster.decide import Member


@dataclass(frozen=True, slots=True)
class HostNodes:
    """The nodes of a cluster whose agents are alive."""

    #: Cores of each, in the order of their names.
    cores: Mapping[NodeId, int]
    #: GPUs of each.
    gpus: Mapping[NodeId, int]
    #: Bytes of main memory that processes on each may still get.
    memory: Mapping[NodeId, int]
    #: States of the other nodes that the cluster has had.
    away: Mapping[NodeId, str]

    @property
    def topology(self) -> Topology:
        return Topology(tuple(self.cores))

    def restrict_to(self, topology: Topology) -> HostNodes:
        """Return those of these nodes that are in `topology`."""
        cores = {node: count for node, count in self.cores.items() if node in topology.nodes}
        gpus, memory = ({node: given[node] for node in cores} for given in (self.gpus, self.memory))
        return replace(self, cores=cores, gpus=gpus, memory=memory)


def choose_nodes(topology: Topology, names: Collection[str], cache: CacheSpec | None) -> Topology:
    """Return the nodes with these names, in their order in `topology`. Pure.

    Raises JobSpecError for a name of none, PlacementError if a partition of the cache has no copy on them.
    """
    unknown = sorted(set(names) - set(topology.nodes))
    if unknown:
        raise JobSpecError(
            f"--node is one of the nodes that are up: {', '.join(topology.nodes)}. Received: "
            f"{', '.join(unknown)}"
        )
    chosen = Topology(tuple(node for node in topology.nodes if node in names))
    partitions = cache.partitions if cache is not None else ()
    missing = [p for p in partitions if not set(p.owners) & set(chosen.nodes)]
    if missing and cache is not None:
        others = sorted({owner for p in missing for owner in p.owners})
        raise PlacementError(
            f"Each partition of the cache has a copy on a node that the job uses. Received: --node "
            f"{' --node '.join(chosen.nodes)}, and {len(missing)} of "
            f"{format_count(len(partitions), 'partition')} of "
            f"{cache.name} {inflect(len(missing), 'is', 'are')} on {', '.join(others)} alone. Add these "
            "nodes, or import with --backups"
        )
    return chosen


def find_starter(engine: str) -> Any:
    """Return the plug-in if it runs tasks on hosts, beside their agents (see `HostsEngine`); None: others do.

    Raises InputError for a plug-in that can't be loaded: now, and not in the supervisor.
    """
    plugin = None if engine in ("", "local", HOSTS_ENGINE) else load_plugin(ENGINES, engine)
    return plugin if getattr(plugin, "is_on_hosts", False) else None


def find_host_nodes(paths: Paths, engine: str, cache: CacheSpec | None) -> HostNodes | None:
    """Return the nodes that a job runs on, or None if its tasks run on this machine.

    They run on hosts if this home has a head with agents, unless `engine` is local or a plug-in, or the cache
    is in stores of this machine. Raises InputError for a plug-in that can't be loaded, ClusterError if no
    agent is alive, PlacementError if the partitions of the cache are on unreachable nodes.
    """
    if engine == "local" or (engine not in ("", HOSTS_ENGINE) and find_starter(engine) is None):
        return None
    found, notice = _read_nodes(paths) if read_head(paths) is not None else ([], "")
    members = [member for member in found if member.state != "left"]
    if not members:
        if engine:
            raise ClusterError(
                f"--engine {engine} is for the home of a head with agents. Received: {paths.home}, which has "
                f"none. Run `insitu up --hosts`, or give the command on the head's machine"
            )
        return None
    known = {m.facts.node for m in members}
    owners = {owner for partition in cache.partitions for owner in partition.owners} if cache else set()
    if cache is not None and not engine and not owners & known:
        return None
    alive = sorted(
        m.facts.node
        for m in members
        if m.state in ("alive", "silent") and m.connection is not None and m.leave_by is None
    )
    if not alive:
        raise ClusterError(
            f"Tasks run on hosts whose agents are alive. Received: none of {', '.join(sorted(known))}. "
            f"{notice} Bring them up by `insitu up --hosts`, or run the job here with --engine local"
        )
    from insitu.cluster.decide import describe_state

    found_members = {m.facts.node: m for m in members}
    away = {m.facts.node: describe_state(m) for m in members if m.facts.node not in alive}
    if cache is not None:
        _check_owners(cache, alive, away)
    chosen = [found_members[node] for node in alive]
    return HostNodes(
        cores={m.facts.node: m.facts.cores for m in chosen},
        gpus={m.facts.node: len(m.facts.gpus) for m in chosen},
        memory={m.facts.node: m.load.memory_available for m in chosen},
        away=away,
    )


def _read_nodes(paths: Paths) -> tuple[list[Member], str]:
    # Not above: msgspec takes about 30 ms to load, which a start on one machine does without.
    from insitu.cluster.wire import read_nodes

    return read_nodes(paths)


def _check_owners(cache: CacheSpec, alive: Collection[NodeId], away: Mapping[NodeId, str]) -> None:
    missing = [p.index for p in cache.partitions if not set(p.owners) & set(alive)]
    if missing:
        nodes = sorted({owner for index in missing for owner in cache.partitions[index].owners})
        states = ", ".join(f"{node} ({away.get(node, 'unknown')})" for node in nodes)
        raise PlacementError(
            f"Each partition of a cache must be on a node that is alive. Received: {cache.name!r}, of which "
            f"{format_count(len(missing), 'partition')} {inflect(len(missing), 'is', 'are')} on {states} "
            "alone. Bring these up again by `insitu up --hosts`"
        )


def prefer_live_owners(cache: CacheSpec, topology: Topology) -> CacheSpec:
    """Return the cache with each partition's owners in the order in which tasks use them: those that are
    alive first."""
    partitions = tuple(
        replace(p, owners=tuple(sorted(p.owners, key=lambda owner: owner not in topology.nodes)))
        for p in cache.partitions
    )
    return replace(cache, partitions=partitions)


def _find_short(
    placement: Placement, each: int, amounts: Mapping[NodeId, int]
) -> list[tuple[NodeId, int, int]]:
    """Return the nodes that have less than `each` for every task that trains there: (node, what it has,
    number of tasks). `amounts`: what each node has."""
    training = Counter(t.node for t in placement.tasks if t.task.role in ("chief", "worker"))
    return [
        (node, amounts.get(node, 0), count)
        for node, count in sorted(training.items())
        if amounts.get(node, 0) < each * count
    ]


def check_gpus(placement: Placement, each: int, gpus: Mapping[NodeId, int]) -> None:
    """Raise PlacementError if tasks that train, of `each` GPUs, are placed on nodes that have fewer.

    `gpus`: those that each node can give.
    """
    short = [
        f"{n} can give {has} to {format_count(count, 'task')}"
        for n, has, count in _find_short(placement, each, gpus)
    ]
    if short:
        raise PlacementError(
            f"Each task that trains has the GPUs of --gpus-per-worker for itself. Received: "
            f"--gpus-per-worker {each}, and {'; '.join(short)}. Start fewer --workers, give each fewer GPUs, "
            f"or wait until other jobs have ended"
        )


def check_memory(placement: Placement, each: int, available: Mapping[NodeId, int]) -> None:
    """Raise PlacementError if tasks that train, of `each` MiB, are placed on nodes with less memory free.

    `available`: bytes that processes on each node may still get. Memory that is promised to a task that
    hasn't taken it yet, of this job or of another one, isn't known there.
    """
    short = [
        f"{node} has {free >> 20:,} MiB free for {format_count(count, 'task')}"
        for node, free, count in _find_short(placement, each << 20, available)
    ]
    if short:
        raise PlacementError(
            f"Each task that trains finds the memory of --memory-per-worker free on its node. Received: "
            f"--memory-per-worker {each}, in MiB, and {'; '.join(short)}. Start fewer --workers, ask for "
            f"less, or wait until other programs have ended"
        )


def check_cores(placement: Placement, each: int, cores: Mapping[NodeId, int]) -> None:
    """Raise PlacementError if tasks that train, of `each` processors, are placed on nodes that have fewer.

    `cores`: those that each node has. Processors that other programs use aren't known there.
    """
    short = [
        f"{n} has {has} for {format_count(count, 'task')}"
        for n, has, count in _find_short(placement, each, cores)
    ]
    if short:
        raise PlacementError(
            f"Each task that trains has the processors of --cores-per-worker for itself. Received: "
            f"--cores-per-worker {each}, and {'; '.join(short)}. Start fewer --workers, or give each fewer"
        )


def check_reach(paths: Paths, nodes: Collection[NodeId]) -> None:
    """Raise ClusterError if two of these nodes can't talk, which names each such pair."""
    if len(nodes) < 2:
        return
    from insitu.cluster.nodes import find_separated

    pairs = [pair for pair in find_separated(paths) if pair[0] in nodes and pair[1] in {*nodes, "the others"}]
    if pairs:
        listed = "; ".join(f"{source} can't reach {target}: {why}" for source, target, why in pairs)
        raise ClusterError(
            f"The nodes of a job must reach each other. Received: {listed}. Open the ports between them, or "
            f"choose other interfaces in the file of hosts; `insitu nodes --check` looks again"
        )


def choose_host_threads(placement: Placement, cores: Mapping[NodeId, int]) -> int:
    """Return the backend threads of each replica: those of the host on which the fewest are left for each
    task that computes."""
    computing = Counter(t.node for t in placement.tasks if t.task.role in ("worker", "evaluator"))
    return max(1, min(cores[node] // count for node, count in computing.items()))
