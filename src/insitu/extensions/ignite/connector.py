"""Caches of Apache Ignite as tables that the core finds by `ignite://`; the rest is imported on first use."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insitu.base.errors import InputError
from insitu.extensions.ignite.address import Address, cache_name_of, parse_address, read_settings

if TYPE_CHECKING:
    from insitu.base.spec import Column
    from insitu.extensions.ignite.source import IgniteSource
    from insitu.extensions.ignite.writer import IgniteWriter
    from insitu.grid.layout import ServerPlaces
    from insitu.grid.sources import ColumnOptions, Connector, Description, SourceOptions


class IgniteConnector:
    """The connector of `ignite://`."""

    scheme = "ignite"
    files: tuple[str, ...] = (
        *("INSITU_IGNITE_CREDENTIALS", "INSITU_IGNITE_CA", "INSITU_IGNITE_CERT", "INSITU_IGNITE_KEY"),
        *("IGNITE_DATASET_CERTFILE", "IGNITE_DATASET_KEYFILE"),
    )
    secrets: tuple[str, ...] = (
        *("INSITU_IGNITE_PASSWORD", "INSITU_IGNITE_KEY_PASSWORD"),
        *("IGNITE_DATASET_PASSWORD", "IGNITE_DATASET_CERT_PASSWORD"),
    )

    def open(
        self, address: str, columns: ColumnOptions, options: SourceOptions, settings: Any = None
    ) -> IgniteSource:
        from insitu.extensions.ignite.carried_settings import take_settings
        from insitu.extensions.ignite.source import IgniteSource

        where = parse_address(address)
        if settings is None:
            return IgniteSource(where, read_settings(), columns, options)
        with take_settings(settings) as taken:
            return IgniteSource(where, taken, columns, options)

    def carry_settings(self) -> dict[str, str]:
        from insitu.extensions.ignite.carried_settings import carry_settings

        return carry_settings()

    def name_cache(self, address: str) -> str:
        return cache_name_of(parse_address(address))

    def find_again(self, origin: Mapping[str, Any]) -> str:
        from insitu.extensions.ignite.debounce import wait_until_stable

        address = _find_servers(origin)
        wait_until_stable(address, origin["topology"][1])
        return str(address)

    def locate(self, origin: Mapping[str, Any], timeout: float) -> tuple[Sequence[int], ServerPlaces]:
        from insitu.extensions.ignite.cluster import Cluster
        from insitu.grid.layout import find_places

        settings = replace(read_settings(), timeout=timeout)
        with Cluster(parse_address(origin["address"]), settings) as cluster:
            cluster.find_cache()
            layout = cluster.find_layout()
        return layout.topology, find_places(layout.primaries, layout.endpoints)

    def describe(self, address: str, *, count_rows: bool) -> Description:
        from insitu.extensions.ignite.description import describe_ignite, format_description

        found = describe_ignite(address, count_rows=count_rows)
        return format_description(found)

    def make_writer(self, address: str, key: Column, type_name: str | None) -> IgniteWriter:
        from insitu.extensions.ignite.writer import IgniteWriter

        return IgniteWriter(parse_address(address), key, type_name)

    def find_address(self, configuration: Path, name: str) -> str:
        from insitu.extensions.ignite.client_configuration import address_by_configuration

        return address_by_configuration(configuration, name)


def _find_servers(origin: Mapping[str, Any]) -> Address:
    """Return the address of a snapshot with all servers that it was read from: any may be gone by now."""
    address = parse_address(origin["address"])
    servers = list(address.servers)
    for name in origin.get("servers", ()):
        with contextlib.suppress(InputError):  # the UUID of one whose address wasn't known
            servers += parse_address(f"ignite://{name}/{address.cache}").servers
    return Address(tuple(dict.fromkeys(servers)), address.cache)


CONNECTOR: Connector = IgniteConnector()
