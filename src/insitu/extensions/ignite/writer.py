"""Puts rows into a cache of Ignite by its streamer, each over the one under its key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from insitu.base.errors import InputError
from insitu.base.spec import Column
from insitu.extensions.ignite import encoding
from insitu.extensions.ignite.address import Address, read_settings
from insitu.extensions.ignite.cluster import Cluster

_VALUE = "value"
"""The column that `insitu import` makes of a value that is no object."""


class IgniteWriter:
    """Writes rows with keys of one column. A cache that isn't there is made."""

    def __init__(self, address: Address, key: Column, type_name: str | None) -> None:
        """Raises InputError for a column that can't be keys."""
        encoding.check_key(key)
        self._address, self._key, self._type_name = address, key, type_name or address.cache
        self._columns: Sequence[Column] = ()
        #: How values are written; None if they are no objects. Written by `lay_out`.
        self._layout: encoding.ObjectLayout | None = None
        self._cluster: Cluster | None = None

    @property
    def address(self) -> str:
        return str(self._address if self._cluster is None else self._cluster.address)

    def lay_out(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        if [column.name for column in columns] == [_VALUE]:
            encoding.find_code(columns[0])
            return
        self._layout = encoding.lay_out(self._type_name, columns)
        if self._cluster is not None:
            self._put_types(self._cluster)

    def __enter__(self) -> IgniteWriter:
        self._cluster = Cluster(self._address, read_settings())
        try:
            if self._cluster.make_cache().name.startswith("SQL_"):
                raise InputError(
                    f"Rows go into a cache of keys and values. Received: the SQL table "
                    f"{self._address.cache}. Name another cache, and copy from there by SQL"
                )
            self._put_types(self._cluster)
            self._cluster.find_layout()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._cluster is not None:
            self._cluster.__exit__(None, None, None)

    def _put_types(self, cluster: Cluster) -> None:
        for kind in self._layout.kinds if self._layout else ():
            cluster.put_type(kind)

    def write(self, keys: Any, values: Mapping[str, Any]) -> None:
        if self._layout is None:
            contents = encoding.encode_column(self._columns[0], values[_VALUE])
        else:
            contents = self._layout.encode(values)
        rows = encoding.join([encoding.encode_column(self._key, keys), contents])
        self._connected.put_rows(len(rows.lengths), rows.data.tobytes())

    def count_rows(self) -> int:
        return self._connected.count_rows()

    @property
    def _connected(self) -> Cluster:
        if self._cluster is None:
            raise RuntimeError("a writer is entered before it writes")
        return self._cluster
