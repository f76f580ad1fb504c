"""Tables of other systems, which URLs name, such as ignite://HOST/CACHE.

A package registers a connector for the scheme of the URLs (`insitu.connectors`, docs/reference/plugins.md).
It opens a table as a source, says where rows are and how they are read again, and writes rows if it can.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from insitu.base.errors import InputError, SourceError
from insitu.base.plugins import CONNECTORS, list_plugins, load_plugin
from insitu.base.spec import Column, NodeId
from insitu.grid.layout import Endpoint, HostPlaces, ServerPlaces, count_moved
from insitu.grid.sources.base import Block, Source, SourceOptions
from insitu.grid.sources.column_options import ColumnOptions


@dataclass(slots=True)
class ReadAccount:
    """What has been read of a table."""

    #: (partition, rows in the other system, digest) of each partition that has rows.
    digests: list[tuple[int, int, str]] = field(default_factory=list)
    #: Bytes, as they were sent, that count as local.
    local_bytes: int = 0
    #: The others.
    remote_bytes: int = 0
    #: Node -> what it has read, as JSON; empty: this process has read all.
    nodes: dict[str, dict[str, int]] = field(default_factory=dict)


@runtime_checkable
class TableSource(Source, Protocol):
    """A table of another system as a source."""

    origin: dict[str, Any] | None
    """What was read, as JSON, once all blocks were: "kind" (the scheme), "address", "read" (when it began and
    ended), "rows", "digest", "options" (of the columns) and, if they are known, "topology" (the versions of
    the servers' topology at the beginning and the end), "local_bytes" and "remote_bytes"."""

    @property
    def expected_bytes(self) -> int:
        """About how many bytes are read."""
        ...


@runtime_checkable
class PartitionedTable(TableSource, Protocol):
    """A table whose partitions are on servers, beside which nodes may read them. Its blocks have
    `partitions`."""

    @property
    def options(self) -> Mapping[str, list[str]]:
        """What was said of the columns, as the command line takes it."""
        ...

    @property
    def primaries(self) -> tuple[str, ...]:
        """The id of the server that is primary for each partition; empty if the servers don't say that."""
        ...

    @property
    def endpoints(self) -> Mapping[str, Endpoint]:
        """All servers by id."""
        ...

    def find_way(self, node: NodeId, places: HostPlaces) -> str:
        """Return the address by which a node opens the table. Raises SourceError if it can't reach any
        server."""
        ...

    def read_elsewhere(self) -> AbstractContextManager[ReadAccount]:
        """Yield an account that the caller fills with what nodes read of all partitions (`blocks_of`).

        Makes `origin` at the end. Raises SourceError if rows are missing.
        """
        ...

    def blocks_of(
        self, partitions: Sequence[int], block_bytes: int, account: ReadAccount, near: Collection[str]
    ) -> Iterator[Block]:
        """Yield the rows of some partitions, and fill `account`; bytes from servers in `near` are local."""
        ...


class RowWriter(Protocol):
    """Puts rows into a table, each over the one under its key. Several threads may write."""

    @property
    def address(self) -> str:
        """The URL of the table."""
        ...

    def lay_out(self, columns: Sequence[Column]) -> None:
        """Note which columns rows have beside the key, before the first ones are written. Raises InputError
        for those that can't be written."""
        ...

    def __enter__(self) -> RowWriter:
        """Connect, and make the table if need be. Raises InputError and SourceError."""
        ...

    def __exit__(self, *error: object) -> None: ...

    def write(self, keys: Any, values: Mapping[str, Any]) -> None:
        """Write rows: the keys, and the values of each column. They are there when it returns."""
        ...

    def count_rows(self) -> int:
        """Return how many rows the table has."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """A part of what `insitu describe` prints of a table."""

    #: (what it is, the fact) by line.
    facts: Sequence[tuple[str, str]]
    #: The names of the columns of what follows.
    header: Sequence[str]
    #: Its rows.
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Description:
    """What `insitu describe` says of a table."""

    #: As JSON.
    report: Mapping[str, Any]
    #: For people.
    parts: Sequence[Part]


class Connector(Protocol):
    """Opens the tables of one system. A class that derives from it has what has a body here.

    Making one is cheap, and so is importing its module: that is done to know `files` and `secrets`. Methods
    raise InputError for addresses and options that can't be used, SourceError if the system fails.
    """

    #: URLs begin with this, and `://`. The name under which it is registered.
    scheme: str
    #: Variables of the environment that name files, which are read while a job runs.
    files: tuple[str, ...] = ()
    #: Variables that surely are secrets.
    secrets: tuple[str, ...] = ()

    def open(
        self, address: str, columns: ColumnOptions, options: SourceOptions, settings: Any = None
    ) -> TableSource:
        """Return a table. `settings` are those of another host (`carry_settings`); None: those of here."""
        ...

    def carry_settings(self) -> Any:
        """Return what another host needs to open a table, as JSON: such as credentials. It goes there over an
        authenticated channel, and is kept nowhere."""
        return {}

    def name_cache(self, address: str) -> str:
        """Return the name of the cache that snapshots of a table are versions of."""
        rest = address.partition("://")[2]
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", rest).lstrip(".-")[:80]
        return f"{self.scheme}/{name}-{zlib.crc32(rest.encode()):08x}"

    def find_again(self, origin: Mapping[str, Any]) -> str:
        """Return the address by which a table is read again, once its servers are at rest. `origin`: what was
        read before."""
        return str(origin["address"])

    def locate(self, origin: Mapping[str, Any], timeout: float) -> tuple[Sequence[int], ServerPlaces]:
        """Return the topology version of now and the servers of the partitions of a table."""
        raise InputError(f"The servers of {self.scheme}:// can't be asked. Received: {origin['address']}")

    def describe(self, address: str, *, count_rows: bool) -> Description:
        """Return all about a table. `count_rows` reads it, for the rows of each partition."""
        raise InputError(f"Tables of {self.scheme}:// can't be described. Received: {address}. Import it")

    def make_writer(self, address: str, key: Column, type_name: str | None) -> RowWriter:
        """Return what writes rows with such keys. `type_name` is the class of what is written, where values
        have classes."""
        raise InputError(f"Tables of {self.scheme}:// can only be read. Received: {address} to write to")

    def find_address(self, configuration: Path, name: str) -> str | None:
        """Return the address of the table of that name at the servers that a file names; None if the system
        has no such files."""
        return None


def find_connector(text: str) -> Connector | None:
    """Return what opens the table that `text` names; None for paths, and for URLs of files.

    Raises InputError if it can't be imported.
    """
    scheme, separator, _ = text.partition("://")
    if not separator or scheme.lower() not in list_plugins(CONNECTORS):
        return None
    return load_connector(scheme.lower())


def load_connector(scheme: str) -> Connector:
    """Return the connector of a scheme. Raises InputError."""
    return cast("Connector", load_plugin(CONNECTORS, scheme))


def find_table_connector(address: str) -> Connector:
    """Return what opens the table that `address` names. Raises InputError for another name."""
    connector = find_connector(address)
    if connector is None:
        schemes = ", ".join(f"{name}://" for name in list_plugins(CONNECTORS)) or "no scheme"
        raise InputError(f"The table of another system is named by {schemes}. Received: {address}")
    return connector


def address_by_configuration(configuration: Path, name: str) -> str:
    """Return the address of a table at the servers that a file names, as it was given to --config.

    Raises InputError.
    """
    for scheme in list_plugins(CONNECTORS):
        address = load_connector(scheme).find_address(configuration, name)
        if address is not None:
            return address
    raise InputError(f"--config is for systems with such files. Received: {configuration}. Leave it out")


def describe_moves(origin: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Return what has changed in another system since a snapshot was read: the topology version of now, and
    how many of its partitions have another primary server; or why that can't be asked."""
    before = ServerPlaces(tuple(origin["servers"]), tuple(origin["primaries"]))
    try:
        topology, now = load_connector(origin["kind"]).locate(origin, timeout)
    except (InputError, SourceError) as error:
        return {"topology": None, "moved": None, "problem": str(error)}
    return {"topology": list(topology), "moved": count_moved(before, now), "problem": None}
