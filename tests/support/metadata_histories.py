"""Histories of one key of a store of metadata, as `find_order` explains them, with answers that are lost."""

from __future__ import annotations

import random
import secrets
from typing import Any

from linearizability import LOST, Call

from insitu.base.errors import StoreUnavailable
from insitu.metadata import Compare, MetadataStore, Put


class LossyStore:
    """A store whose answers are lost at times, before or after the change."""

    def __init__(self, store: MetadataStore, chance: random.Random) -> None:
        self.store, self.chance = store, chance

    def transact(self, *arguments: Any) -> Any:
        luck = self.chance.random()
        if luck < 0.15:
            raise StoreUnavailable("lost on the way there")
        outcome = self.store.transact(*arguments)
        if luck > 0.85:
            raise StoreUnavailable("lost on the way back")
        return outcome


def register(state: bytes | None, asked: tuple[Any, ...]) -> tuple[bytes | None, Any]:
    """One key: read it, write it, or write it if it is as expected."""
    match asked:
        case ("read",):
            return state, state
        case ("write", value):
            return value, True
        case ("swap", expected, value):
            return (value, True) if state == expected else (state, False)
    raise AssertionError(asked)


def make_history(store: MetadataStore, seed: int) -> list[Call]:
    """Interleave three clients, whose operations are a read and then a transaction, and may be given up."""
    chance = random.Random(seed)
    lossy, history, time = LossyStore(store, chance), [], iter(range(10**6))

    def run_client(name: int) -> Any:
        for number in range(4):
            begin, kind = next(time), chance.choice(["read", "write", "swap"])
            yield
            record = store.get(["k"])[0].get("k")
            before = record and record.value
            if kind == "read":
                history.append(Call(("read",), before, begin, next(time)))
                continue
            value, id = b"%d.%d" % (name, number), secrets.token_hex(16)
            compare = [Compare("k", record.revision if record else 0)] if kind == "swap" else []
            asked = ("swap", before, value) if kind == "swap" else ("write", value)
            result: Any = LOST
            for _ in range(chance.choice([1, 3])):
                yield
                try:
                    result = lossy.transact(compare, [Put("k", value)], id).succeeded
                    break
                except StoreUnavailable:
                    continue
            yield
            history.append(Call(asked, result, begin, next(time) if result is not LOST else float("inf")))

    clients = [run_client(name) for name in range(3)]
    while clients:
        client = chance.choice(clients)
        try:
            next(client)
        except StopIteration:
            clients.remove(client)
    return history
