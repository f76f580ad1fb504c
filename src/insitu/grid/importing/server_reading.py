"""Has the nodes of a cluster of hosts read a table of another system, each from the servers on its own host.

A node reads the partitions that it will hold, and puts their rows into its own store: nothing of them goes
over the network if its server runs beside it. Which node that is follows from the addresses of the servers
and of the hosts (`layout/server_places.py`). The order of rows in a partition doesn't depend on who reads it,
so its bytes are those of a reading on one machine.

The settings of connections, passwords among them, are those of the process that imports. They go to the
agents in requests, which are encrypted and authenticated, and are kept nowhere.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from insitu.base.errors import InputError, SourceError
from insitu.base.net.ports import list_host_addresses
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid.importing.appending import check_columns
from insitu.grid.importing.import_targets import ImportOwners, failures_explained
from insitu.grid.intake import ImportPlan, ImportRows, RowPlan, find_primaries
from insitu.grid.layout import HostAddresses, HostPlaces, find_host_places, normalize_address
from insitu.grid.sources import (
    Block,
    PartitionedTable,
    ReadAccount,
    Source,
    SourceOptions,
    describe_columns,
    find_table_connector,
    parse_column_options,
)

if TYPE_CHECKING:
    from insitu.grid.importing.row_router import RowRouter
    from insitu.grid.transfer import RemoteStores

READ_BYTES = 8 << 20
"""About the bytes of a table that a node passes on at once."""

Counts = npt.NDArray[np.int64]
Append = Callable[[Block, Counts], None]
Progress = Callable[[int, int, int | None], None]


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """The request to a node: it reads the partitions of the import that it holds."""

    #: The address of the table, as the node reaches it.
    address: str
    #: Options of the columns, by name.
    options: Mapping[str, list[str]]
    #: The ids of the servers on its host: bytes from there are local.
    near: frozenset[str]
    #: The ids of all servers: those of another cluster are others.
    servers: frozenset[str]
    #: Settings of connections (`Connector.carry_settings`). Never printed: there are passwords in it.
    settings: Any = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "address": self.address,
            "options": {name: list(values) for name, values in self.options.items()},
            "near": sorted(self.near),
            "servers": sorted(self.servers),
            "settings": self.settings,
        }

    @classmethod
    def from_json(cls, data: Any) -> ServerRequest:
        """Return what `to_json` was called on. Raises InputError for anything else, without showing it."""
        try:
            options = {str(name): [str(each) for each in values] for name, values in data["options"].items()}
            near, servers = (frozenset(map(str, data[name])) for name in ("near", "servers"))
            if data["settings"] is None:  # which would stand for those of this host
                raise TypeError
            return cls(str(data["address"]), options, near, servers, data["settings"])
        except (KeyError, TypeError, AttributeError):
            raise InputError(
                "A request to read servers has address, options, near, servers and settings. Received: others"
            ) from None


def place_rows(
    source: Source, owners: ImportOwners, after: CacheSpec | None, beside_servers: bool
) -> tuple[tuple[NodeId, ...], HostPlaces | None]:
    """Return the node that holds each partition of a table whose partitions are kept, and how nodes of other
    hosts read them; empty and None if that isn't asked for, or its servers don't say partitions.

    Raises SourceError, TransferError.
    """
    if after is not None:
        check_columns(after, source.columns, "What a job reads again")
    if not beside_servers:
        return (), None
    primaries = find_primaries(source, owners.topology, after)
    remote = owners.remote
    if remote is None or not isinstance(source, PartitionedTable) or not source.primaries:
        return primaries, None
    kept = () if after is None else _keep_nodes(after, owners.topology.nodes)
    with failures_explained():
        found = remote.imports.list_addresses(owners.topology.nodes)
    hosts = HostAddresses(found, frozenset(map(normalize_address, list_host_addresses())))
    places = find_host_places(source.primaries, source.endpoints, hosts, kept)
    return places.owners, places


def _keep_nodes(after: CacheSpec, nodes: Sequence[NodeId]) -> tuple[NodeId, ...]:
    """Return the one of `nodes` that holds each partition of a version; if none does, one in turn."""
    return tuple(
        next((owner for owner in info.owners if owner in nodes), nodes[info.index % len(nodes)])
        for info in after.partitions
    )


def read_on_hosts(
    remote: RemoteStores,
    plan: ImportPlan,
    places: HostPlaces,
    rows: RowPlan,
    router: RowRouter,
    progress: Progress,
) -> int:
    """Have the nodes read all partitions of the table. Returns the number of units: 1.

    Raises SourceError, TransferError, TextsTooLong.
    """
    (source,) = (source for source in plan.sources if isinstance(source, PartitionedTable))
    requests = _make_requests(places, source)
    done: Counter[NodeId] = Counter()
    lock = threading.Lock()

    def count(node: NodeId, read: int, total: int) -> None:
        with lock:
            done[node] = read
            progress(0, min(sum(done.values()), plan.source_bytes), plan.source_bytes)

    router.begin(0, [0] * len(rows.destinations))
    progress(0, 0, plan.source_bytes)
    with source.read_elsewhere() as account:
        for node, found in remote.imports.read_servers(requests, rows.token, count).items():
            router.record_rows(np.array(found["counts"], np.int64))
            record_read(account, node, found)
    progress(int(router.rows.sum()), plan.source_bytes, plan.source_bytes)
    return 1


def _make_requests(places: HostPlaces, source: PartitionedTable) -> dict[NodeId, dict[str, Any]]:
    """Return what each node that holds partitions is asked to read. Raises SourceError, InputError."""
    settings, requests = find_table_connector(str(source.path)).carry_settings(), {}
    for node in sorted(set(places.owners)):
        address = source.find_way(node, places)
        options = {name: list(values) for name, values in source.options.items()}
        near, servers = frozenset(places.near[node]), frozenset(source.endpoints)
        requests[node] = ServerRequest(address, options, near, servers, settings).to_json()
    return requests


def record_read(account: ReadAccount, node: NodeId, found: Mapping[str, Any]) -> None:
    """Add what a node has read to the account of all of them."""
    account.digests += [(int(p), int(rows), str(digest)) for p, rows, digest in found["digests"]]
    read = {name: int(found[name]) for name in ("rows", "local_bytes", "remote_bytes")}
    account.local_bytes += read["local_bytes"]
    account.remote_bytes += read["remote_bytes"]
    account.nodes[node] = read


def read_servers(
    plan: RowPlan, node: NodeId, request: ServerRequest, append: Append, on_read: Callable[[int], None]
) -> dict[str, Any]:
    """Read the partitions that a node holds from their servers, on that node. `append` gets rows, each with
    the number of its file among those that the node holds; `on_read` receives the number of bytes.

    Returns the account, as JSON: `counts` by destination, `rows`, `digests`, `local_bytes`, `remote_bytes`.
    Raises InputError, SourceError, and what `append` raises.
    """
    held = plan.held_by(node)
    numbers = [plan.destinations[destination].partition for destination in held]
    file_of = np.full(plan.partitions, len(held), np.int64)
    file_of[numbers] = np.arange(len(held))
    counts, account, before = np.zeros(len(held), np.int64), ReadAccount(), 0
    import_rows, source = ImportRows(plan), _open(request)
    _check_same(plan, request, source)
    for block in source.blocks_of(sorted(numbers), READ_BYTES, account, request.near):
        if block.partitions is None:  # those of such a table have them
            continue
        files = file_of[block.partitions]
        append(import_rows.prepare(source, block, int(counts.sum())), files)
        counts += np.bincount(files, minlength=len(held))
        on_read(block.source_bytes - before)
        before = block.source_bytes
    whole = np.zeros(len(plan.destinations), np.int64)
    whole[held] = counts
    return {
        "counts": whole.tolist(),
        "rows": sum(rows for _, rows, _ in account.digests),
        "digests": account.digests,
        "local_bytes": account.local_bytes,
        "remote_bytes": account.remote_bytes,
    }


def _open(request: ServerRequest) -> PartitionedTable:
    """Open the table that a node is asked to read. Raises InputError and SourceError."""
    reading = SourceOptions(ragged_columns=frozenset(request.options.get("ragged", [])))
    connector, columns = find_table_connector(request.address), parse_column_options(request.options)
    source = connector.open(request.address, columns, reading, request.settings)
    if not isinstance(source, PartitionedTable):
        raise InputError(
            f"A table is read beside its servers by the same connector on all hosts. Received: "
            f"{request.address}, which isn't partitioned here. Install the same package on each host"
        )
    return source


def _check_same(plan: RowPlan, request: ServerRequest, source: PartitionedTable) -> None:
    """Raise SourceError unless a node finds the table that the import was planned for."""
    if not request.servers & source.endpoints.keys():
        raise SourceError(
            f"All hosts must read the same servers. Received: {source.path}, which leads to others from this "
            f"host, or they were all started again. Give an address that leads to the same servers from all "
            f"hosts"
        )
    if len(source.primaries) != plan.partitions:
        raise SourceError(
            f"{source.path} must keep its partitions while it is read. Received: "
            f"{len(source.primaries)}, after {plan.partitions}. Import again"
        )
    if source.columns != plan.columns:
        raise SourceError(
            f"The columns of a table must stay as they are while it is read. Received: "
            f"{describe_columns(source.columns)}, after {describe_columns(plan.columns)}. Import again when "
            f"no program changes them"
        )
