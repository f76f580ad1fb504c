"""Clients on hosts use the same files while parts of the cluster fall silent: answers agree, and what was
acknowledged is there at the end."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from agent_hosts import INSITU
from etcd_servers import needs_etcd
from file_histories import step
from host_cluster import Cluster, start_etcd
from hosts_lab import Host
from linearizability import LOST, Call, find_order
from silent_hosts import FAULTS, MOVES, begin, wait_for_agents

COUNT = int(os.environ.get("TEST_FAULTS", "12"))
pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(300 + 90 * COUNT)]

CLIENT = """
import json, random, sys, time
from pathlib import Path
from insitu.cluster import InsituFileSystem
from insitu.errors import InsituError

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
chance, system, number, seen, done = random.Random(seed), InsituFileSystem(), 0, "", 0

def ask(asked):
    match asked:
        case "write", path, data:
            system.pipe(path, data.encode())
        case "append", path, data:
            with system.open(path, "ab") as file:
                file.write(data.encode())
        case "read", path:
            return system.cat(path).decode()
        case "remove", path:
            system.rm(path)
    return "done"

while (window := (folder / "window").read_text()) != "end":
    if window != seen:
        seen, done = window, 0
    if done == 12:  # so many that their orders can be tried
        time.sleep(0.02)
        continue
    done, number = done + 1, number + 1
    kind = chance.choices(("write", "append", "read", "remove"), (3, 5, 6, 1))[0]
    asked = [kind, f"v/{window}/{chance.choice('ab')}"]
    if kind in ("write", "append"):
        asked.append(f"{seed}.{number} ")
    begin = time.monotonic()
    try:
        answer = ask(asked)
    except FileNotFoundError:
        answer = "missing"
    except (InsituError, OSError) as error:
        answer = None
    print(json.dumps([asked, answer, begin, time.monotonic()]), flush=True)
    time.sleep(0.05 + 0.3 * chance.random())
"""


@contextmanager
def clients(cluster: Cluster, folder: Path, calls: list[list[Any]]) -> Iterator[None]:
    """Run a client on each host, and add what each was answered to `calls` as they end."""
    script = folder / "client.py"
    script.write_text(CLIENT)
    python = INSITU.split()[0]
    with ExitStack() as stack:
        running = []
        for number, host in enumerate(cluster.lab.hosts):
            log, errors = (
                stack.enter_context(open(folder / f"client{number}{end}", "w")) for end in ("", ".err")
            )
            command = f"{python} {script} {folder} {number}"
            launch = [*cluster.lab.launcher.replace("{host}", host.address).split(), command]
            running.append(subprocess.Popen(launch, stdout=log, stderr=errors))
            stack.callback(running[-1].kill)
        yield
        (folder / "window").write_text("end")
        for number, process in enumerate(running):
            code = process.wait(60)
            assert code == 0, (folder / f"client{number}.err").read_text()
            calls += map(json.loads, (folder / f"client{number}").read_text().splitlines())


def explain(calls: list[list[Any]]) -> None:
    """Assert that the answers about each file can have come about one after another."""
    by_path: dict[str, list[Call]] = {}
    for (kind, path, *data), answer, began, ended in calls:
        if answer is None and kind == "read":
            continue  # it says nothing
        asked = (kind, path, *(each.encode() for each in data))
        result = LOST if answer is None else answer
        if kind == "read" and answer != "missing":
            result = answer.encode()
        by_path.setdefault(path, []).append(Call(asked, result, began, ended))
    for path, history in by_path.items():
        assert find_order(history, frozenset(), step) is not None, (path, history)


@pytest.mark.parametrize("metadata", ["embedded", pytest.param("etcd", marks=needs_etcd)])
def test_answers_agree_while_one_after_another_falls_silent(
    cluster: Cluster, tmp_path: Path, metadata: str
) -> None:
    rng, hosts = random.Random(COUNT), cluster.lab.hosts
    begin(cluster, *(("--metadata", start_etcd(cluster)) if metadata == "etcd" else ()))
    window, calls, faults = tmp_path / "window", list[list[Any]](), Counter[str]()
    window.write_text("0")
    kinds = [kind for kind in FAULTS if metadata == "etcd" or "etcd" not in kind]
    with clients(cluster, tmp_path, calls):
        for number in range(COUNT):
            kind = kinds[number % len(kinds)] if number < len(kinds) else rng.choice(kinds)
            # The faults of a head hit the first of the hosts.
            head = wait_for_agents(cluster, 3)
            order = [head.host, *(host for host in hosts if host is not head.host)]
            time.sleep(rng.random())  # some calls are under way
            with FAULTS[kind](order):
                faults[kind] += 1
                time.sleep(rng.choice((1.0, 4.0, 12.0)))
                if metadata == "etcd" and kind in MOVES:
                    # A head of before that comes back at any moment changes nothing.
                    time.sleep(rng.random() * 10)
            head = wait_for_agents(cluster, 3)
            window.write_text(str(number + 1))
            print(f"{number + 1} {kind}, head in {head.home}", flush=True)
    last = read_all(cluster, hosts[0], tmp_path, COUNT)
    explain(calls + last)
    acknowledged = sum(answer is not None for _, answer, _, _ in calls)
    print(f"{dict(faults)}: {len(calls)} calls, {acknowledged} answered, {len(last)} files read at the end")
    assert faults.total() == COUNT and set(faults) == set(kinds)
    assert acknowledged > 10 * COUNT


def read_all(cluster: Cluster, host: Host, folder: Path, count: int) -> list[list[Any]]:
    """Return each file of each window as a call, read once all is over."""
    script = folder / "read.py"
    script.write_text(
        "import json, sys, time\n"
        "from insitu.cluster import InsituFileSystem\n"
        "system = InsituFileSystem()\n"
        "for path in (f'v/{window}/{name}' for window in range(int(sys.argv[1])) for name in 'ab'):\n"
        "    begin = time.monotonic()\n"
        "    try:\n"
        "        answer = system.cat(path).decode()\n"
        "    except FileNotFoundError:\n"
        "        answer = 'missing'\n"
        "    print(json.dumps([['read', path], answer, begin, time.monotonic()]))\n"
    )
    done = cluster.run_on(host, f"{INSITU.split()[0]} {script} {count}")
    assert done.returncode == 0, done.stderr
    found: list[list[Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 2 * count
    return found
