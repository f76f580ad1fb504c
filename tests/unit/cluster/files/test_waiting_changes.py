"""What changes that wait lead to, which of them are void, and how they are described."""

from __future__ import annotations

from dataclasses import replace

import pytest

from insitu.base.errors import InputError
from insitu.cluster.files.waiting_changes import (
    Attempt,
    WaitingChange,
    find_to_extend,
    find_void,
    foresee,
    join_parts,
    parse_waiting,
)
from insitu.grid.shared_files import Block, Entry

BLOCKS = [Block(f"{n:032x}", 10, f"xxh3:{n:032x}") for n in range(9)]


def make(*lines: str) -> list[WaitingChange]:
    """Return changes in order: "publish a", "append a", "rename a b", "remove a", "remove* a", "folder a"."""
    changes = []
    for number, line in enumerate(lines):
        kind, path, *target = line.split()
        has_content = kind in ("publish", "append")
        entry = Entry(10, float(number), 2, (), (BLOCKS[number],)) if has_content else None
        name, recursive = kind.rstrip("*"), kind.endswith("*")
        changes.append(
            WaitingChange(name, "v", path, float(number), entry, "".join(target), recursive, None, number)
        )
    return changes


@pytest.mark.parametrize(
    ("lines", "path", "kind", "base", "parts"),
    [
        (["publish a/b"], "a/b", "file", "a/b", [0]),
        (["publish a/b"], "a", "folder", "a", []),
        (["publish a"], "a/b", "absent", "a/b", []),
        (["publish a"], "ab", "", "ab", []),
        (["append a", "append a"], "a", "", "a", [0, 1]),
        (["publish a", "append b", "append a"], "a", "file", "a", [0, 2]),
        (["remove a"], "a", "absent", "a", []),
        (["remove* a"], "a/b", "absent", "a/b", []),
        (["remove* a", "append a/b"], "a/b", "file", "a/b", [1]),
        (["rename a b"], "a/x", "absent", "a/x", []),
        (["rename a b"], "b/x", "", "a/x", []),
        (["publish a/x", "rename a b"], "b/x", "file", "a/x", [0]),
        (["rename a b/c"], "b", "folder", "b", []),
        (["folder a/b"], "a", "folder", "a", []),
        (["folder a/b"], "a/b", "folder", "a/b", []),
        (["folder a/b"], "a/b/c", "", "a/b/c", []),
    ],
)
def test_a_path_is_what_the_changes_make_of_it(
    lines: list[str], path: str, kind: str, base: str, parts: list[int]
) -> None:
    changes = make(*lines)
    found = foresee(changes, "v", path)
    assert (found.kind, found.base) == (kind, base)
    assert found.parts == tuple(changes[number].entry for number in parts)
    assert foresee(changes, "w", path) == foresee([], "w", path)


@pytest.mark.parametrize(
    ("lines", "new", "void"),
    [
        (["publish a", "append a"], "publish a", [0, 1]),
        (["publish a", "rename a b"], "publish a", []),
        (["publish a", "remove a", "append a"], "publish a", [2]),
        (["publish d/a", "append d/e/b", "publish c"], "remove* d", ["folder d", "folder d/e"]),
        (["publish d/a"], "remove d", []),
        (["publish a"], "remove a", [0]),
        (["publish d/a", "rename d e"], "remove* d", []),
    ],
)
def test_what_a_later_change_makes_void_is_left_out(lines: list[str], new: str, void: list[object]) -> None:
    changes = make(*lines)
    (last,) = make(new)
    found = find_void(changes, replace(last, number=9))
    told = [f"{each.kind} {each.path}" if isinstance(each, WaitingChange) else each for each in found]
    assert told == void
    asked = [replace(change, attempt=Attempt("0" * 32)) for change in changes]
    assert find_void(asked, last) == [] == find_void(changes, replace(last, volume="w"))


def test_what_is_appended_joins_the_last_change_of_its_file() -> None:
    (new,) = make("append a")
    for lines, number in (
        (["append a", "publish b"], 0),
        (["publish a"], 0),
        (["append a", "rename a b"], None),
        (["append a", "remove* a"], None),
        ([], None),
    ):
        changes = make(*lines)
        found = find_to_extend(changes, new, 1)
        assert found is (None if number is None else changes[number])
        assert find_to_extend(changes, new, 64) is None
        assert find_to_extend([replace(c, attempt=Attempt("0" * 32)) for c in changes], new, 1) is None
    one, two = (change.entry for change in make("publish a", "append a"))
    assert one is not None and two is not None
    assert join_parts((one, two)) == Entry(20, 1.0, 2, (), (BLOCKS[0], BLOCKS[1]))


def test_another_process_reads_what_one_has_described() -> None:
    for change in make("publish a", "append a", "rename a b", "remove* a", "folder a"):
        for attempt in (None, Attempt("0" * 32), Attempt("1" * 32, change.entry, 4)):
            told = replace(change, attempt=attempt)
            assert parse_waiting(told.to_json(), told.number) == replace(told, is_left=True)
    good = make("rename a b")[0].to_json()
    for name, wrong in (
        ("kind", "x"),
        ("path", "../x"),
        ("target", "a//b"),
        ("entry", [1]),
        ("attempt", [1]),
    ):
        with pytest.raises(InputError):
            parse_waiting({**good, name: wrong}, 1)
    with pytest.raises(InputError):
        parse_waiting([], 1)
