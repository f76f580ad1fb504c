"""Agents that Slurm starts and ends, by the script of docs/how-to/slurm.md. Needs root and the packages."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_hosts import wait_until
from host_jobs import HostJobs, make_images, run_undisturbed
from hosts_lab import HostsLab, find_obstacle
from slurm_hosts import KILL_WAIT, STORE, SlurmHosts
from slurm_hosts import find_obstacle as find_slurm_obstacle

from insitu.base.paths import Paths

pytestmark = [pytest.mark.hosts, pytest.mark.slow]
DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "slurm.md"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsLab]:
    if obstacle := find_obstacle() or find_slurm_obstacle():
        pytest.skip(obstacle)
    with HostsLab(tmp_path_factory.mktemp("lab"), 3) as lab:
        yield lab


@pytest.fixture
def slurm(lab: HostsLab, tmp_path: Path) -> Iterator[SlurmHosts]:
    yield SlurmHosts(lab, tmp_path / "slurm")
    lab.clear()


def assert_nothing_left(slurm: SlurmHosts) -> None:
    wait_until(lambda: not any(map(slurm.leftovers, slurm.hosts)), "the end of all processes")
    for host in slurm.hosts:
        assert host.shared_memory() == [], host.name


def submit(slurm: SlurmHosts, tmp_path: Path) -> tuple[HostJobs, str]:
    """Submit the script of the documentation, with a job of `HostJobs`. Returns its number in Slurm, too."""
    (script,) = re.findall(r"^```bash\n(#!/bin/bash\n.*?)^```$", DOCS.read_text(), re.DOTALL | re.MULTILINE)
    jobs = HostJobs(tmp_path / "unused", tmp_path / "job")
    options = f"--threads 1 --standby 0 --workers 3 - {jobs.code} train.py {jobs.meeting} &"
    changed = re.sub(r"--workers .*train\.py &", options, script)
    assert changed != script
    (slurm.folder / "cluster.sh").write_text(changed)
    images = make_images(tmp_path / "images")
    return jobs, slurm.run("sbatch --parsable cluster.sh", DATA=str(images), INSITU_STORE=STORE)


def output(slurm: SlurmHosts, number: str) -> str:
    return (slurm.folder / f"slurm-{number}.out").read_text()


def wait_for_end(slurm: SlurmHosts, number: str) -> str:
    """Return how Slurm says that a job has ended."""
    wait_until(lambda: slurm.state(number) not in ("PENDING", "RUNNING", "COMPLETING"), "the end of the job")
    return slurm.state(number)


def test_the_script_of_the_documentation_trains_and_leaves_nothing(slurm: SlurmHosts, tmp_path: Path) -> None:
    jobs, number = submit(slurm, tmp_path)
    jobs.let_go()
    state = wait_for_end(slurm, number)
    said = output(slurm, number)
    assert state == "COMPLETED", said
    assert {line.split("RESULT ")[1] for line in said.splitlines() if "RESULT " in line} == run_undisturbed(
        tmp_path / "alone", 3
    )
    assert sorted(line.split()[-2] for line in said.splitlines() if " WHERE " in line) == [
        host.name for host in slurm.hosts
    ]
    assert "3 agents ended" in said
    for host in slurm.hosts:
        assert list(Paths(host.home).node(host.name).rglob("part-*.arrow")), host.name
    assert_nothing_left(slurm)


def test_a_job_that_slurm_cancels_leaves_nothing(slurm: SlurmHosts, tmp_path: Path) -> None:
    jobs, number = submit(slurm, tmp_path)
    try:
        wait_until(lambda: len(list(jobs.meeting.glob("worker-*"))) == 3, "the middle")
    except AssertionError:
        raise AssertionError(output(slurm, number)) from None
    slurm.run(f"scancel {number}")
    assert wait_for_end(slurm, number) == "CANCELLED"
    assert_nothing_left(slurm)
    assert "agents ended" in output(slurm, number)


def test_a_script_that_is_killed_leaves_nothing(slurm: SlurmHosts, tmp_path: Path) -> None:
    """SIGKILL comes to the script alone, so nothing of it can take the head down."""
    jobs, number = submit(slurm, tmp_path)
    wait_until(lambda: len(list(jobs.meeting.glob("worker-*"))) == 3, "the middle")
    (script,) = [pid for pid, line in slurm.hosts[0].processes().items() if "slurm_script" in line]
    os.kill(script, signal.SIGKILL)
    assert wait_for_end(slurm, number) == "FAILED"
    assert_nothing_left(slurm)


def test_an_agent_that_slurm_cancels_drains_its_node_first(slurm: SlurmHosts, tmp_path: Path) -> None:
    head = tmp_path / "head"
    (tmp_path / "hosts.txt").write_text("".join(f"{host.name}\n" for host in slurm.hosts))
    address = slurm.run(f"insitu up --hosts {tmp_path}/hosts.txt --head-only", INSITU_HOME=str(head))

    def nodes() -> dict[str, str]:
        listed = json.loads(slurm.run("insitu nodes --json", INSITU_HOME=str(head)))
        return {each["node"]: each["state"] for each in listed if each["host"]}

    def partitions(name: str) -> list[Path]:
        (host,) = (host for host in slurm.hosts if host.name == name)
        return list(Paths(host.home).node(name).rglob("part-*.arrow"))

    agent = f"exec insitu agent --token-stdin --drain-on-term {KILL_WAIT - 2}s --head {address}"
    (tmp_path / "agent.sh").write_text(f"#!/bin/bash\n{agent} < {head}/token\n")
    numbers = [
        slurm.run(f"sbatch --parsable --nodelist {host.name} {tmp_path}/agent.sh", INSITU_HOME=STORE)
        for host in slurm.hosts
    ]
    wait_until(lambda: list(nodes().values()) == ["alive"] * 3, "three agents")
    images = make_images(tmp_path / "images")
    slurm.run(f"insitu import images {images}", INSITU_HOME=str(head))
    found = {host.name: len(partitions(host.name)) for host in slurm.hosts}
    assert all(found.values())

    slurm.run(f"scancel {numbers[1]}")
    assert wait_for_end(slurm, numbers[1]) == "CANCELLED"
    assert nodes() == {"host1": "alive", "host2": "left", "host3": "alive"}
    slurm.run("insitu describe images --verify", INSITU_HOME=str(head))
    assert len(partitions("host1")) + len(partitions("host3")) == sum(found.values())
    slurm.run(f"insitu down; scancel {numbers[0]} {numbers[2]}", INSITU_HOME=str(head))
    assert_nothing_left(slurm)
