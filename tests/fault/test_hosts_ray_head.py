"""Ray's own head is lost under agents and a job, and comes back with its state. Run by `make test-ray`."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import ray_hosts
from agent_hosts import wait_until
from host_jobs import JOB_SECONDS, HostJobs, run_undisturbed
from hosts_lab import HostsLab, find_obstacle
from ray_hosts import RayLab, find_processes

from insitu.base.paths import Paths
from insitu.cluster.job_files import Journal, is_locked

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(400)]
AGENT = "insitu.cluster.nodes.agent_process"


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[RayLab]:
    """A Ray cluster on three hosts, whose head keeps its state on its disk."""
    if obstacle := find_obstacle() or ray_hosts.find_obstacle():
        pytest.skip(obstacle)
    with HostsLab(tmp_path / "lab", 3) as lab:
        yield RayLab(lab)


def test_ray_head_comes_back_with_its_state_and_nobody_has_noticed(ray: RayLab, tmp_path: Path) -> None:
    """The head of insitu is on another host. Raylets elsewhere wait for theirs for a minute."""
    first, second, third = ray.hosts
    kept = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(first.disk / "gcs")}
    ray.start(first, **kept)
    for host in (second, third):
        ray.start(host)
    assert "3 of 3 nodes up" in ray.insitu(second, "up", "--engine", "ray").stderr
    before = {host.name: find_processes(host, AGENT) for host in (second, third)}
    jobs = HostJobs(second.home, tmp_path / "job")
    options = ("--workers", "2", "--node", "host2", "--node", "host3", "--threads", "1", "--standby", "0")
    script = ("-", str(jobs.code), "train.py", str(jobs.meeting))
    started = ray.insitu(second, "start", "--detach", *options, *script, KERAS_BACKEND="jax", NO_COLOR="1")
    job = started.stdout.strip()
    jobs.wait_in_the_middle(job, 2)
    for pid in first.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    jobs.let_go()
    folder = Paths(second.home).job(job)
    wait_until(lambda: not is_locked(folder.controller), "the end of the job", JOB_SECONDS)
    state = Journal(folder.journal).state()
    assert state.exit_code == 0 and len(state.attempts) == 1, jobs.output(job)
    assert [task.incarnation for task in state.tasks] == [1, 1]
    weights = {line.split("RESULT ")[1] for line in jobs.output(job).splitlines() if "] RESULT " in line}
    ray.start(first, **kept)

    def is_whole() -> bool:
        listed = json.loads(ray.insitu(second, "nodes", "--json").stdout)
        return {each["node"]: each["state"] for each in listed} == dict.fromkeys(
            ("host1", "host2", "host3"), "alive"
        )

    wait_until(is_whole, "the agent beside Ray's head", JOB_SECONDS)
    assert {host.name: find_processes(host, AGENT) for host in (second, third)} == before
    assert weights == run_undisturbed(tmp_path / "alone", 2)
    ray.insitu(second, "down", "--force")
    assert [find_processes(host, "insitu.cluster") for host in ray.hosts] == [[], [], []]
