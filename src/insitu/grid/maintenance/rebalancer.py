"""`insitu rebalance`: spreads the partitions of a cache over the agents that are alive.

The moves are computed by `layout/rebalancing.py`, the fewest bytes, and `layout/move_states.py` decides the
order of steps. A copy is made and verified; then one transaction of the catalogue makes its node the owner.
The former owner's copy gets the mark of one that was fetched for jobs: its agent removes it when no job has
the version pinned. So running jobs continue to read the same copies.

A call that is killed leaves each partition with an owner. The next one makes a plan of what is there then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Literal

from insitu.base.errors import GridError, InputError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId, PlacedCopy
from insitu.grid.catalog import Catalog, cache_locks, refuse_copy
from insitu.grid.layout import (
    Action,
    Failed,
    MoveStep,
    RebalancePlan,
    Started,
    Succeeded,
    advance,
    begin_rebalancing,
    flip_copies,
    plan_rebalancing,
    plan_restoring,
)
from insitu.grid.replicas import with_owners
from insitu.grid.transfer import RemoteStores

COPIES_AT_ONCE = 4

OnMoved = Callable[[int, int], None]
"""Called with (bytes that have moved, those of the plan)."""
_State = Literal["copying", "verifying", "flipping", "deleting"]
_STATES: dict[str, _State] = {
    "copy": "copying",
    "verify": "verifying",
    "flip": "flipping",
    "delete": "deleting",
}


@dataclass(slots=True)
class RebalanceReport:
    """The moves of one version, done or planned."""

    #: The version.
    cache: CacheSpec
    #: The planned moves.
    plan: RebalancePlan
    #: Bytes that have come from other nodes.
    moved: int = 0
    #: The failed moves, and the reasons.
    failed: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all partitions are on the right nodes."""
        return not self.failed and not self.plan.unavailable


def rebalance_cache(
    paths: Paths,
    name: str,
    remote: RemoteStores,
    *,
    dry_run: bool = False,
    rate: float | None = None,
    on_moved: OnMoved = lambda done, total: None,
) -> list[RebalanceReport]:
    """Spread all versions of a cache that are kept over the agents that are alive.

    With `dry_run` only say what would move. `rate`: bytes a second that all nodes together receive at most.
    Raises UnknownCache, InputError if there are too few nodes, or if the cache is in stores without an
    agent, CacheBusy during an import, and GridError in the home of an agent.
    """
    refuse_copy(paths)
    catalog = Catalog(paths)
    catalog.get(name)
    nodes = sorted({*remote.nodes, *remote.here})
    leaving = sorted(remote.leaving)
    with cache_locks(paths, [name]):
        versions = [cache for cache in catalog.stored() if cache.name == name]
        reports = [
            RebalanceReport(cache, _make_plan(paths, catalog, cache, nodes, leaving)) for cache in versions
        ]
        total = sum(report.plan.bytes for report in reports)
        moved = Counter[str]()

        def count(size: int) -> None:
            moved["bytes"] += size
            on_moved(moved["bytes"], total)

        for report in () if dry_run else reports:
            _Run(catalog, remote, report, nodes, rate, count).run()
        return reports


def restore_copies(
    paths: Paths,
    remote: RemoteStores,
    *,
    leaving: Sequence[NodeId] = (),
    waiting: Sequence[NodeId] = (),
    rate: float | None = None,
) -> list[RebalanceReport]:
    """Make again the copies that all caches have lacked since nodes were lost, and take those off nodes that
    are `leaving`. `waiting`: nodes that are offline and may come back soon, whose copies count.

    Returns the reports of the versions that needed moves. Raises CacheBusy during an import into one of them,
    GridError in the home of an agent.
    """
    refuse_copy(paths)
    catalog, nodes = Catalog(paths), sorted({*remote.nodes, *remote.here})
    reports = []
    for name in sorted({cache.name for cache in catalog.stored()}):
        with cache_locks(paths, [name]):
            for cache in [each for each in catalog.stored() if each.name == name]:
                copies = [c for c in catalog.placement(name, cache.version) if c.state != "copying"]
                if not {copy.node for copy in copies} & {*nodes, *waiting}:
                    continue  # it is in stores without an agent
                sizes = {info.index: info.bytes for info in cache.partitions}
                plan = plan_restoring(copies, sizes, nodes, cache.backups, leaving=leaving, waiting=waiting)
                report = RebalanceReport(cache, plan)
                if plan.moves or plan.drops:
                    _Run(catalog, remote, report, nodes, rate, lambda size: None).run()
                if plan.moves or plan.drops or plan.unavailable:
                    reports.append(report)
    return reports


def _make_plan(
    paths: Paths, catalog: Catalog, cache: CacheSpec, nodes: Sequence[NodeId], leaving: Sequence[NodeId]
) -> RebalancePlan:
    # Without copies that an earlier call had begun: nobody else makes any while the lock is held.
    copies = [copy for copy in catalog.placement(cache.name, cache.version) if copy.state != "copying"]
    local = sorted({c.node for c in copies if c.node not in nodes and paths.node(c.node).exists()})
    if local:
        raise InputError(
            f"Partitions move between agents. Received: {cache.name} version {cache.version}, which is on "
            f"{', '.join(local)} in {paths.home}, without an agent. Import it again with --overwrite"
        )
    sizes = {info.index: info.bytes for info in cache.partitions}
    return plan_rebalancing(copies, sizes, nodes, cache.backups, leaving)


class _Run:
    """Carries out the plan of one version."""

    def __init__(
        self,
        catalog: Catalog,
        remote: RemoteStores,
        report: RebalanceReport,
        nodes: Sequence[NodeId],
        rate: float | None,
        count: Callable[[int], None],
    ) -> None:
        self._catalog = catalog
        self._remote = remote
        self._report = report
        self._cache = report.cache
        self._nodes = nodes
        self._rate = None if rate is None else rate / COPIES_AT_ONCE
        self._count = count
        # Jobs that have the version pinned need the former copies; the agents know that when they tidy up.
        self._state = begin_rebalancing(report.plan, limit=COPIES_AT_ONCE, pinned=False)

    def run(self) -> None:
        """Carry out the actions, until each move is done or has failed. The report says which."""
        self._change(lambda copies: [copy for copy in copies if copy.state != "copying"])
        self._state, actions = advance(self._state, Started())
        under_way: dict[Future[int], Action] = {}
        with ThreadPoolExecutor(COPIES_AT_ONCE) as threads:
            while not self._state.ended:
                for action in actions:
                    under_way[threads.submit(self._do, action)] = action
                done, _ = wait(under_way, return_when=FIRST_COMPLETED)
                actions = ()
                for future in done:
                    action = under_way.pop(future)
                    if action.kind != "discard":
                        actions += self._note(action, future)
        for future, action in under_way.items():
            if action.kind == "discard":
                future.result()
        self._report.failed += [
            f"partition {step.partition} to {step.target}: {step.reason}"
            for step in self._state.steps
            if step.state == "failed"
        ]
        self._order_owners()
        self._release_others()

    def _note(self, action: Action, future: Future[int]) -> tuple[Action, ...]:
        """Take the end of an action into account. Returns the actions that remain."""
        state = _STATES[action.kind]
        try:
            moved = future.result()
            self._report.moved += moved
            self._count(moved)
            event: Succeeded | Failed = Succeeded(action.number, state)
        except (GridError, OSError, ValueError) as error:
            event = Failed(action.number, state, str(error))
        self._state, actions = advance(self._state, event)
        return actions

    def _do(self, action: Action) -> int:
        """Do one action. Returns the bytes that it has moved. Raises GridError, OSError, ValueError."""
        step = self._state.steps[action.number]
        match action.kind:
            case "copy":
                return self._copy(step)
            case "verify" if step.target is not None:
                wanted = {step.target: [step.partition]}
                for check in self._remote.verify(self._cache, wanted, self._rate):
                    if check.problem is not None:
                        raise GridError(check.problem)
            case "flip":
                self._flip(step)
            case "delete" if step.replaced is not None and step.replaced in self._nodes:
                self._remote.release(step.replaced, self._cache, [step.partition])
            case "discard":
                self._discard(step)
        return 0

    def _copy(self, step: MoveStep) -> int:
        if step.target is None or step.source is None:
            return 0
        arriving = PlacedCopy(step.partition, step.target, "copying")
        self._change(lambda copies: [*(copy for copy in copies if copy != arriving), arriving])
        # The others in case the source turns out to be damaged.
        others = [
            n for n in self._cache.partitions[step.partition].owners if n not in (step.source, step.target)
        ]
        source = with_owners(self._cache, step.partition, [step.source, *others])
        wanted = {step.target: [step.partition]}
        return self._remote.fetch(source, wanted, marked=False, rate=self._rate)[step.target].bytes

    def _flip(self, step: MoveStep) -> None:
        """Make the new copy's node an owner, in the place of the former one, in one transaction."""
        if step.target is None:
            dropped = (step.partition, step.replaced)
            self._change(lambda copies: [c for c in copies if (c.partition, c.node) != dropped])
            return
        move = (step.partition, step.replaced, step.target)
        self._change(lambda copies: flip_copies(copies, [move]))

    def _discard(self, step: MoveStep) -> None:
        arriving = PlacedCopy(step.partition, step.target or NodeId(""), "copying")
        self._change(lambda copies: [copy for copy in copies if copy != arriving])

    def _change(self, change: Callable[[list[PlacedCopy]], Sequence[PlacedCopy]]) -> None:
        self._catalog.change_placement(self._cache.name, self._cache.version, change)

    def _order_owners(self) -> None:
        """Make the primaries those of the plan, if the copies are all there."""
        owners = self._report.plan.owners

        def order(copies: list[PlacedCopy]) -> list[PlacedCopy]:
            place = {(p, node): i for p, nodes in owners.items() for i, node in enumerate(nodes)}
            return sorted(copies, key=lambda c: (c.partition, place.get((c.partition, c.node), len(place))))

        self._change(order)

    def _release_others(self) -> None:
        """Have agents remove copies that aren't an owner's: of a call that was killed, or of a node that was
        offline while its partitions moved."""
        placed = {
            (c.partition, c.node) for c in self._catalog.placement(self._cache.name, self._cache.version)
        }
        for node in self._nodes:
            try:
                if (self._cache.name, self._cache.version) not in self._remote.list_versions(node):
                    continue
                held = self._remote.read_manifest(node, self._cache.name, self._cache.version).get("held", ())
                others = [index for index in held if (index, node) not in placed]
                if others:
                    self._remote.release(node, self._cache, others)
            except GridError as error:
                self._report.failed.append(f"copies that {node} doesn't own any more stay there: {error}")
