"""Names against a plain tree: by one client, and by several at the same time whose answers are lost."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from etcd_servers import Etcd, needs_etcd
from memory_metadata import MemoryMetadata
from name_histories import Call, apply, do, draw, explain, play, play_in_threads

from insitu.grid.shared_files import NameTree
from insitu.metadata import open_store


@pytest.mark.parametrize("seed", range(4))
def test_names_answer_as_a_plain_tree_does(seed: int, tmp_path: Path) -> None:
    rng, tree = random.Random(seed), dict[str, object]()
    store = open_store(tmp_path / "metadata", "c", create=True) if seed == 3 else MemoryMetadata()
    names = NameTree(store)
    versions: list[int] = []
    kinds = set()
    for number in range(1, 1500):
        kind, args = draw(rng, number, versions, "abcdé")
        answer = do(names, kind, args)
        expected, tree = apply(tree, kind, args, answer)
        assert answer == expected, (kind, args)
        kinds.add((kind, answer if type(answer) is tuple and answer[:1] == ("error",) else "done"))
        versions += [answer] if type(answer) is int else []
        if number % 50 == 0:
            listed = [each.path for each in names.list_below("v", "", "", 10_000)]
            assert listed == sorted(tree, key=lambda path: path.split("/"))
    assert len(kinds) > 15


@pytest.mark.parametrize("part", range(4))
def test_clients_at_the_same_time_are_answered_as_if_one_came_after_the_other(part: int) -> None:
    lost = 0
    for seed in range(part * 100, part * 100 + 100):
        history, losses = play(seed, clients=3, calls=5, losses=0.2)
        assert explain(history), (seed, history)
        lost += losses
    assert lost > 60


@pytest.mark.parametrize("where", ["embedded", pytest.param("etcd", marks=needs_etcd)])
def test_clients_in_threads_are_answered_so_too_by_real_stores(where: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        url = str(tmp_path / "metadata.sqlite")
        if where == "etcd":
            url = stack.enter_context(contextlib.closing(Etcd(tmp_path))).wait().url
        for seed in range(5):
            place = url if where == "etcd" else f"{url}{seed}"
            store = stack.enter_context(contextlib.closing(open_store(place, f"c{seed}", create=True)))
            history = play_in_threads(store, seed, clients=4, calls=5)
            assert len(history) == 20 and explain(history), history


def test_what_no_tree_answers_is_found() -> None:
    first = Call("publish", ("a", 1, None), 0, 1, 5)
    assert explain([first, Call("look", ("a",), 2, 3, (1, 5))])
    assert not explain([first, Call("look", ("a",), 2, 3, None)])
    assert explain([first, Call("look", ("a",), 0, 3, None)])
    assert not explain([first, Call("publish", ("a", 2, 5), 2, 3, 6), Call("look", ("a",), 4, 5, (1, 5))])
    lost = Call("publish", ("a", 2, 5), 2)
    for seen in ((1, 5), (2, 9)):
        assert explain([first, lost, Call("look", ("a",), 4, 5, seen)])
    assert not explain([first, lost, Call("look", ("a",), 4, 5, (2, 9)), Call("look", ("a",), 6, 7, (1, 5))])
