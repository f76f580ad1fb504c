"""Copies of all records between stores, of both kinds."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import pytest

from insitu.base.errors import CorruptMetadata, InputError, StoreUnavailable
from insitu.metadata import (
    HEAD_KEY,
    MOVED,
    MOVING,
    Compare,
    MetadataStore,
    Operation,
    Outcome,
    Put,
    Record,
    copy_records,
    open_store,
    put_mark,
    read_mark,
    read_records,
    remove_mark,
    require_target,
    require_truth,
)
from insitu.metadata.embedded import EmbeddedStore

LARGE = {f"large/{i}": bytes([i]) * 400_000 for i in range(4)}
SMALL = {f"small/{i:04d}": b"%d" % i for i in range(700)}


def make_records(values: dict[str, bytes]) -> dict[str, Record]:
    return {key: Record(key, value, 0) for key, value in values.items()}


def read_values(store: MetadataStore) -> dict[str, bytes]:
    return {key: record.value for key, record in read_records(store).items()}


def test_a_store_gets_exactly_the_records(store: MetadataStore) -> None:
    store.transact([], [Put("gone", b"1"), Put("small/0000", b"old"), Put(HEAD_KEY, b"{}")], "0" * 32)
    values = {**SMALL, **LARGE, "ä/ö": b"", "z": b"\0"}
    copy_records(make_records(values), store, "there")
    assert read_values(store) == values and read_mark(store, MOVING) == "there"
    assert store.get([HEAD_KEY])[0][HEAD_KEY].value == b"{}"
    revision = store.get(["z"])[0]["z"].revision
    copy_records(make_records(values), store, "there")  # only what differs is changed
    assert store.get(["z"])[0]["z"].revision == revision


def test_records_with_a_lease_get_another_one(store: MetadataStore) -> None:
    records = {"a": Record("a", b"1", 7, lease=99), "b": Record("b", b"2", 7)}
    copy_records(records, store, "there")
    found = read_records(store)
    assert found["a"].lease not in (0, 99) and not found["b"].lease


class Failing:
    """A store of which one transaction fails, or changes nothing though it says so."""

    def __init__(self, store: EmbeddedStore, fails_at: int, says_nothing: bool) -> None:
        self.store, self.left, self.says_nothing = store, fails_at, says_nothing

    def transact(self, compare: Sequence[Compare], operations: Sequence[Operation], id: str) -> Outcome:
        self.left -= 1
        if self.left == 0:
            if self.says_nothing:
                return Outcome(True, 1)
            raise StoreUnavailable("The store must answer")
        return self.store.transact(compare, operations, id)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


@pytest.mark.parametrize("step", range(1, 10))
def test_a_copy_that_was_interrupted_is_completed_by_the_next(tmp_path: Path, step: int) -> None:
    store = EmbeddedStore(tmp_path / "store", "c", create=True)
    failing = Failing(store, step, says_nothing=False)
    with pytest.raises(StoreUnavailable):
        copy_records(make_records(SMALL), failing, "there")  # type: ignore[arg-type]
    assert read_values(store) != SMALL
    if step > 1:
        with pytest.raises(InputError, match="to which there was being moved"):
            require_truth(store, "it")
    require_target(store, "it", "there")
    copy_records(make_records(SMALL), store, "there")
    assert read_values(store) == SMALL
    store.close()


def test_what_is_lost_on_the_way_is_noticed(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path / "store", "c", create=True)
    with pytest.raises(CorruptMetadata, match=r"small/0000, .*of 90 in all\. The truth is where it was"):
        copy_records(make_records(SMALL), Failing(store, 2, says_nothing=True), "there")  # type: ignore[arg-type]
    store.close()


def test_marks_say_with_which_store_a_head_begins(url: str, cluster: str, store: MetadataStore) -> None:
    require_truth(store, "it")
    require_target(store, "it", "there")
    store.transact([], [Put("own", b"1")], secrets.token_hex(16))
    with pytest.raises(InputError, match="holds records of this cluster"):
        require_target(store, "it", "there")
    put_mark(store, MOVING, "elsewhere")
    with pytest.raises(InputError, match="it, to which elsewhere was being moved"):
        require_target(store, "it", "there")
    remove_mark(store, MOVING)
    remove_mark(store, MOVING)
    put_mark(store, MOVED, "there")
    again = open_store(url, cluster)
    with pytest.raises(InputError, match="it, which was moved: the truth is in there"):
        require_truth(again, "it")
    again.close()
    require_target(store, "it", "there")
    copy_records({}, store, "there")
    assert read_mark(store, MOVED) is None and read_records(store) == {}
