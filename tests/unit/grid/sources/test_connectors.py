"""How tables of other systems are found by their URLs, and what a connector has that leaves all else out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from insitu.base import plugins
from insitu.base.errors import InputError
from insitu.base.spec import Column
from insitu.grid.sources import ColumnOptions, Connector, SourceOptions, TableSource, address_by_configuration
from insitu.grid.sources import connectors as module
from insitu.grid.sources.connectors import describe_moves, find_connector, find_table_connector


class Reader(Connector):
    """A connector that can read alone."""

    scheme = "things"

    def open(
        self, address: str, columns: ColumnOptions, options: SourceOptions, settings: Any = None
    ) -> TableSource:
        raise NotImplementedError


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    found = Reader()
    monkeypatch.setattr(module, "list_plugins", lambda kind: ("things",))
    monkeypatch.setattr(module, "load_plugin", lambda kind, name: found)
    return found


def test_tables_are_found_by_the_scheme_of_their_urls(reader: Reader) -> None:
    assert find_connector("things://a/b") is find_connector("Things://a/b") is reader
    for other in ("s3://a/b", "a.npy", "things:/a", "things", ""):
        assert find_connector(other) is None
    with pytest.raises(InputError, match=r"is named by things://\. Received: a"):
        find_table_connector("a")


def test_ignite_is_registered() -> None:
    connector = find_connector("ignite://h/C")
    assert connector is not None and connector.scheme == "ignite"
    assert plugins.list_plugins(plugins.CONNECTORS) == ("ignite",)


def test_a_connector_that_only_reads_says_so(reader: Reader) -> None:
    with pytest.raises(InputError, match="can only be read"):
        reader.make_writer("things://a", Column("key", "int64"), None)
    with pytest.raises(InputError, match="can't be described"):
        reader.describe("things://a", count_rows=False)
    with pytest.raises(InputError, match="--config is for systems with such files"):
        address_by_configuration(Path("c.xml"), "a")
    origin = {"kind": "things", "address": "things://a", "servers": [], "primaries": []}
    assert reader.find_again(origin) == "things://a"
    assert "can't be asked" in describe_moves(origin, 1.0)["problem"]


def test_snapshots_are_named_by_their_addresses(reader: Reader) -> None:
    names = [reader.name_cache(f"things://{each}") for each in ("a/b", "a_b", "a b", "", "../x" * 99)]
    assert len(set(names)) == len(names) and all(name.startswith("things/") for name in names)
