"""The head's host is lost or cut off, and a person replaces the head, or etcd elects another. Run by `make
test-hosts`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from agent_hosts import INSITU, insitu, wait_until
from etcd_servers import needs_etcd
from host_cluster import LOCALLY, Cluster, start_etcd
from host_jobs import (
    IMPORT_OPTIONS,
    JOB_SECONDS,
    HostJobs,
    make_images,
    read_ledger,
    run_undisturbed_on_images,
)
from hosts_lab import Host

from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.job_files import Journal, is_locked
from insitu.cluster.wire.records import HeadRecord, read_agent, read_head
from insitu.grid import Catalog

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], Any]:
    """The weights and the ledger of the same job on one machine."""
    return run_undisturbed_on_images(tmp_path_factory.mktemp("alone"), 3)


def start_job(cluster: Cluster, folder: Path, *options: str) -> tuple[HostJobs, str, HeadRecord]:
    """Bring up a head on the first host, with agents on all, and start a job there with a worker on each.
    Returns when all are in the middle, and hosts keep copies. `options` are those of `insitu up`."""
    first, second, third = cluster.lab.hosts
    cluster.write_hosts(f"{first.address} name=host1 home={first.disk / 'agent'}")
    brought = cluster.on(first, f"up --hosts {cluster.file} {LOCALLY} {' '.join(options)}")
    assert brought.returncode == 0, brought.stderr
    head = read_head(Paths(first.home))
    assert head is not None
    for host in (second, third):
        token = Paths(first.home).token
        joined = cluster.run_on(
            host, f"{INSITU} agent --detach --token-stdin --head {head.address} < {token}"
        )
        assert joined.returncode == 0, joined.stderr
    imported = cluster.on(first, f"import images {make_images(folder / 'images')} {' '.join(IMPORT_OPTIONS)}")
    assert imported.returncode == 0, imported.stderr
    jobs = HostJobs(first.home, folder / "job")
    layout = f"--workers 3 --threads 1 --standby 0 images {jobs.code} train.py {jobs.meeting}"
    started = cluster.run_on(
        first,
        f"KERAS_BACKEND=jax NO_COLOR=1 RATE=3 {INSITU} start --detach {layout}",
    )
    assert started.returncode == 0, started.stderr
    job = started.stdout.strip()
    wait_until(lambda: len(list(jobs.meeting.glob("worker-*"))) == 3, "the middle")
    copies = [Paths(host.home).job_copy(job) for host in (second, third)]
    wait_until(lambda: all(list(c.checkpoints.rglob("state.json")) for c in copies), "the copies")
    return jobs, job, head


def replace_head(cluster: Cluster, job: str, before: HeadRecord) -> HeadRecord:
    """Replace the head from beside the hosts, whose agents but the first one's are reached, and rebuild the
    catalogue from what they hold."""
    _, second, third = cluster.lab.hosts
    cluster.write_hosts(second.address, third.address)
    cluster.head.mkdir()
    shutil.copy(Paths(second.home).token, Paths(cluster.head).token)
    said = cluster.up("--replace-head")
    assert "2 of 2 hosts up" in said and f"Hosts keep a copy of {job}" in said, said
    taken = read_head(Paths(cluster.head))
    assert taken is not None and taken.cluster == before.cluster and taken.epoch > before.epoch + 1000
    for host in (second, third):
        record = read_agent(Paths(host.home), NodeId(host.name))
        assert record is not None and (record.head, record.epoch) == (taken.address, taken.epoch)
    assert f"has replaced the one at {before.address}" in " ".join(
        insitu(cluster.head, "nodes").stderr.split()
    )
    assert Catalog(Paths(cluster.head)).caches() == []
    insitu(cluster.head, "repair")
    verified = insitu(cluster.head, "describe", "images", "--verify", code=None).stdout
    assert "damaged" not in verified and "verified" in verified, verified
    return taken


def assert_goes_on(cluster: Cluster, job: str, undisturbed: tuple[set[str], Any]) -> None:
    """Assert that the job continues beside the hosts, to the weights and the ledger of an undisturbed one."""
    resumed = insitu(cluster.head, "resume", job, KERAS_BACKEND="tensorflow", code=None)
    assert resumed.returncode == 0, Paths(cluster.head).job(job).output.read_text()
    assert_went_on(cluster, job, undisturbed)


def assert_went_on(cluster: Cluster, job: str, undisturbed: tuple[set[str], Any]) -> None:
    """Assert that a job has continued in the head's home to its end."""
    output = Paths(cluster.head).job(job).output.read_text()
    assert "Training continues from the checkpoint of epoch" in output, output
    weights = {line.split("RESULT ")[1] for line in output.splitlines() if "] RESULT " in line}
    report = insitu(cluster.head, "describe", job, "--ledger", "--json").stdout
    assert (weights, read_ledger(report)) == undisturbed
    assert json.loads(report)["attempt"] == 2


def assert_replaced(cluster: Cluster, first: Host, taken: HeadRecord) -> None:
    """Assert that the head of before ends, which hears of the other one, and changes nothing any more."""
    paths = Paths(first.home)
    wait_until(lambda: not is_locked(paths.head_lock), "the end of the head of before", JOB_SECONDS)
    assert f"the head at {taken.address} has replaced this one" in paths.head_log.read_text()
    wait_until(lambda: cluster.nodes().get("host1", {}).get("state") == "alive", "its agent", JOB_SECONDS)
    record = read_agent(Paths(first.disk / "agent"), NodeId("host1"))
    assert record is not None and record.head == taken.address
    said = f"{taken.address} has replaced the one of this home"
    assert said in " ".join(cluster.on(first, "nodes").stderr.split())
    refused = cluster.on(first, "delete --yes images")
    assert refused.returncode != 0 and "The head alone changes the catalogue" in refused.stderr
    again = cluster.on(first, f"up --hosts {cluster.file} {LOCALLY}")
    assert again.returncode == 2 and f"the one at {taken.address} has replaced" in " ".join(
        again.stderr.split()
    )


def test_the_host_of_head_supervisor_and_chief_loses_its_power_and_the_head_is_replaced(
    cluster: Cluster, tmp_path: Path, undisturbed: tuple[set[str], Any]
) -> None:
    """What was imported is read on, the job continues with the same bits, and the head of before ends."""
    first = cluster.lab.hosts[0]
    jobs, job, before = start_job(cluster, tmp_path)
    first.kill()
    jobs.let_go()
    taken = replace_head(cluster, job, before)
    assert_goes_on(cluster, job, undisturbed)
    # The machine comes back, and so does what starts insitu there.
    first.start()
    first.wait_for_link()
    cluster.write_hosts(f"{first.address} name=host1 home={first.disk / 'agent'}")
    cluster.on(first, f"up --hosts {cluster.file} {LOCALLY}")
    assert_replaced(cluster, first, taken)


@needs_etcd
def test_etcd_elects_another_head_when_a_host_loses_its_power_with_head_and_supervisor(
    cluster: Cluster, tmp_path: Path, undisturbed: tuple[set[str], Any]
) -> None:
    """Nobody does anything: the job continues by itself. The host has a member of etcd and an agent, too."""
    first, *others = cluster.lab.hosts
    jobs, job, before = start_job(cluster, tmp_path, "--metadata", start_etcd(cluster))
    first.kill()
    jobs.let_go()

    def find_head() -> Host | None:
        for host in others:
            record = read_head(Paths(host.home))
            if record is not None and record.pid and record.epoch > before.epoch:
                return host
        return None

    host = wait_until(find_head, "another head")
    cluster.head = host.home
    assert "images" in [cache.name for cache in Catalog(Paths(host.home)).caches()]
    wait_until(
        lambda: all(cluster.nodes()[each.name]["state"] == "alive" for each in others), "agents", JOB_SECONDS
    )
    there = Paths(host.home).job(job)
    wait_until(
        lambda: there.spec.exists() and Journal(there.journal).state().phase == "finished",
        "the end of the job",
        JOB_SECONDS,
    )
    assert_went_on(cluster, job, undisturbed)
    # The machine comes back, and so does what starts insitu there.
    first.start()
    first.wait_for_link()
    again = cluster.on(first, f"up --hosts {cluster.file} {LOCALLY}")
    assert again.returncode == 1 and "A cluster has one head" in " ".join(again.stderr.split())


@pytest.mark.slow
def test_a_head_that_was_cut_off_ends_when_it_meets_the_one_that_has_replaced_it(
    cluster: Cluster, tmp_path: Path, undisturbed: tuple[set[str], Any]
) -> None:
    """The host of the head has an agent of its own, which continues with it until then."""
    first = cluster.lab.hosts[0]
    jobs, job, before = start_job(cluster, tmp_path)
    first.cut()
    taken = replace_head(cluster, job, before)
    jobs.let_go()
    assert_goes_on(cluster, job, undisturbed)
    assert is_locked(Paths(first.home).head_lock)
    record = read_agent(Paths(first.disk / "agent"), NodeId("host1"))
    assert record is not None and record.head == before.address
    first.heal()
    first.wait_for_link()
    assert_replaced(cluster, first, taken)
    wait_until(
        lambda: not is_locked(Paths(first.home).job(job).controller), "the end of the former supervisor"
    )
