"""Names of `insitu://`: what Linux would do, moves of whole trees, lost answers, changes at the same time."""

from __future__ import annotations

import errno
import json
import random
import secrets
import threading
from collections.abc import Callable

import pytest
from memory_metadata import LosingMetadata, MemoryMetadata

from insitu.base.errors import GridError, StoreUnavailable
from insitu.grid.shared_files import FOLDER, Block, Entry, Folder, GarbageList, NameTree, UsedUp
from insitu.metadata import Compare


def make_file(*numbers: int, copies: int = 1) -> Entry:
    blocks = tuple(Block(f"{number:032x}", 1, f"xxh3:{0:032x}") for number in numbers)
    return Entry(len(blocks), 1.0, copies, (), blocks)


def new_id() -> str:
    return secrets.token_hex(16)


class Names:
    """A tree whose changes have ids of their own."""

    def __init__(self, store: MemoryMetadata | None = None) -> None:
        self.store = store or MemoryMetadata()
        self.tree = NameTree(self.store)

    def put(self, path: str, number: int = 1, expected: int | None = None) -> int:
        return self.tree.publish("v", path, make_file(number), expected, new_id())

    def read(self, path: str) -> list[int] | None:
        found = self.tree.look("v", path)
        return [int(b.key, 16) for b in found.blocks] if isinstance(found, Entry) else None

    def mkdir(self, path: str) -> None:
        self.tree.make_folder("v", path, new_id())

    def move(self, source: str, target: str) -> None:
        self.tree.rename("v", source, target, new_id())

    def remove(self, path: str, recursive: bool = False) -> None:
        self.tree.remove("v", path, new_id(), recursive=recursive)

    def walk(self, path: str = "", after: str = "", limit: int = 10_000) -> list[str]:
        return [each.path for each in self.tree.list_below("v", path, after, limit)]

    def garbage(self) -> set[int]:
        """Take all apart that is garbage. Return its blocks."""
        garbage, found = GarbageList(self.store), set[int]()
        while keys := garbage.list_keys():
            for _, part in garbage.collect(keys[0]):
                found |= {int(block.key, 16) for block in part.blocks}
        return found


def refuses(number: int, change: Callable[[], object]) -> str:
    with pytest.raises(OSError) as refused:
        change()
    assert refused.value.errno == number
    return str(refused.value.filename)


def test_names_are_made_moved_and_removed_as_on_linux() -> None:
    names = Names()
    first = names.put("a/b/x", 1)
    assert names.read("a/b/x") == [1] and isinstance(names.tree.look("v", "a/b"), Folder)
    assert names.tree.list_volumes() == ["v"] and names.walk() == ["a", "a/b", "a/b/x"]
    assert names.put("a/b/x", 2, expected=first) > first
    names.move("a/b/x", "a/y")
    names.move("a", "c/d")
    assert names.walk() == ["c", "c/d", "c/d/b", "c/d/y"] and names.read("c/d/y") == [2]
    names.mkdir("e")
    names.mkdir("e")
    names.move("c/d", "e")  # an empty folder is replaced
    assert names.read("e/y") == [2] and names.walk("c") == []
    names.put("z", 3)
    for number, change, named in (
        (errno.EEXIST, lambda: names.put("z", 9, expected=0), "z"),
        (errno.ESTALE, lambda: names.put("z", 9, expected=first), "z"),
        (errno.ESTALE, lambda: names.put("new", 9, expected=first), "new"),
        (errno.EISDIR, lambda: names.put("e", 9), "e"),
        (errno.ENOTDIR, lambda: names.put("z/below", 9), "z"),
        (errno.ENOTDIR, lambda: names.mkdir("z/below/more"), "z"),
        (errno.EEXIST, lambda: names.mkdir("z"), "z"),
        (errno.ENOENT, lambda: names.move("no", "z"), "no"),
        (errno.ENOENT, lambda: names.move("z/no", "z"), "z/no"),
        (errno.EINVAL, lambda: names.move("e", "e/b/new"), "e/b/new"),
        (errno.ENOTEMPTY, lambda: names.move("c", "e"), "e"),
        (errno.ENOTDIR, lambda: names.move("c", "z"), "z"),
        (errno.EISDIR, lambda: names.move("z", "e"), "e"),
        (errno.ENOTDIR, lambda: names.move("e/y", "z/y"), "z"),
        (errno.ENOENT, lambda: names.remove("no"), "no"),
        (errno.ENOTEMPTY, lambda: names.remove("e"), "e"),
    ):
        assert refuses(number, change) == named
    names.move("z", "z")
    assert names.walk() == ["c", "e", "e/b", "e/y", "z"] and names.garbage() == {1}
    names.remove("e/b")
    names.move("z", "e/y")
    names.remove("e", recursive=True)
    names.remove("c")
    assert names.walk() == [] and names.garbage() == {2, 3}
    names.remove("")
    assert names.tree.list_volumes() == [] and not [k for k in names.store.records if "/v" in k]


def test_listings_are_sorted_and_come_in_parts() -> None:
    names = Names()
    paths = [f"d/{n:03}/{name}" for n in range(30) for name in ("a", "b.c", "é", "😀")]
    for path in random.Random(1).sample(paths, len(paths)):
        names.put(path)
    listed = names.walk("d")
    assert [each for each in listed if each.count("/") == 2] == paths
    for limit in (1, 2, 7, 150):
        found, after = list[str](), ""
        while part := names.walk("d", after, limit):
            assert len(part) <= limit
            found, after = found + part, part[-1]
        assert found == listed
    names.remove("d/003/b.c")  # a listing continues behind what isn't there any more
    assert names.walk("d", "d/003/b.c", 2) == ["d/003/é", "d/003/😀"]
    assert names.walk("d", "d/002/no", 1) == ["d/002/é"]
    children = names.tree.list_children("v", "d", "010", 3)
    assert [(c.path, c.kind) for c in children] == [(f"d/{n:03}", FOLDER) for n in (11, 12, 13)]
    assert names.tree.list_children("v", "no", "", 9) == names.tree.list_children("v", "d/003/a", "", 9) == []


@pytest.mark.parametrize("change", ["rename", "remove"])
def test_a_folder_of_many_files_is_one_small_change(change: str) -> None:
    names = Names()
    names.put("d/sub/0", 0)
    for number in range(1, 40_000):
        record = names.store.records[next(k for k in names.store.records if k.endswith("/0"))]
        names.store.records[record.key[:-1] + str(number)] = record
    names.store._keys = sorted(names.store.records)
    before = len(names.store.transactions)
    if change == "rename":
        names.move("d", "e")
        assert len(names.tree.list_children("v", "e/sub", "", 50_000)) == 40_000
    else:
        names.remove("d", recursive=True)
        assert names.walk() == []
    assert len(names.store.transactions) == before + 1 and len(names.store.transactions[-1]) < 10


class Racing(MemoryMetadata):
    """Does something before the transactions of a change, once each."""

    def __init__(self) -> None:
        super().__init__()
        self.first: list[Callable[[], object]] = []

    def transact(self, compare, operations, id):  # type: ignore[no-untyped-def]
        if self.first:
            self.first.pop(0)()
        return super().transact(compare, operations, id)


def test_a_publish_into_a_folder_that_is_moved_or_removed_meanwhile_loses_nothing() -> None:
    names = Names(Racing())
    store = names.store
    assert isinstance(store, Racing)
    names.put("a/b/old", 1)
    store.first = [lambda: names.move("a/b", "c")]
    names.put("a/b/new", 2)
    assert names.read("a/b/new") == [2] and names.read("c/old") == [1]
    store.first = [lambda: names.put("c/late", 3)]
    names.move("c", "d")
    assert names.read("d/late") == [3]
    store.first = [lambda: names.remove("d", recursive=True)]
    names.put("d/x", 4)
    assert names.read("d/x") == [4]
    names.mkdir("empty")
    for change in (lambda: names.remove("empty"), lambda: names.move("a", "empty")):
        store.first = [lambda: names.put("empty/x", 5)]
        refuses(errno.ENOTEMPTY, change)
        assert names.read("empty/x") == [5]
        names.remove("empty/x")
    # Two moves that would put each folder into the other.
    names.put("one/x", 1)
    names.put("two/x", 2)
    store.first = [lambda: names.move("one", "two/one")]
    names.move("two", "one/two")
    assert [each for each in names.walk("one") if each.endswith("/x")] == ["one/two/one/x", "one/two/x"]


def test_what_was_read_at_two_revisions_is_read_again() -> None:
    """A name is looked for in a folder that is moved away and gets another file then."""
    names = Names()
    names.put("a/x", 1)
    gets = [0]

    def move_away(call: str) -> None:
        gets[0] += call == "get"
        if gets[0] == 3:  # volume and folder are read
            gets[0] = 100
            names.move("a", "b")
            names.put("b/x", 2)

    names.store.before = move_away
    assert names.read("a/x") is None and gets[0] > 100


def test_a_change_whose_answer_was_lost_is_made_once() -> None:
    store = LosingMetadata()
    names = Names(store)

    def lose(change: Callable[[str, bool], object], between: Callable[[], object] = lambda: None) -> object:
        id = new_id()
        store.is_losing = lambda each: each == id and each not in store.lost
        with pytest.raises(StoreUnavailable):
            change(id, False)
        between()
        return change(id, True)

    tree = names.tree
    first = lose(lambda id, again: tree.publish("v", "x", make_file(1), 0, id, again=again))
    assert first == names.tree.look("v", "x").version  # type: ignore[union-attr]
    # What another one has put there meanwhile stays.
    lose(
        lambda id, again: tree.publish("v", "x", make_file(2), None, id, again=again),
        lambda: names.put("x", 3),
    )
    assert names.read("x") == [3]
    lose(lambda id, again: tree.rename("v", "x", "y", id, again=again), lambda: names.put("x", 4))
    assert names.read("y") == [3] and names.read("x") == [4]
    lose(lambda id, again: tree.remove("v", "x", id, recursive=False, again=again))
    lose(lambda id, again: tree.make_folder("v", "f", id, again=again), lambda: names.remove("f"))
    assert names.walk() == ["y"]


def test_a_first_question_that_comes_late_changes_nothing_that_was_refused() -> None:
    names, id = Names(), new_id()
    late: list[Callable[[], object]] = []
    transact = names.store.transact

    def hold_back(compare, operations, asked):  # type: ignore[no-untyped-def]
        if asked == id and operations and not late:
            late.append(lambda: transact(compare, operations, asked))
            raise StoreUnavailable("it is on its way")
        return transact(compare, operations, asked)

    names.store.transact = hold_back  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        names.tree.publish("v", "d/x", make_file(1), 0, id)
    names.put("d/x", 2)
    refuses(errno.EEXIST, lambda: names.tree.publish("v", "d/x", make_file(1), 0, id, again=True))
    names.remove("", recursive=True)  # all is again as it was when the first one was decided
    late[0]()
    assert names.walk() == []
    with pytest.raises(UsedUp):
        names.tree.publish("v", "d/x", make_file(1), 0, id, again=True)


def test_blocks_that_an_append_goes_on_with_are_not_gone() -> None:
    names, tree = Names(), None
    tree = names.tree
    version = tree.publish("v", "x", make_file(1, 2), 0, new_id())
    version = tree.publish("v", "x", make_file(1, 3), version, new_id())
    assert names.garbage() == {2}
    lists = make_file(7).blocks
    version = tree.publish("v", "x", Entry(2, 1.0, 1, lists, ()), version, new_id())
    assert names.garbage() == set()  # the list names 1 and 3
    version = tree.publish("v", "x", Entry(3, 1.0, 1, lists, make_file(4).blocks), version, new_id())
    version = tree.publish("v", "x", Entry(4, 1.0, 1, lists, make_file(5).blocks), version, new_id())
    assert names.garbage() == {4}
    tree.publish("v", "x", make_file(6), None, new_id())
    garbage = GarbageList(names.store)
    ((volume, part),) = garbage.collect(garbage.list_keys()[0])
    assert (volume, part.lists, part.blocks) == ("v", lists, make_file(5).blocks)


def test_a_tree_that_was_removed_goes_part_by_part_also_after_an_end_in_the_middle() -> None:
    names = Names()
    for number in range(250):
        names.put(f"d/{number % 7}/{number % 3}/{number}", number)
    names.mkdir("d/empty/more")
    names.put("stays", 1000)
    names.remove("d", recursive=True)
    garbage = GarbageList(names.store)
    parts = garbage.collect(garbage.list_keys()[0])
    found = {int(block.key, 16) for _ in range(3) for block in next(parts)[1].blocks}
    del parts
    assert found | names.garbage() == set(range(250)) and names.read("stays") == [1000]
    assert len([key for key in names.store.records if key.startswith("files/names/")]) == 2


def test_the_list_of_all_files_says_if_one_was_moved_meanwhile() -> None:
    names = Names()
    for number in range(1200):
        names.put(f"{number % 4}/{number}", number)
    listed, whole = names.tree.list_files("v")
    assert whole and {path for path, _ in listed} == {f"{n % 4}/{n}" for n in range(1200)}
    names.remove("0", recursive=True)
    assert {path for path, _ in names.tree.list_files("v")[0]} == {"", *(p for p, _ in listed if p[0] != "0")}
    folders = {n: names.tree.look("v", str(n)).id for n in (1, 2, 3)}  # type: ignore[union-attr]
    first, *_, last = sorted(folders, key=lambda n: folders[n])
    ranges = [0]

    def move(call: str) -> None:
        ranges[0] += call == "range"
        if ranges[0] == 2:
            ranges[0] = 100
            moved = names.tree.list_children("v", str(last), "", 9)[-1].path
            names.move(moved, f"{first}/0000")

    names.store.before = move
    assert names.tree.list_files("v")[1] is False
    assert names.tree.list_files("v")[1] is True


def test_the_list_of_all_files_says_if_a_folder_was_moved_meanwhile() -> None:
    names = Names()
    for number in range(1200):
        names.put(f"{number % 4}/d/{number}", number)
    ranges = [0]

    def move(call: str) -> None:
        ranges[0] += call == "range"
        if ranges[0] == 2:
            ranges[0] = 100
            names.move("0/d", "1/e")

    names.store.before = move
    assert names.tree.list_files("v")[1] is False
    listed, whole = names.tree.list_files("v")
    assert whole and len(listed) == 1200


def test_a_record_that_is_none_of_a_name_is_named() -> None:
    names = Names()
    names.put("x")
    key = next(key for key in names.store.records if key.endswith("/x"))
    for value in (b"", b"[]", b"{}", json.dumps({"file": [1]}).encode()):
        names.store.records[key] = type(names.store.records[key])(key, value, 9)
        with pytest.raises(GridError, match=r"files/names/v/.*/x"):
            names.read("x")


def test_a_comparison_of_what_is_never_there_finds_changes_that_were_made() -> None:
    store, id = MemoryMetadata(), new_id()
    assert not store.transact([Compare("files/never", 1)], [], id).succeeded
    NameTree(store).make_folder("v", "x", id)
    assert store.transact([Compare("files/never", 1)], [], id).succeeded


def test_many_who_change_the_same_names_at_once_get_done() -> None:
    names = Names()
    threads = [
        threading.Thread(target=lambda n=n: [names.put(f"d{n % 2}/{k}", n) for k in range(20)])
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names.walk()) == 42
