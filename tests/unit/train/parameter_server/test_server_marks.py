"""Marks on the servers: set once, seen by all, waited for with a deadline."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from parameter_servers import clients, servers

from insitu.base.errors import ServerStalled
from insitu.parameters import Client
from insitu.train.parameter_server.server_marks import ServerMarks


@pytest.fixture
def both() -> Iterator[list[Client]]:
    with servers(total_replicas=2) as addresses, clients(addresses, 2) as made:
        yield made


def test_marks_of_fits_and_tables_are_apart(both: list[Client]) -> None:
    first, second = (ServerMarks(client, 2, 30.0) for client in both)
    called: list[int] = []
    first.set_started(1)
    assert second.is_started(1) and not second.is_started(0)
    first.set_ends(1, [0])
    second.set_ends(1, [1])
    first.wait_for_ends(1, lambda: called.append(1))
    first.set_table_begun("words")
    assert second.is_table_begun("words") and not second.is_table_begun("{users}")
    first.set_finalized(1)
    second.wait_for_finalized(1, lambda: called.append(1))
    assert called == []


def test_who_is_missing_is_named_after_the_deadline(both: list[Client]) -> None:
    marks = ServerMarks(both[0], 2, 0.05)
    called: list[int] = []
    marks.set_ends(0, [0])
    with pytest.raises(ServerStalled, match=r"end a fit within 0\.05 s .* no end from shards \[1\]"):
        marks.wait_for_ends(0, lambda: called.append(1))
    assert called
    with pytest.raises(ServerStalled, match="no start from the chief"):
        marks.wait_for_start(0, lambda: None)
    with pytest.raises(ServerStalled, match=r"rows of table '\{users\}' within 0\.05 s"):
        marks.wait_for_table("{users}")
