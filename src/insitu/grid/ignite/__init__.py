"""Apache Ignite as a source of rows: its thin protocol, binary objects as columns, a cache as a Source.

Begin reading with `source.py`, a cache as rows in the order of their keys. `protocol.py`, `rows.py`,
`objects.py`, `values.py`, `fields.py` and `row_order.py` are pure: bytes in, columns out. Only
`connection.py` has a socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.grid.ignite.address import is_ignite_address, parse_address
    from insitu.grid.ignite.description import describe_ignite
    from insitu.grid.ignite.fields import FieldOptions, parse_field_options
    from insitu.grid.ignite.source import IgniteSource, open_ignite

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "address": ("is_ignite_address", "parse_address"),
        "description": ("describe_ignite",),
        "fields": ("FieldOptions", "parse_field_options"),
        "source": ("IgniteSource", "open_ignite"),
    },
)

__all__ = [
    "FieldOptions",
    "IgniteSource",
    "describe_ignite",
    "is_ignite_address",
    "open_ignite",
    "parse_address",
    "parse_field_options",
]
