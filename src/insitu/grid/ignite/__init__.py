"""Apache Ignite as a source of rows: its thin protocol, binary objects as columns, a cache as a Source.

Begin reading with `source.py`, a cache as rows in the order of their keys. `protocol.py`, `rows.py`,
`objects.py`, `values.py`, `fields.py` and `row_order.py` are pure: bytes in, columns out. Only
`connection.py` has a socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.grid.ignite import encoding
    from insitu.grid.ignite.address import (
        COLUMN_OPTIONS,
        Address,
        cache_name_of,
        is_ignite_address,
        parse_address,
        read_settings,
    )
    from insitu.grid.ignite.carried_settings import carry_settings, take_settings
    from insitu.grid.ignite.client_configuration import address_by_configuration
    from insitu.grid.ignite.cluster import Cluster
    from insitu.grid.ignite.debounce import wait_until_stable
    from insitu.grid.ignite.description import describe_ignite, describe_moves
    from insitu.grid.ignite.fields import FieldOptions, parse_field_options
    from insitu.grid.ignite.placing import (
        HostAddresses,
        HostPlaces,
        ServerPlaces,
        count_moved,
        find_host_places,
        find_ways,
        normalize_address,
    )
    from insitu.grid.ignite.source import IgniteSource, ReadAccount, open_ignite

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "address": (
            "COLUMN_OPTIONS",
            "Address",
            "cache_name_of",
            "is_ignite_address",
            "parse_address",
            "read_settings",
        ),
        "carried_settings": ("carry_settings", "take_settings"),
        "client_configuration": ("address_by_configuration",),
        "cluster": ("Cluster",),
        "encoding": ("encoding",),
        "description": ("describe_ignite", "describe_moves"),
        "fields": ("FieldOptions", "parse_field_options"),
        "placing": (
            "HostAddresses",
            "HostPlaces",
            "ServerPlaces",
            "count_moved",
            "find_host_places",
            "find_ways",
            "normalize_address",
        ),
        "debounce": ("wait_until_stable",),
        "source": ("IgniteSource", "ReadAccount", "open_ignite"),
    },
)

__all__ = [
    "COLUMN_OPTIONS",
    "Address",
    "Cluster",
    "FieldOptions",
    "HostAddresses",
    "HostPlaces",
    "IgniteSource",
    "ReadAccount",
    "ServerPlaces",
    "address_by_configuration",
    "cache_name_of",
    "carry_settings",
    "count_moved",
    "describe_ignite",
    "describe_moves",
    "encoding",
    "find_host_places",
    "find_ways",
    "is_ignite_address",
    "normalize_address",
    "open_ignite",
    "parse_address",
    "parse_field_options",
    "read_settings",
    "take_settings",
    "wait_until_stable",
]
