"""Names that are put into an empty metadata store: all of them or none, and never beside others."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_metadata import MemoryMetadata

from insitu.base.errors import GridError, StoreUnavailable
from insitu.grid.shared_files import (
    Block,
    Entry,
    NameTree,
    advance_generation,
    forget_others,
    make_origin,
    read_state,
    rebuild_names,
)
from insitu.metadata import MetadataStore, Put, Record, open_store

FILES = {
    "v": {
        f"d{n % 7}/e/f{n}": Entry(n % 3 + 1, 5.0, 2, (), (Block(f"{n:032x}", n % 3 + 1, f"xxh3:{0:032x}"),))
        for n in range(300)
    },
    "w": {"x": Entry(0, 6.0)},
}


@pytest.fixture(params=["memory", "embedded"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MetadataStore]:
    made = MemoryMetadata() if request.param == "memory" else open_store(tmp_path / "m", "c", create=True)
    with contextlib.closing(made):
        yield made


def list_files(store: MetadataStore) -> dict[str, set[tuple[str, int]]]:
    tree = NameTree(store)
    return {v: {(path, e.size) for path, e in tree.list_files(v)[0] if path} for v in tree.list_volumes()}


EXPECTED = {volume: {(path, e.size) for path, e in files.items()} for volume, files in FILES.items()}


def publish(store: MetadataStore, volume: str = "v") -> None:
    NameTree(store).publish(volume, "x", Entry(0, 1.0), None, secrets.token_hex(16))


def test_files_and_folders_are_put_back_and_can_be_changed(store: MetadataStore) -> None:
    rebuild_names(store, FILES, 4)
    assert list_files(store) == EXPECTED
    state = read_state(store)
    assert state.origin is not None and state.origin.generation == 5 and not state.is_rebuilding
    tree = NameTree(store)
    assert [each.path for each in tree.list_children("v", "d3", "", 10)] == ["d3/e"]
    tree.rename("v", "d3", "moved", secrets.token_hex(16))
    assert len(tree.list_children("v", "moved/e", "", 1000)) == 43
    tree.remove("v", "d0", secrets.token_hex(16), recursive=True)
    with pytest.raises(OSError, match="not empty"):
        tree.remove("v", "d1", secrets.token_hex(16), recursive=False)


def test_one_that_was_interrupted_is_done_again() -> None:
    store, calls = MemoryMetadata(), [0]
    for limit in range(1, 10):

        def fail(call: str, limit: int = limit) -> None:
            calls[0] += call == "transact"
            if calls[0] >= limit:
                raise StoreUnavailable("no answer")

        store.before, calls[0] = fail, 0
        with pytest.raises(StoreUnavailable):
            rebuild_names(store, FILES, 0)
        store.before = lambda call: None
        state = read_state(store)
        assert state.origin is None and state.is_rebuilding is (limit > 1)
        make_origin(store)
        assert read_state(store).origin is None or limit == 1
        if limit == 1:
            store = MemoryMetadata()
        else:
            with pytest.raises(GridError, match="by another process"):
                forget_others(store, 0)
    rebuild_names(store, FILES, 0)
    assert list_files(store) == EXPECTED
    names = [key for key in store.records if key.startswith("files/names/")]
    assert len(names) == 301 + 7 + 7, "nothing of those before is left"


def test_a_store_with_names_gets_none(store: MetadataStore) -> None:
    make_origin(store)
    publish(store)
    with pytest.raises(GridError, match="has put names meanwhile"):
        rebuild_names(store, FILES, 0)
    assert list_files(store) == {"v": {("x", 0)}} and read_state(store).origin is not None


def test_a_name_that_another_process_writes_meanwhile_stays() -> None:
    store = MemoryMetadata()
    make_origin(store)

    rebuilding = [False]

    def before(call: str) -> None:
        if call == "transact":
            if rebuilding[0]:
                store.before = lambda call: None
                publish(store)
            rebuilding[0] = True

    store.before = before
    with pytest.raises(GridError, match="has put names meanwhile"):
        rebuild_names(store, FILES, 0)
    assert list_files(store) == {"v": {("x", 0)}}
    assert not read_state(store).is_rebuilding and len(store.records) == 3


def test_of_two_at_the_same_time_one_is_done() -> None:
    """The first is slow: it writes on after the second has begun, and ended."""
    store, calls = MemoryMetadata(), [0]

    def before(call: str) -> None:
        calls[0] += call == "transact"
        if calls[0] == 3:
            store.before = lambda call: None
            rebuild_names(store, FILES, 1)

    store.before = before
    with pytest.raises(GridError, match="has put names meanwhile"):
        rebuild_names(store, FILES, 1)
    assert list_files(store) == EXPECTED and not read_state(store).is_rebuilding
    assert len([key for key in store.records if key.startswith("files/names/")]) == 301 + 7 + 7


def test_what_is_given_up_is_noted(store: MetadataStore) -> None:
    forget_others(store, 3)
    state = read_state(store)
    assert state.origin is not None and state.origin.forgets and state.origin.generation == 4
    rebuild_names(store, FILES, 3)
    state = read_state(store)
    assert state.origin is not None and not state.origin.forgets
    forget_others(store, 9)
    after = read_state(store)
    assert after.origin is not None and (after.origin.id, after.origin.forgets) == (state.origin.id, True)
    assert list_files(store) == EXPECTED


def test_a_store_that_is_moved_has_the_next_generation(store: MetadataStore) -> None:
    """Versions are revisions, which begin anew in another store: manifests of before must count for less."""
    assert advance_generation({"a": Record("a", b"1", 5)}) == {"a": Record("a", b"1", 5)}
    make_origin(store)
    before = read_state(store).origin
    records = {record.key: record for record in store.range("files/")[0]}
    moved = advance_generation(records)
    store.transact([], [Put(key, record.value) for key, record in moved.items()], secrets.token_hex(16))
    after = read_state(store).origin
    assert before is not None and after is not None
    assert (after.id, after.generation) == (before.id, before.generation + 1)
