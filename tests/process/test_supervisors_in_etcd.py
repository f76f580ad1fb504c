"""Supervisors that hold leases in a real etcd: jobs continue by themselves, as processes on the loopback
interface."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_hosts import insitu, is_running, wait_until
from etcd_hosts import EtcdHosts
from etcd_servers import needs_etcd
from host_jobs import (
    IMPORT_OPTIONS,
    JOB_SECONDS,
    HostJobs,
    make_images,
    read_ledger,
    run_undisturbed_on_images,
)

from insitu.base.paths import Paths
from insitu.cluster.job_files import Journal, is_locked, read_supervisor
from insitu.cluster.leases.job_leases import SUPERVISION, list_supervised
from insitu.cluster.wire.records import HeadRecord
from insitu.metadata import open_etcd, read_settings

pytestmark = [needs_etcd, pytest.mark.long, pytest.mark.timeout(600)]
WORKERS = 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], Any]:
    """The weights and the ledger of the same job on one machine."""
    return run_undisturbed_on_images(tmp_path_factory.mktemp("alone"), WORKERS)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[EtcdHosts]:
    with contextlib.closing(EtcdHosts(tmp_path, ("a", "b"))) as found:
        yield found


class Supervised:
    """A job in its middle, of which hosts keep copies, and its first supervisor."""

    def __init__(self, hosts: EtcdHosts, folder: Path) -> None:
        self.hosts = hosts
        self.head: HeadRecord = hosts.begin()
        insitu(hosts.head, "import", "images", str(make_images(folder / "images")), *IMPORT_OPTIONS)
        self.jobs = HostJobs(hosts.head, folder / "job")
        self.id = self.jobs.start(workers=WORKERS, cache="images")
        self.jobs.wait_in_the_middle(self.id, WORKERS)
        copies = [Paths(home).job_copy(self.id) for home in hosts.homes.values()]
        wait_until(lambda: all(list(c.checkpoints.rglob("state.json")) for c in copies), "the copies")
        self.job = Paths(hosts.head).job(self.id)
        found = wait_until(lambda: read_supervisor(self.job.controller), "the supervisor")
        self.supervisor: int = found.pid

    def wait_for_end(self, *homes: Path) -> Path:
        """Return that of the homes in which the job finishes."""

        wait_until(lambda: self.list_jobs() == {}, "the end of the job", JOB_SECONDS)
        jobs = {home: Paths(home).job(self.id) for home in homes if Paths(home).job(self.id).spec.exists()}
        wait_until(
            lambda: not any(is_locked(job.controller) for job in jobs.values()), "its supervisor's end"
        )
        phases = {home: Journal(job.journal).state().phase for home, job in jobs.items()}
        assert "finished" in phases.values(), [job.output.read_text() for job in jobs.values()]
        return next(home for home, phase in phases.items() if phase == "finished")

    def list_jobs(self) -> dict[str, Any]:
        settings = read_settings(Paths(self.hosts.head))
        assert settings is not None
        with contextlib.closing(open_etcd(settings)) as store:
            return list_supervised(store)[0]

    def read_claims(self) -> list[bool]:
        """Return what has become of the supervisor's key, in order: True if one took it, False if it went."""
        settings = read_settings(Paths(self.hosts.head))
        assert settings is not None
        with contextlib.closing(open_etcd(settings)) as store:
            changes = list[bool]()
            for each in store.watch(f"{SUPERVISION}{self.id}/supervisor", 1):
                if not each:
                    return changes
                changes += [change.value is not None for change in each]
        raise AssertionError

    def read_result(self, home: Path) -> tuple[set[str], Any]:
        lines = Paths(home).job(self.id).output.read_text().splitlines()
        report = insitu(home, "describe", self.id, "--ledger", "--json").stdout
        return {line.split("RESULT ")[1] for line in lines if "] RESULT " in line}, read_ledger(report)


def test_a_job_goes_on_by_itself_after_head_and_supervisor_are_killed_together(
    hosts: EtcdHosts, tmp_path: Path, undisturbed: tuple[set[str], Any]
) -> None:
    supervised = Supervised(hosts, tmp_path)
    os.kill(supervised.head.pid, signal.SIGKILL)
    os.kill(supervised.supervisor, signal.SIGKILL)
    supervised.jobs.let_go()
    home = supervised.wait_for_end(*hosts.homes.values())
    assert supervised.read_result(home) == undisturbed
    assert "brought to this machine from the copy" in Paths(home).job(supervised.id).output.read_text()
    assert supervised.read_claims() == [True, False, True, False]


@pytest.mark.slow
def test_a_supervisor_ends_while_etcd_is_silent_and_its_job_goes_on_when_it_answers(
    hosts: EtcdHosts, tmp_path: Path, undisturbed: tuple[set[str], Any]
) -> None:
    supervised = Supervised(hosts, tmp_path)
    hosts.etcd.silence(0)
    wait_until(lambda: not is_running(supervised.supervisor), "the end of the supervisor")
    supervised.jobs.let_go()
    hosts.etcd.resume(0)
    home = supervised.wait_for_end(hosts.head, *hosts.homes.values())
    assert supervised.read_result(home) == undisturbed
    assert supervised.read_claims() == [True, False, True, False]
    said = supervised.job.output.read_text()
    assert "etcd doesn't keep the lease of the job's supervisor, which ends soon" in said


@pytest.mark.slow
def test_a_supervisor_that_hangs_with_the_head_dies_when_it_wakes_and_another_has_its_job(
    hosts: EtcdHosts, tmp_path: Path, undisturbed: tuple[set[str], Any]
) -> None:
    supervised = Supervised(hosts, tmp_path)
    for process in (supervised.head.pid, supervised.supervisor):
        os.kill(process, signal.SIGSTOP)
    supervised.jobs.let_go()  # its tasks continue until the next supervisor ends them
    home = supervised.wait_for_end(*hosts.homes.values())
    assert supervised.read_result(home) == undisturbed
    assert supervised.read_claims() == [True, False, True, False]
    before = Journal(supervised.job.journal).last_sequence(), supervised.job.output.read_bytes()
    for process in (supervised.supervisor, supervised.head.pid):
        os.kill(process, signal.SIGCONT)
    wait_until(lambda: not is_running(supervised.supervisor), "the end of the supervisor of before")
    assert (Journal(supervised.job.journal).last_sequence(), supervised.job.output.read_bytes()) == before


@pytest.mark.slow
def test_a_supervisor_alone_hangs_and_a_job_that_was_stopped_stays_so(
    hosts: EtcdHosts, tmp_path: Path, undisturbed: tuple[set[str], Any]
) -> None:
    supervised = Supervised(hosts, tmp_path)
    os.kill(supervised.supervisor, signal.SIGSTOP)
    supervised.jobs.let_go()
    home = supervised.wait_for_end(hosts.head)
    assert supervised.read_result(home) == undisturbed and not is_running(supervised.supervisor)
    # That of another one is killed, and the job is stopped before another supervisor comes.
    supervised.jobs.meeting.joinpath("go").unlink()
    job = supervised.jobs.start(workers=1)
    supervised.jobs.wait_in_the_middle(job, WORKERS)
    supervised.jobs.kill_supervisor(job)
    insitu(hosts.head, "stop", job)
    assert supervised.list_jobs() == {}
    assert supervised.jobs.describe(job)["state"] == "failed"
