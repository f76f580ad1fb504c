"""Apache Ignite as a source of rows: its thin protocol, binary objects as columns, a cache as a Source.

Begin reading with `source.py`, a cache as rows in the order of their keys. `protocol.py`, `rows.py`,
`objects.py`, `values.py`, and `fields.py` are pure: bytes in, columns out. Only
`connection.py` has a socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.doors import lazy_door

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

__getattr__, __dir__ = lazy_door(__name__)
