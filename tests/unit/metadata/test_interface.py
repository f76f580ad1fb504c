"""The conformance suite: both stores keep what the interface says."""

from __future__ import annotations

import secrets
import threading
import time

import pytest
from linearizability import find_order
from metadata_histories import make_history, register

from insitu.base.errors import CorruptMetadata, InputError, LeaseEnded, RevisionCompacted, StoreUnavailable
from insitu.metadata import (
    MAX_OPERATIONS,
    MAX_TRANSACTION_BYTES,
    MAX_VALUE_BYTES,
    Change,
    Compare,
    Delete,
    MetadataStore,
    Put,
    Record,
    open_store,
)


def new_id() -> str:
    return secrets.token_hex(16)


def write(store: MetadataStore, *operations: Put | Delete) -> int:
    outcome = store.transact([], operations, new_id())
    assert outcome.succeeded
    return outcome.revision


def test_keys_are_written_read_and_removed(store: MetadataStore):
    first = write(store, Put("a", b"1"), Put("b", b""))
    found, revision = store.get(["a", "b", "c"])
    assert found == {"a": Record("a", b"1", first), "b": Record("b", b"", first)}
    assert revision >= first
    second = write(store, Delete("a"), Delete("c"), Put("b", b"2"))
    assert second > first
    assert store.get(["a", "b"])[0] == {"b": Record("b", b"2", second)}
    assert store.get([])[0] == {}


def test_a_transaction_is_made_if_a_key_has_a_value(store: MetadataStore):
    write(store, Put("a", b"1"))
    for key, value in (("a", b"2"), ("a", b""), ("b", b"")):
        refused = store.transact([Compare(key, value=value)], [Put("c", b"")], new_id())
        assert not refused.succeeded and [each.key for each in refused.found] == (["a"] if key == "a" else [])
    assert store.transact([Compare("a", value=b"1")], [Put("a", b"")], new_id()).succeeded
    assert store.transact([Compare("a", value=b"")], [Delete("a")], new_id()).succeeded
    assert not store.transact([Compare("a", value=b"")], [Put("a", b"1")], new_id()).succeeded


def test_a_transaction_is_made_if_all_comparisons_hold(store: MetadataStore):
    first = write(store, Put("a", b"1"))
    made = store.transact([Compare("a", first), Compare("b", 0)], [Put("b", b"2")], new_id())
    assert made.succeeded and made.revision > first
    refused = store.transact([Compare("a", first), Compare("b", 0)], [Put("a", b"3")], new_id())
    assert not refused.succeeded
    assert sorted(refused.found, key=lambda record: record.key) == [
        Record("a", b"1", first),
        Record("b", b"2", made.revision),
    ]
    absent = store.transact([Compare("c", first)], [Put("a", b"3")], new_id())
    assert (absent.succeeded, absent.found) == (False, ())
    assert store.get(["a"])[0]["a"].value == b"1"


def test_a_transaction_is_made_once(store: MetadataStore):
    asked = new_id()
    made = store.transact([Compare("a", 0)], [Put("a", b"1")], asked)
    write(store, Put("a", b"2"))
    assert store.transact([Compare("a", 0)], [Put("a", b"1")], asked) == made
    assert store.get(["a"])[0]["a"].value == b"2"


def test_a_refused_transaction_may_be_tried_again_with_its_id(store: MetadataStore):
    asked = new_id()
    first = write(store, Put("a", b"1"))
    assert not store.transact([Compare("a", 0)], [Put("a", b"2")], asked).succeeded
    made = store.transact([Compare("a", first)], [Put("a", b"2")], asked)
    assert made.succeeded
    assert store.transact([Compare("a", first)], [Put("a", b"2")], asked) == made
    assert store.get(["a"])[0]["a"] == Record("a", b"2", made.revision)


def test_ids_of_transactions_that_were_made_are_known(store: MetadataStore):
    made, refused = [new_id() for _ in range(205)], new_id()
    for id in made:
        assert store.transact([], [], id).succeeded
    assert not store.transact([Compare("a", 7)], [], refused).succeeded
    assert sorted(store.list_made()) == sorted(made)


def test_ranges_are_in_the_order_of_bytes(store: MetadataStore):
    names = ["p/", "p/a", "p/a/b", "p/b", "p/\u007f", "p/\u00e9", "p/\uffff", "p/\U0001f600", "q", "p", "p0"]
    revision = write(store, *(Put(name, name.encode()) for name in names))
    wanted = sorted((name for name in names if name.startswith("p/")), key=str.encode)
    found, read_at = store.range("p/")
    assert [record.key for record in found] == wanted
    assert all(record.value == record.key.encode() for record in found)
    assert read_at >= revision
    assert [record.key for record in store.range("p/", "p/a", 2)[0]] == wanted[2:4]
    assert [record.key for record in store.range("p/", "a")[0]] == wanted
    assert store.range("p/", "q")[0] == []
    assert len(store.range("")[0]) == len(names)
    assert store.range("x")[0] == []


def test_ranges_and_reads_are_longer_than_one_request(store: MetadataStore):
    names = [f"k{number:04}" for number in range(250)]
    for start in range(0, 250, MAX_OPERATIONS):
        write(store, *(Put(name, b"x") for name in names[start : start + MAX_OPERATIONS]))
    assert [record.key for record in store.range("k")[0]] == names
    assert [record.key for record in store.range("k", limit=201)[0]] == names[:201]
    assert list(store.get(names)[0]) == names


def test_large_values_are_kept_whole(store: MetadataStore):
    for number in range(8):
        write(store, Put(f"big{number}", bytes([number]) * MAX_VALUE_BYTES))
    assert [record.value for record in store.range("big")[0]] == [
        bytes([number]) * MAX_VALUE_BYTES for number in range(8)
    ]
    half = MAX_TRANSACTION_BYTES // 2 - 10
    write(store, Put("a", b"x" * half), Put("b", b"y" * half))


@pytest.mark.parametrize(
    "operations",
    [
        [Put("a", b"x" * (MAX_VALUE_BYTES + 1))],
        [Put(f"a{number}", b"") for number in range(MAX_OPERATIONS + 1)],
        [Put(f"a{number}", b"x" * MAX_VALUE_BYTES) for number in range(3)],
        [Put("a", b""), Delete("a")],
        [Put("", b"")],
        [Put("\udc80", b"")],
    ],
    ids=["value", "count", "bytes", "twice", "empty", "surrogate"],
)
def test_what_is_beyond_the_limits_is_refused(store: MetadataStore, operations: list[Put | Delete]):
    with pytest.raises(InputError, match="Received"):
        store.transact([], operations, new_id())
    assert store.range("")[0] == []


def test_other_input_is_refused(store: MetadataStore):
    with pytest.raises(InputError, match="32 hexadecimal digits"):
        store.transact([], [], "x")
    with pytest.raises(InputError, match="comparisons"):
        store.transact([Compare(f"a{number}", 0) for number in range(MAX_OPERATIONS + 1)], [], new_id())
    with pytest.raises(InputError, match="limit"):
        store.range("", limit=0)
    for seconds in (0, -1, float("nan"), 1e9):
        with pytest.raises(InputError, match="lease"):
            store.grant(seconds)


def test_a_full_transaction_is_made(store: MetadataStore):
    compare = [Compare(f"a{number}", 0) for number in range(MAX_OPERATIONS)]
    operations = [Put(f"a{number}", b"x") for number in range(MAX_OPERATIONS)]
    assert store.transact(compare, operations, new_id()).succeeded
    refused = store.transact(compare, operations, new_id())
    assert len(refused.found) == MAX_OPERATIONS


def test_a_watch_tells_each_change_once_and_in_order(store: MetadataStore):
    start = write(store, Put("w/old", b"0"))
    told = store.watch("w/", start)
    first = write(store, Put("w/a", b"1"), Put("w/b", b"2"))
    write(store, Put("x", b"not asked for"))
    second = write(store, Delete("w/a"), Delete("w/never"))
    changes = [next_changes(told), next_changes(told)]
    assert sorted(changes[0], key=lambda change: change.key) == [
        Change("w/a", first, b"1"),
        Change("w/b", first, b"2"),
    ]
    assert changes[1] == [Change("w/a", second, None)]
    assert next(told) == []
    third = write(store, Put("w/a", b""))
    assert next_changes(told) == [Change("w/a", third, b"")]
    assert next_changes(store.watch("w/", second)) == [Change("w/a", third, b"")]
    told.close()


def next_changes(told) -> list[Change]:
    return next(changes for changes in told if changes)


def test_a_watch_of_all_keys_hears_of_another_store(store: MetadataStore, url: str, cluster: str):
    other = open_store(url, cluster)
    told = store.watch("", store.get([])[1])
    revision = write(other, Put("a", b"1"))
    assert next_changes(told) == [Change("a", revision, b"1")]
    other.close()


def test_a_watch_of_another_history_is_refused(store: MetadataStore):
    with pytest.raises(RevisionCompacted):
        next(store.watch("", store.get([])[1] + 1000))


def test_a_lease_ends_with_its_keys(store: MetadataStore):
    lease = store.grant(60)
    start = write(store, Put("a", b"1", lease), Put("b", b"2", lease), Put("c", b"3"))
    assert store.get(["a"])[0]["a"].lease == lease
    assert store.keep(lease)
    write(store, Put("b", b"4"))  # goes with no lease now
    told = store.watch("", start)
    store.revoke(lease)
    store.revoke(lease)
    assert sorted(store.get(["a", "b", "c"])[0]) == ["b", "c"]
    assert [change.key for change in next_changes(told)] == ["b"]
    assert [(change.key, change.value) for change in next_changes(told)] == [("a", None)]
    assert not store.keep(lease)
    with pytest.raises(LeaseEnded) as ended:
        store.transact([], [Put("d", b"", lease)], new_id())
    assert ended.value.lease == lease
    assert sorted(store.get(["d"])[0]) == []


def test_a_lease_that_nobody_keeps_ends(store: MetadataStore):
    lease, kept = store.grant(1), store.grant(60)
    start = write(store, Put("a", b"1", lease), Put("b", b"1", kept))
    told = store.watch("", start)
    assert [(change.key, change.value) for change in next_changes(told)] == [("a", None)]
    assert not store.keep(lease)
    assert store.keep(kept)
    assert list(store.get(["a", "b"])[0]) == ["b"]


def test_of_threads_that_compare_one_wins(store: MetadataStore):
    def count() -> None:
        for _ in range(10):
            while True:
                record = store.get(["n"])[0].get("n")
                value = 0 if record is None else int(record.value)
                compare = Compare("n", 0 if record is None else record.revision)
                if store.transact([compare], [Put("n", b"%d" % (value + 1))], new_id()).succeeded:
                    break

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get(["n"])[0]["n"].value == b"40"


def test_a_watch_misses_nothing_of_many_writers(store: MetadataStore):
    made: list[tuple[int, bytes]] = []

    def change(name: int) -> None:
        for number in range(25):
            value = b"%d.%d" % (name, number)
            made.append((write(store, Put(f"w/{number % 3}", value), Put(f"x/{name}", value)), value))

    told = store.watch("w/", store.get([])[1])
    threads = [threading.Thread(target=change, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    found = [next_changes(told) for _ in range(100)]
    for thread in threads:
        thread.join()
    assert [(change.revision, change.value) for (change,) in found] == sorted(made)
    told.close()


def test_histories_with_lost_answers_are_linearizable(store: MetadataStore):
    for seed in range(40):
        write(store, Delete("k"))
        history = make_history(store, seed)
        assert find_order(history, None, register) is not None, history


def test_what_was_written_is_there_when_it_is_opened_again(store: MetadataStore, url: str, cluster: str):
    asked = new_id()
    made = store.transact([], [Put("a", b"1")], asked)
    store.close()
    again = open_store(url, cluster)
    assert again.get(["a"])[0] == {"a": Record("a", b"1", made.revision)}
    assert again.transact([], [Put("a", b"1")], asked) == made
    again.close()


def test_a_closed_store_ends_watches_and_refuses_calls(store: MetadataStore):
    told = store.watch("", store.get([])[1])
    closer = threading.Timer(0.2, store.close)
    closer.start()
    deadline = time.monotonic() + 60
    for _ in told:
        assert time.monotonic() < deadline
    closer.join()
    with pytest.raises(StoreUnavailable):
        store.get(["a"])


def test_a_store_of_another_cluster_is_refused(store: MetadataStore, url: str, cluster: str):
    with pytest.raises((InputError, CorruptMetadata), match=r"cluster another|none of another"):
        open_store(url, "another")


def test_making_a_store_twice_keeps_what_it_holds(store: MetadataStore, url: str, cluster: str):
    write(store, Put("a", b"1"))
    again = open_store(url, cluster, create=True)
    assert again.get(["a"])[0]["a"].value == b"1"
    again.close()
