"""GPUs for tasks. There is none here: what the driver says about them is made by the tests."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from insitu.base.context import GPU_NUMBERS_ENV, GPUS_ENV
from insitu.base.errors import ClusterError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.engines import gpu_leases
from insitu.cluster.engines.engine import Command, Ended, Output
from insitu.cluster.engines.gpu_leases import (
    ORDER_ENV,
    VISIBLE_ENV,
    GpuLeases,
    count_free_gpus,
    list_devices,
    lock_device,
)
from insitu.cluster.engines.local import LocalEngine

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with three GPUs."""
    folder = tmp_path / "gpus"
    for address in ("0000:65:00.0", "0000:17:00.0", "0000:ca:00.0"):
        (folder / address).mkdir(parents=True)
        (folder / address / "information").write_text("Model: H200\n")
    monkeypatch.setattr(gpu_leases, "_DRIVER", folder)
    monkeypatch.delenv(VISIBLE_ENV, raising=False)
    return folder


def command(count: int | str) -> Command:
    return Command((sys.executable,), {GPUS_ENV: str(count)})


def visible(leases: GpuLeases, task: TaskId, count: int) -> str:
    return leases.equip(task, command(count)).environment[VISIBLE_ENV]


def test_devices_are_numbered_by_their_pci_addresses(driver: Path) -> None:
    assert [p.parent.name[5:7] for p in list_devices({}).values()] == ["17", "65", "ca"]
    assert list(list_devices({VISIBLE_ENV: "2,0"})) == [2, 0]
    assert list_devices({VISIBLE_ENV: ""}) == list_devices({VISIBLE_ENV: "-1,0"}) == {}
    assert list(list_devices({VISIBLE_ENV: "1,7,2"})) == [1]  # as CUDA does
    assert list_devices({VISIBLE_ENV: "MIG-4f"}) == {}


def test_where_there_is_no_driver_there_is_no_gpu(tmp_path: Path) -> None:
    assert list_devices({}, tmp_path / "none") == {}


def test_each_device_is_given_once_and_given_back(driver: Path) -> None:
    one, other = GpuLeases(), GpuLeases()  # of two jobs
    assert visible(one, W0, 2) == "0,1" and count_free_gpus() == (1, 3)
    assert one.equip(W1, command(1)).environment[ORDER_ENV] == "PCI_BUS_ID"
    with pytest.raises(ClusterError, match=r"worker:0 needs 1 GPU.*Received: 0 of the 3"):
        other.equip(W0, command(1))
    one.give_back(W0)
    with pytest.raises(ClusterError, match="Received: 2 of the 3"):
        other.equip(W0, command(3))
    assert count_free_gpus() == (2, 3)  # what was tried in vain is free
    assert visible(other, W0, 2) == "0,1"
    assert visible(other, W0, 1) == "0"  # the next incarnation of the same task
    one.close()
    other.close()
    assert count_free_gpus() == (3, 3)


def test_tasks_that_ask_for_none_see_none_and_other_jobs_are_as_they_were(driver: Path) -> None:
    leases = GpuLeases()
    assert visible(leases, W0, 0) == "-1" and count_free_gpus() == (3, 3)
    plain = Command((sys.executable,), {VISIBLE_ENV: "5"})
    assert leases.equip(W0, plain) is plain


def test_a_process_forked_meanwhile_keeps_no_lease(driver: Path) -> None:
    leases = GpuLeases()
    visible(leases, W0, 3)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        leases.close()
        assert count_free_gpus() == (3, 3)
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_a_device_that_is_gone_is_not_given(driver: Path) -> None:
    (driver / "0000:17:00.0" / "information").unlink()
    assert lock_device(driver / "0000:17:00.0" / "information") is None
    assert visible(GpuLeases(), W0, 1) == "1"


def test_a_task_has_its_devices_until_it_ends(driver: Path, tmp_path: Path) -> None:
    job = Paths(tmp_path / "home").job("digits-1")
    job.code.mkdir(parents=True)
    engine = LocalEngine(job)
    try:
        program = f"import os; print(os.environ[{VISIBLE_ENV!r}], flush=True); input()"
        task = Command((sys.executable, "-c", program), {**os.environ, GPUS_ENV: "2"})
        engine.launch(TaskSpec(W0, NodeId("node-0")), task)
        with pytest.raises(ClusterError, match="worker:1 needs 2"):
            engine.launch(TaskSpec(W1, NodeId("node-1")), task)
        deadline, said, ended = time.monotonic() + 60, b"", False
        while not ended:
            assert time.monotonic() < deadline
            for event in engine.wait(1.0):
                said += event.data if isinstance(event, Output) else b""
                ended = isinstance(event, Ended)
        assert said.startswith(b"0,1\n") and count_free_gpus() == (3, 3)
    finally:
        engine.close()


def test_a_task_gets_its_gpus_out_of_those_that_are_named(driver: Path) -> None:
    leases = GpuLeases()
    given = Command((sys.executable,), {GPUS_ENV: "1", GPU_NUMBERS_ENV: "2,1"})
    assert leases.equip(W0, given).environment[VISIBLE_ENV] == "1"
    assert leases.equip(W1, given).environment[VISIBLE_ENV] == "2"
    with pytest.raises(ClusterError, match=r"needs 1 GPU.*0 of the 2 that may be used here"):
        leases.equip(TaskId("worker", 2), given)
    leases.close()
