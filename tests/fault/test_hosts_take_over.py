"""The head's host is lost, and another one takes over without a command. Run by `make test-hosts`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agent_hosts import INSITU, wait_until
from host_cluster import Cluster, count_tasks
from host_jobs import (
    IMPORT_OPTIONS,
    JOB_SECONDS,
    HostJobs,
    make_images,
    read_ledger,
    run_undisturbed_on_images,
)
from hosts_lab import Host

from insitu.cluster.agents.records import read_agent, read_head
from insitu.cluster.job_files import Journal, is_locked, read_environment
from insitu.paths import Paths
from insitu.spec import NodeId

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(400)]
AFTER = "30s"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], Any]:
    """The weights and the ledger of the same job on one machine."""
    return run_undisturbed_on_images(tmp_path_factory.mktemp("alone"), 3)


def start_job(cluster: Cluster, folder: Path) -> tuple[HostJobs, str]:
    """Bring up a head on the first host, with agents on all, and start a job there with a worker on each.
    Returns when all are in the middle, and hosts keep copies."""
    first, second, third = cluster.lab.hosts
    cluster.write_hosts(f"{first.address} name=host1 home={first.disk / 'agent'}")
    launcher = f"--launcher 'env HOST={{host}} sh -c' --insitu '{INSITU}'"
    brought = cluster.on(first, f"up --hosts {cluster.file} --take-over-after {AFTER} {launcher}")
    assert brought.returncode == 0, brought.stderr
    address = json.loads(Paths(first.home).head.read_text())["address"]
    for host in (second, third):
        token = Paths(first.home).token
        joined = cluster.run_on(host, f"{INSITU} agent --detach --token-stdin --head {address} < {token}")
        assert joined.returncode == 0, joined.stderr
    imported = cluster.on(first, f"import images {make_images(folder / 'images')} {' '.join(IMPORT_OPTIONS)}")
    assert imported.returncode == 0, imported.stderr
    jobs = HostJobs(first.home, folder / "job")
    options = "--detach --workers 3 --threads 1 --standby 0 --on-take-over resume"
    started = cluster.run_on(
        first,
        f"KERAS_BACKEND=jax NO_COLOR=1 RATE=3 A_TOKEN=4 {INSITU} start {options} images {jobs.code} train.py "
        f"{jobs.meeting}",
    )
    assert started.returncode == 0, started.stderr
    job = started.stderr.split()[0]
    wait_until(lambda: len(list(jobs.meeting.glob("worker-*"))) == 3, "the middle")
    copies = [Paths(host.home).job_copy(job) for host in (second, third)]
    wait_until(lambda: all(list(c.checkpoints.rglob("state.json")) for c in copies), "the copies")
    return jobs, job


def assert_went_on(cluster: Cluster, host: Host, job: str, undisturbed: tuple[set[str], Any]) -> None:
    """Assert that the job has gone on at a host, once, to the weights and ledger of an undisturbed one."""
    folder = Paths(host.home).job(job)
    log = Paths(host.home).head_log
    wait_until(
        lambda: log.exists() and f"{job} goes on here" in log.read_text(),
        "the job on another host",
        JOB_SECONDS,
    )
    wait_until(lambda: not is_locked(folder.controller), "the end of the job", JOB_SECONDS)
    output = folder.output.read_text()
    assert Journal(folder.journal).state().exit_code == 0, output
    assert "Training continues from the checkpoint of epoch" in output, output
    weights = {line.split("RESULT ")[1] for line in output.splitlines() if "] RESULT " in line}
    report = cluster.on(host, f"describe {job} --ledger --json").stdout
    assert (weights, read_ledger(report)) == undisturbed
    assert json.loads(report)["attempt"] == 2
    kept = read_environment(folder)
    assert (kept.variables["KERAS_BACKEND"], kept.variables["RATE"]) == ("jax", "3")
    assert kept.secrets == () and "A_TOKEN" not in kept.variables


def has_taken_over(host: Host) -> bool:
    return is_locked(Paths(host.home).head_lock)


def assert_says_who_took_over(cluster: Cluster, host: Host, before: str) -> None:
    """On the host of the new head, and on that of another agent."""
    wanted = f"host2 has taken over from the head at {before}, "
    listed = " ".join(cluster.on(host, "nodes").stderr.split())
    assert wanted in listed and "agents had been without a head for 30 s." in listed, listed
    log = Paths(cluster.lab.hosts[1].home).head_log.read_text()
    assert wanted in log


def test_the_host_of_head_supervisor_and_chief_loses_its_power_and_all_goes_on_by_itself(
    cluster: Cluster, tmp_path: Path, undisturbed: tuple[set[str], Any]
) -> None:
    first, second, third = cluster.lab.hosts
    jobs, job = start_job(cluster, tmp_path)
    before = read_head(Paths(first.home))
    assert before is not None
    first.kill()
    jobs.let_go()
    assert_went_on(cluster, second, job, undisturbed)
    for host in (second, third):
        assert_says_who_took_over(cluster, host, before.address)
    assert not has_taken_over(third) and list(Paths(third.home).jobs.iterdir()) == []
    # What else there is to do is done there, too.
    assert cluster.on(second, "delete --yes images").returncode == 0
    taken = read_head(Paths(second.home))
    assert taken is not None and taken.take_over_after == 30.0
    cluster.on(second, "down")


@pytest.mark.slow
def test_a_head_that_was_cut_off_ends_and_its_job_has_gone_on_once(
    cluster: Cluster, tmp_path: Path, undisturbed: tuple[set[str], Any]
) -> None:
    """The host of the head has an agent and a worker of its own, which could go on alone."""
    first, second, third = cluster.lab.hosts
    jobs, job = start_job(cluster, tmp_path)
    before = read_head(Paths(first.home))
    assert before is not None
    first.cut()
    wait_until(lambda: has_taken_over(second), "another head", JOB_SECONDS)
    # The job here has ended before, although nobody could say so.
    assert not is_locked(Paths(first.home).job(job).controller)
    wait_until(lambda: count_tasks(first) == 1, "the end of all but the head")
    assert "too few agents for 15 s" in Paths(first.home).job(job).output.read_text()
    jobs.let_go()
    assert_went_on(cluster, second, job, undisturbed)
    first.heal()
    first.wait_for_link()
    wait_until(lambda: not has_taken_over(first), "the end of the head of before")

    def has_joined() -> bool:
        listed = json.loads(cluster.on(second, "nodes --json").stdout)
        return [each["state"] for each in listed] == ["alive"] * 3

    wait_until(has_joined, "the return of the agent", JOB_SECONDS)
    taken = read_head(Paths(second.home))
    assert taken is not None and before.epoch < taken.epoch
    homes = {"host1": first.disk / "agent", "host2": second.home, "host3": third.home}
    for name, home in homes.items():
        record = read_agent(Paths(home), NodeId(name))
        assert record is not None and record.head == taken.address, name
    # Nothing is started there any more.
    launcher = f"--launcher 'env HOST={{host}} sh -c' --insitu '{INSITU}'"
    again = cluster.on(first, f"up --hosts {cluster.file} {launcher}")
    assert again.returncode == 2 and f"the one at {taken.address} has taken over" in " ".join(
        again.stderr.split()
    )
    assert f"{taken.address} has taken over" in " ".join(cluster.on(first, "nodes").stderr.split())
    output = Paths(first.home).job(job).output.read_text()
    assert "] RESULT " not in output and json.loads(cluster.on(first, f"describe {job} --json").stdout)[
        "state"
    ] == ("failed")
    cluster.on(second, "down")
