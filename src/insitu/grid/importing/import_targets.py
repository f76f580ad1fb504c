"""The stores that an import writes to: those in this home, and those of agents on other hosts.

Rows for another host are staged there as they come (`row_router.py`). The agent puts them in their place,
and answers when that would survive a power cut. Only then does the import publish the version here. If
anything fails before, the agents remove the staged rows; if this process dies, the head has them do it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from insitu.base.disk.access import apply_modes, make_folder
from insitu.base.disk.durable import sync_folder
from insitu.base.errors import CacheExists, GridError, StorageFull, TransferError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId, Topology
from insitu.grid.catalog import Catalog, last_published_version, next_version, prepare_manifest, update_stores
from insitu.grid.importing.appending import check_copies, share_partitions
from insitu.grid.importing.row_router import RowStores, StoresHere
from insitu.grid.intake import RowPlan
from insitu.grid.partitions import record_written
from insitu.grid.replicas import load_topology

if TYPE_CHECKING:
    from insitu.grid.transfer import RemoteStores, Survey

logger = logging.getLogger("insitu")


def choose_owners(paths: Paths, remote: RemoteStores | None) -> ImportOwners:
    """Return the owners of an import's partitions. `remote` are the agents of the cluster whose head has this
    home; None: there is none. Raises GridError if no agent is alive that may get something."""
    return ImportOwners(paths, load_topology(paths)) if remote is None else ClusterOwners(paths, remote)


class ImportOwners:
    """The owners of one import's partitions: nodes of this home."""

    #: The agents of the cluster; None: there is none.
    remote: RemoteStores | None = None

    def __init__(self, paths: Paths, topology: Topology) -> None:
        self._paths = paths
        #: The nodes that partitions are spread over.
        self.topology = topology

    def keep_here(self, nodes: Iterable[NodeId]) -> list[NodeId]:
        """Return those of `nodes` whose stores are in this home, by name."""
        return sorted(set(nodes))

    def check_base(self, base: CacheSpec) -> None:
        """Raise GridError if partitions of `base`, which a new version is to share, aren't there."""
        check_copies(self._paths, base, self.keep_here(owners_of(base)))

    def check_room(self, needs: Mapping[NodeId, int], names: Sequence[str]) -> None:
        """Ask the other hosts for room for about so many bytes. Raises StorageFull, TransferError."""

    def refuse_unlisted(self, names: Sequence[str]) -> None:
        """Raise CacheExists if stores hold published versions of caches that the catalogue has lost: an
        import would replace them for good."""
        catalog = Catalog(self._paths)
        deleted = catalog.deleted()
        for name in names:
            version = self._find_published(name)
            if version > deleted.get(name, 0) and catalog.find(name) is None:
                raise CacheExists(
                    f"Stores hold {name} version {version}, which the catalogue has lost. `insitu repair` "
                    f"puts it back. Give --overwrite to put a new version in its place"
                )

    def _find_published(self, name: str) -> int:
        return last_published_version(self._paths, name)

    def record_stores(self) -> None:
        """See that all stores have an id, which the catalogue knows."""
        update_stores(self._paths, self.keep_here(self.topology.nodes), make_catalog=True)

    def choose_version(self, catalog: Catalog, name: str) -> int:
        """Return the number of a new version, above those that any store holds."""
        return next_version(self._paths, catalog, name)

    def take_rows(self, plan: RowPlan, *, by_nodes: bool) -> list[RowStores]:
        """Return the stores of all owners, by the channel on which rows come to them. `by_nodes`: the nodes
        read the sources. Raises OSError."""
        return [StoresHere(self._paths, plan, self.topology.nodes)]

    def put_in_place(self, token: str, cache: CacheSpec, base: CacheSpec | None) -> None:
        """Put the staged partitions of a version into the stores, where nobody reads them yet.

        `token` names the staged folders, here and there. Raises GridError, OSError.
        """
        paths, staged = self._paths, self._paths.staged(cache.name, token)
        here = self.keep_here(owners_of(cache))
        for node in here:
            make_folder(paths.home, staged.store(node))
            apply_modes(paths.home, staged.store(node))
        if base is not None:
            share_partitions(paths, base, staged, here)
        for node in here:
            source = staged.store(node)
            prepare_manifest(paths, node, cache, staged.manifest(node))
            sync_folder(source)
            target = paths.version(node, cache.name, cache.version)
            make_folder(paths.home, target.parent)
            source.rename(target)
            sync_folder(target.parent)
            sync_folder(target.parent.parent)

    def end(
        self, catalog: Catalog, token: str, names: Sequence[str], versions: Sequence[CacheSpec], *, kept: bool
    ) -> None:
        """Have the other hosts mark the versions that were published, and remove what wasn't.

        With `kept` what is only staged stays there for --resume. One that doesn't answer does it when the
        head notifies it.
        """


class ClusterOwners(ImportOwners):
    """Nodes of a cluster: some may be of this home, others are on other hosts."""

    def __init__(self, paths: Paths, remote: RemoteStores) -> None:
        """Nodes that are to leave get nothing. Raises GridError if no other agent is alive."""
        agents = sorted({*remote.here, *remote.nodes} - remote.leaving)
        if not agents:
            raise GridError(
                "An import needs an agent that is alive. Received: none. `insitu nodes` shows them, and "
                "`insitu up --hosts FILE` starts them"
            )
        super().__init__(paths, Topology(tuple(agents)))
        self.remote: RemoteStores = remote
        #: Whether agents have begun to put a version in its place. Written by `put_in_place`.
        self._placed = False
        #: The survey of each other host's store. Written by `check_room`.
        self._surveys: dict[NodeId, Survey] = {}

    def keep_here(self, nodes: Iterable[NodeId]) -> list[NodeId]:
        return sorted(set(nodes) - set(self.remote.nodes))

    def check_base(self, base: CacheSpec) -> None:
        missing = [n for n in self.keep_here(owners_of(base)) if not self._paths.node(n).exists()]
        if missing:
            raise GridError(
                f"--append shares the partitions of the cache, so all nodes that hold some must be "
                f"alive. Received: {base.name}, of which {', '.join(missing)} hold some. `insitu nodes` "
                f"shows their states, `insitu up --hosts FILE` starts them"
            )
        super().check_base(base)

    def check_room(self, needs: Mapping[NodeId, int], names: Sequence[str]) -> None:
        with failures_explained():
            self._surveys = self.remote.survey(names)
        for node, survey in self._surveys.items():
            need = needs.get(node, 0)
            if survey.quota_free is not None and need > survey.quota_free:
                raise StorageFull(
                    f"No room is left in the store of {node}: its quota allows {survey.quota_free} bytes "
                    f"more. Received: about {need}. Delete caches with `insitu delete CACHE`, or allow more "
                    f"with `insitu quota {node} SIZE` on its host"
                )
            if need > survey.disk_free:
                raise StorageFull(
                    f"No room is left on the disk of {node}: {survey.disk_free} bytes are free. Received: "
                    f"about {need}. Free some space on its host, or delete caches with `insitu delete CACHE`"
                )

    def _find_published(self, name: str) -> int:
        elsewhere = [survey.published.get(name, 0) for survey in self._surveys.values()]
        return max([super()._find_published(name), *elsewhere])

    def record_stores(self) -> None:
        super().record_stores()
        known = Catalog(self._paths).stores()
        found = {survey.store: node for node, survey in self._surveys.items()}
        if any(known.get(store) != node for store, node in found.items()):
            Catalog(self._paths).record_stores(found, {})

    def choose_version(self, catalog: Catalog, name: str) -> int:
        elsewhere = [survey.next.get(name, 1) for survey in self._surveys.values()]
        return max([super().choose_version(catalog, name), *elsewhere])

    def take_rows(self, plan: RowPlan, *, by_nodes: bool) -> list[RowStores]:
        from insitu.grid.transfer import StoresElsewhere

        if by_nodes:
            return [StoresElsewhere(self.remote, plan, self.remote.all_nodes, self.remote.all_nodes)]
        owners = {owner for each in plan.destinations for owner in each.owners}
        here = self.keep_here(owners)
        stores: list[RowStores] = [StoresHere(self._paths, plan, here)] if here else []
        elsewhere = sorted(owners - set(here))
        return [*stores, StoresElsewhere(self.remote, plan, elsewhere)] if elsewhere else stores

    def put_in_place(self, token: str, cache: CacheSpec, base: CacheSpec | None) -> None:
        owners = owners_of(cache)
        here = self.keep_here(owners)
        with failures_explained():
            self.remote.confirm(here)
            self._placed = True
            self.remote.prepare(sorted(owners - set(here)), cache, token, base)
        super().put_in_place(token, cache, base)

    def end(
        self, catalog: Catalog, token: str, names: Sequence[str], versions: Sequence[CacheSpec], *, kept: bool
    ) -> None:
        for name in names:
            found = [cache for cache in versions if cache.name == name]
            try:
                published = bool(found) and catalog.is_published(name, found[0].version)
            except GridError as error:
                logger.warning("%s. The head has the agents end the import of %s.", error, name)
                continue
            if kept and not published and not self._placed:
                continue
            ended = self.remote.end_import(self.remote.nodes, name, token, published=published)
            for why in ended.values():
                logger.warning("%s. The head has it end the import of %s.", why, name)


@contextlib.contextmanager
def failures_explained() -> Iterator[None]:
    """Have a TransferError say what it means for an import."""
    try:
        yield
    except TransferError as error:
        raise TransferError(
            f"The agents hold the partitions of an import. Received: {error.message}. Nothing was imported. "
            f"Put right what is named, such as a full disk, and import again. `insitu nodes` shows which "
            f"agents are alive: an import uses those"
        ) from error


def owners_of(cache: CacheSpec) -> set[NodeId]:
    """Return all nodes that own a partition of a version."""
    return {owner for info in cache.partitions for owner in info.owners}


def record_as_verified(paths: Paths, caches: Sequence[CacheSpec], first_partition: int) -> None:
    """Spare the first training the reading of what this import wrote or has found right; copies by the system
    are read then."""
    for cache in caches:
        for info in cache.partitions[first_partition:]:
            place = (info.owners[0], cache.name, cache.version, info.index)
            record_written(paths.partition(*place), info, paths.verified(*place))


def remove_unpublished(catalog: Catalog, versions: Sequence[CacheSpec]) -> None:
    """Remove the files of `versions`, but for those published just before an interruption, or perhaps."""
    with contextlib.suppress(GridError):
        catalog.remove_files([v for v in versions if not catalog.is_published(v.name, v.version)])
