"""What an agent and a place beside it say to each other."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from insitu.base.paths import Paths
from insitu.cluster.job_hosts import places
from insitu.cluster.job_hosts.places import drop_old_orders, end_place, keep_server, order_server

QUICK = 0.01


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    monkeypatch.setattr(places, "_LOOK_SECONDS", QUICK)
    (tmp_path / "home").mkdir(mode=0o700)
    return Paths(tmp_path / "home")


def start_python(program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program])


def test_a_server_runs_for_each_supervisor_until_the_job_is_over(paths: Paths) -> None:
    order_server(paths, "job", "10.0.0.1:1")
    started: list[str] = []

    def start(address: str) -> subprocess.Popen[bytes]:
        started.append(address)
        if address == "10.0.0.1:1":
            order_server(paths, "job", "10.0.0.2:2")  # another supervisor follows
        else:
            end_place(paths, "job", 7)
        return start_python("")

    assert keep_server(paths, "job", start, threading.Event()) == 7
    assert started == ["10.0.0.1:1", "10.0.0.2:2"]
    assert list((paths.home / "places").iterdir()) == []


def test_a_supervisor_that_is_lost_is_dialled_again(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_AGAIN_SECONDS", QUICK)
    order_server(paths, "job", "10.0.0.1:1")
    started: list[str] = []

    def start(address: str) -> subprocess.Popen[bytes]:
        started.append(address)
        if len(started) == 3:
            end_place(paths, "job", None)
        return start_python("raise SystemExit(1)")

    assert keep_server(paths, "job", start, threading.Event()) == 1, "how the job has ended isn't known"
    assert started == ["10.0.0.1:1"] * 3


def test_a_place_that_has_to_go_ends_its_server(paths: Paths) -> None:
    order_server(paths, "job", "10.0.0.1:1")
    ending = threading.Event()
    servers: list[subprocess.Popen[bytes]] = []

    def start(address: str) -> subprocess.Popen[bytes]:
        servers.append(start_python("import time; time.sleep(600)"))
        ending.set()
        return servers[-1]

    assert keep_server(paths, "job", start, ending) == 143
    assert servers[0].poll() == -15


def test_a_place_without_an_order_waits(paths: Paths) -> None:
    ending = threading.Event()
    ending.set()
    assert keep_server(paths, "job", lambda address: pytest.fail(address), ending) == 143
    end_place(paths, "job", 0)  # a job without places
    assert not (paths.home / "places").exists()


def test_orders_of_jobs_that_are_long_gone_go(paths: Paths) -> None:
    for job in ("old", "new"):
        order_server(paths, job, "10.0.0.1:1")
    os.utime(paths.home / "places" / "old.json", (0, 0))
    drop_old_orders(paths)
    assert [each.name for each in (paths.home / "places").iterdir()] == ["new.json"]
