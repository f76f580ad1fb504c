"""Coverage-guided fuzzing of the messages between agents, the head and the command line.

    pip install --target /tmp/atheris atheris
    export PYTHONPATH=/tmp/atheris:src:tests/support
    .venv/bin/python tests/fuzz/fuzz_agents.py head -max_total_time=1200

The first argument is who gets them: head, agent, or line (a connection that gets any bytes). The rest goes to
libFuzzer. All of it comes from peers that know the token. A finding is any exception but InsituError.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import queue
import shutil
import socket
import sys
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import atheris

FOLDER = Path(tempfile.mkdtemp(prefix="insitu-fuzz-", dir="/dev/shm"))
os.environ["INSITU_HOME"] = str(FOLDER / "head")

with atheris.instrument_imports(include=["insitu"]):
    import numpy as np
    from agent_facts import LOAD, VERSIONS, WALL, facts

    from insitu.base.errors import InsituError
    from insitu.base.paths import Paths
    from insitu.base.spec import NodeId
    from insitu.cluster.decide import Membership
    from insitu.cluster.engines import Channel, ChannelClosed
    from insitu.cluster.nodes import head as head_module
    from insitu.cluster.nodes import head_files
    from insitu.cluster.nodes.agent import Agent, StoreUpkeep
    from insitu.cluster.nodes.agent_files import HeadCalls
    from insitu.cluster.nodes.head import Head, _Caller
    from insitu.cluster.wire import messages
    from insitu.cluster.wire.records import HeadRecord
    from insitu.grid import import_cache

EDGES = [2**31, 2**62, 2**63, 10**400, -1, 0.5, float("inf"), float("nan"), None, True, [], {}, "", "..", "a"]


def draw_value(drawn: Any, depth: int = 3) -> Any:
    kind = drawn.ConsumeIntInRange(0, 5 if depth else 3)
    if kind == 0:
        return drawn.ConsumeInt(drawn.ConsumeIntInRange(1, 9))
    if kind < 3:
        return copy.copy(drawn.PickValueInList(EDGES))
    if kind == 3:
        return drawn.ConsumeUnicodeNoSurrogates(8)
    values = [draw_value(drawn, depth - 1) for _ in range(drawn.ConsumeIntInRange(0, 3))]
    return values if kind == 4 else {str(index): value for index, value in enumerate(values)}


def change(drawn: Any, message: Any) -> Any:
    """Put something else into one place of a message."""
    here = message
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        if not keys:
            return message
        key = drawn.PickValueInList(keys)
        if isinstance(here[key], dict | list) and drawn.ConsumeBool():
            here = here[key]
            continue
        if isinstance(here, dict) and drawn.ConsumeIntInRange(0, 9) == 0:
            del here[key]
        else:
            here[key] = draw_value(drawn)
        return message


def draw_message(drawn: Any, examples: list[messages.Message]) -> messages.Message:
    """Return what a peer's line is decoded to."""
    message = copy.deepcopy(drawn.PickValueInList(examples))
    for _ in range(drawn.ConsumeIntInRange(0, 3)):
        message = change(drawn, message)
    found = json.loads(json.dumps(message))
    assert isinstance(found, dict)
    return found


JOIN = {"do": "join", "facts": asdict(facts()), "load": asdict(LOAD), "waited": 0.5}
TO_HEAD: list[messages.Message] = [
    JOIN,
    {**JOIN, "facts": asdict(facts("b", process="q"))},
    {"do": "alive", "load": asdict(LOAD)},
    messages.encode_inventory("digits", 1, {0: (10, "crc32:00000000"), 7: (11, "crc32:00000001")}),
    {"do": "inventory_end"},
    {"do": "checked", "number": 1, "unreachable": {"b": "no route"}},
    {"do": "leave"},
    {"do": "nodes"},
    {"do": "check"},
    {"do": "down", "delete": True},
]


def make_home(name: str) -> Paths:
    """Make a home with a cache in it."""
    paths = Paths(FOLDER / name)
    np.save(FOLDER / "x.npy", np.arange(10))
    import_cache(paths, "digits", [str(FOLDER / "x.npy")])
    return paths


def fuzz_head() -> Any:
    """The head gets any messages of agents and of the command line."""
    paths = make_home("head")
    logging.disable()
    # Agents whose clocks differ by more than a minute aren't let in.
    head_module.time = SimpleNamespace(monotonic=time.monotonic, time=lambda: WALL)  # type: ignore[assignment]
    record = HeadRecord("c" * 32, address="h:1")
    files = head_files.open_head_files(paths, record, "t" * 32)
    head = Head(paths, None, record, files)  # type: ignore[arg-type]

    def fuzz(data: bytes) -> None:
        drawn = atheris.FuzzedDataProvider(data)
        head._membership, head._callers = Membership(VERSIONS), {}
        head._checks, head._down, head._stopping = head_module.ReachChecks(), None, False
        ends = []
        for number in (1, 2, 3):
            here, there = socket.socketpair()
            ends.append(there)
            head._callers[number] = _Caller(number, Channel(here), "client" if number == 3 else "agent")
        callers = list(head._callers.values())
        for _ in range(drawn.ConsumeIntInRange(1, 8)):
            caller = drawn.PickValueInList(callers)
            if caller.number not in head._callers:
                continue
            try:
                head._handle(caller, draw_message(drawn, TO_HEAD))
            except (InsituError, ChannelClosed):
                head._end(caller)
        list(head._checks.take_answers(head._callers, time.monotonic()))
        # What the head saves is what it reads when it starts again.
        saved = json.loads(json.dumps(messages.encode_members(head._membership)))
        assert messages.parse_members(saved) == head._membership.members
        for caller in callers:
            caller.channel.close()
        for end in ends:
            end.close()

    return fuzz


def fuzz_agent() -> Any:
    """An agent gets any messages of the head, and any catalogue."""
    catalog = make_home("head").catalog.read_bytes()
    paths = Paths(FOLDER / "agent")
    member = {
        "facts": asdict(facts()),
        "load": asdict(LOAD),
        "state": "alive",
        "since": 1.0,
        "heard": 2.0,
        "connection": None,
        "clock_skew": 0.0,
        "refused": "",
    }
    examples: list[messages.Message] = [
        {"do": "members", "members": [member]},
        {"do": "stop", "delete": True},
        *split_whole(b"SQLite format 3\0" + bytes(100)),
    ]

    def fuzz(data: bytes) -> None:
        drawn = atheris.FuzzedDataProvider(data)
        agent = Agent.__new__(Agent)
        agent._paths, agent.node, agent._catalog = paths, NodeId("a"), messages.CatalogParts()
        agent.members, agent._checks = {}, queue.SimpleQueue()
        agent._server, agent._upkeep = None, StoreUpkeep(paths, agent.node)
        agent._files = SimpleNamespace(record_members=lambda members: None, head=HeadCalls(lambda: False))
        for _ in range(drawn.ConsumeIntInRange(1, 3)):
            if drawn.ConsumeBool():
                changed = bytearray(catalog)
                for _ in range(drawn.ConsumeIntInRange(1, 4)):
                    # Most of the file is empty: what matters lies at the beginning of pages.
                    at = drawn.ConsumeIntInRange(0, len(changed) // 64 - 1) * 64
                    at += drawn.ConsumeIntInRange(0, 63)
                    changed[at : at + 1] = drawn.ConsumeBytes(drawn.ConsumeIntInRange(0, 3))
                sent = split_whole(bytes(changed))
            else:
                sent = [draw_message(drawn, examples)]
            with suppress(InsituError):
                for message in sent:
                    if message.get("do") != "check":  # starts a thread that dials
                        agent._act(message)

    return fuzz


def split_whole(data: bytes) -> list[messages.Message]:
    return list(messages.split_catalog(data, messages.identify_catalog(data), None))


def fuzz_line() -> Any:
    """A connection gets any bytes."""

    def fuzz(data: bytes) -> None:
        here, there = socket.socketpair()
        with closing(there):
            there.sendall(data[:60_000])
        channel = Channel(here, 4096)
        with suppress(ChannelClosed):
            while channel.receive():
                pass
        channel.close()

    return fuzz


TARGETS = {"head": fuzz_head, "agent": fuzz_agent, "line": fuzz_line}


def main() -> None:
    target = TARGETS[sys.argv.pop(1)]()
    atheris.Setup([sys.argv[0], "-rss_limit_mb=2048", "-max_len=4096", *sys.argv[1:]], target)
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)


if __name__ == "__main__":
    main()
