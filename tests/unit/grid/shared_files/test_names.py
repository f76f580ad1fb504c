"""The table of names: what commits do, against a model, and how two tables become equal."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.errors import GridError
from insitu.grid.shared_files import DELETED, FILE, FOLDER, Block, Entry, NameTable, checksum_block


def block(number: int) -> Block:
    return Block(f"{number:032x}", 3, checksum_block(b"abc"))


def file(path: str, *numbers: int) -> Entry:
    return Entry(path, 0, "", FILE, 1.0, 2, tuple(map(block, numbers)))


@pytest.fixture
def table(home: Path) -> NameTable:
    home.mkdir()
    return NameTable(home, home / "names.sqlite")


def refused(number: int) -> pytest.RaisesContext[OSError]:  # type: ignore[name-defined]
    return pytest.raises(OSError, check=lambda error: error.errno == number)


def test_a_file_is_published_replaced_and_removed(table: NameTable) -> None:
    (first,) = table.publish("v", file("a/b", 1, 2), None, "n").entries
    assert first.stamp == 1 and table.find("v", "a/b") == first
    assert table.publish("v", file("a/b", 1, 2), None, "n").entries == (first,)  # the same once more
    commit = table.publish("v", file("a/b", 2, 3), first.stamp, "n")
    assert commit.dropped == (block(1).key,)
    with refused(errno.ESTALE):
        table.publish("v", file("a/b", 4), first.stamp, "n")
    with refused(errno.EEXIST):
        table.publish("v", file("a/b", 4), 0, "n")
    assert table.describe("v", "a") is not None and table.describe("w", "a") is None
    for wrong, number in (("a", errno.EISDIR), ("a/b/c", errno.ENOTDIR)):
        with refused(number):
            table.publish("v", file(wrong, 5), None, "n")
    with refused(errno.ENOTEMPTY):
        table.remove("v", "a", recursive=False, writer="n")
    gone = table.remove("v", "a", recursive=True, writer="n")
    assert [entry.kind for entry in gone.entries] == [DELETED] and len(gone.dropped) == 2
    assert table.find("v", "a/b") is None and table.list_volumes() == []
    with refused(errno.ENOENT):
        table.remove("v", "a/b", recursive=False, writer="n")


def test_folders_are_made_listed_and_moved(table: NameTable) -> None:
    table.make_folder("v", "empty/deep", "n")
    for path in ("x/1", "x/y/2", "x0", "z"):
        table.publish("v", file(path, len(path)), None, "n")
    assert [(c.path, c.kind) for c in table.list_children("v", "")] == [
        *(("empty", FOLDER), ("x", FOLDER), ("x0", FILE), ("z", FILE)),
    ]
    assert [c.path for c in table.list_children("v", "x")] == ["x/1", "x/y"]
    assert [e.path for e in table.list_below("v", "x", "", 9)] == ["x/1", "x/y/2"]
    assert [e.path for e in table.list_below("v", "", "x/1", 2)] == ["x/y/2", "x0"]
    moved = table.rename("v", "x", "new/x", "n")
    assert len({entry.stamp for entry in moved.entries}) == 1 and not moved.dropped
    assert [e.path for e in table.list_files("v")] == ["new/x/1", "new/x/y/2", "x0", "z"]
    replaced = table.rename("v", "z", "x0", "n")
    assert replaced.dropped == (block(2).key,)
    assert table.rename("v", "x0", "x0", "n").entries == ()
    for source, target, number in (
        ("new", "new/x/in", errno.EINVAL),
        ("new", "empty", errno.ENOTEMPTY),
        ("new", "x0", errno.ENOTDIR),
        ("x0", "new", errno.EISDIR),
        ("no", "else", errno.ENOENT),
    ):
        with refused(number):
            table.rename("v", source, target, "n")
    with refused(errno.EEXIST):
        table.make_folder("v", "x0", "n")


PATHS = st.sampled_from(["a", "b", "c/d", "c/e"])
OPERATIONS = st.lists(st.tuples(st.sampled_from(["put", "remove", "move"]), PATHS, PATHS), max_size=8)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(left=OPERATIONS, right=OPERATIONS)
def test_tables_that_were_separated_become_equal_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    left: list[tuple[str, str, str]],
    right: list[tuple[str, str, str]],
) -> None:
    folder = tmp_path_factory.mktemp("tables")
    tables = [NameTable(folder, folder / f"{name}.sqlite") for name in "lr"]
    number = 0
    for table, operations, writer in zip(tables, (left, right), ("l", "r"), strict=True):
        for kind, path, other in operations:
            number += 1
            try:
                if kind == "put":
                    table.publish("v", file(path, number), None, writer)
                elif kind == "remove":
                    table.remove("v", path, recursive=False, writer=writer)
                else:
                    table.rename("v", path, other, writer)
            except OSError:
                continue
    first, second = (table.export("v", "", 100) for table in tables)
    tables[0].merge("v", second)
    tables[1].merge("v", first)
    assert tables[0].export("v", "", 100) == tables[1].export("v", "", 100)
    assert tables[0].read_states() == tables[1].read_states()
    assert tables[0].merge("v", second) == 0
    for table in tables:
        table.close()


def test_what_was_deleted_is_remembered_and_forgotten(table: NameTable) -> None:
    table.publish("v", file("a", 1), None, "n")
    old = table.export("v", "", 10)
    (gone,) = table.remove("v", "a", recursive=False, writer="n").entries
    assert table.merge("v", old) == 0 and table.find("v", "a") is None
    assert table.forget_deleted(gone.modified) == 0
    assert table.forget_deleted(gone.modified + 1) == 1 and table.export("v", "", 10) == []


def test_a_table_that_was_replaced_is_opened_again_and_a_damaged_one_is_named(
    table: NameTable, home: Path
) -> None:
    table.publish("v", file("a", 1), None, "n")
    for each in home.glob("names.sqlite*"):
        each.unlink()
    assert table.find("v", "a") is None
    table.close()
    for each in home.glob("names.sqlite*"):
        each.unlink()
    (home / "names.sqlite").write_bytes(b"x" * 4096)
    with pytest.raises(GridError, match=r"names\.sqlite"):
        table.find("v", "a")
    with pytest.raises(sqlite3.DatabaseError):
        sqlite3.connect(home / "names.sqlite").execute("SELECT 1 FROM sqlite_master")
