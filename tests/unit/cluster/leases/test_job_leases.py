"""How a job is claimed, kept and let go, in an embedded store whose clock the test moves."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from insitu.base.errors import CorruptMetadata, JobEnded, JobRunning
from insitu.base.paths import JobPaths, Paths
from insitu.cluster.decide import JOB_LEASE_SECONDS, SupervisedJob
from insitu.cluster.leases import job_leases
from insitu.cluster.leases.job_leases import (
    check_lost,
    claim_job,
    forget_job,
    is_outdated,
    keep_lease,
    list_supervised,
)
from insitu.cluster.leases.job_terms import read_term
from insitu.metadata import MetadataStore, Put, Record
from insitu.metadata.embedded import EmbeddedStore


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedStore]:
    """The store of all homes of the test."""
    made = EmbeddedStore(tmp_path / "x.sqlite", "c", create=True, clock=clock)

    @contextlib.contextmanager
    def open_store(paths: Paths) -> Iterator[MetadataStore]:
        yield made

    monkeypatch.setattr(job_leases, "_open_store", open_store)
    monkeypatch.setattr(job_leases, "read_spec", lambda job: SimpleNamespace(engine="hosts"))
    yield made
    made.close()


def make_job(home: Path) -> JobPaths:
    job = Paths(home).job("images-1")
    job.root.mkdir(parents=True)
    return job


def find_job(store: EmbeddedStore) -> SupervisedJob:
    return list_supervised(store)[0]["images-1"]


def test_a_job_has_one_supervisor_and_each_has_a_higher_term_and_another_secret(
    tmp_path: Path, store: EmbeddedStore, clock: Clock
) -> None:
    first, second = make_job(tmp_path / "one"), make_job(tmp_path / "two")
    claim_job(first)
    assert read_term(first.term).number == 1 and find_job(store).is_held
    for refused in (lambda: claim_job(second), lambda: is_outdated(second)):
        with pytest.raises(JobRunning, match="A job has one supervisor"):
            refused()
    assert not second.term.exists() and not is_outdated(first)
    clock.now += JOB_LEASE_SECONDS
    lost = find_job(store)
    check_lost(Paths(tmp_path), "images-1", lost.revision)
    assert not lost.is_held and is_outdated(second)
    claim_job(second, lost.revision)
    with pytest.raises(JobEnded, match="another supervisor was started"):
        check_lost(Paths(tmp_path), "images-1", lost.revision)
    with pytest.raises(JobRunning, match="A job has one supervisor"):
        check_lost(Paths(tmp_path), "images-1", find_job(store).revision)
    assert read_term(second.term).number == 2 and first.secret.read_bytes() != second.secret.read_bytes()
    assert second.secret.stat().st_mode & 0o777 == 0o600 and len(second.secret.read_bytes()) == 32
    clock.now += JOB_LEASE_SECONDS
    assert is_outdated(first) and not is_outdated(second)


def test_who_holds_the_lock_of_a_supervisor_need_not_wait_for_its_lease(
    tmp_path: Path, store: EmbeddedStore, clock: Clock
) -> None:
    job = make_job(tmp_path)
    job.secret.write_bytes(b"first")
    claim_job(job)
    claim_job(job)
    assert read_term(job.term).number == 2
    assert job.signing_secret.read_bytes() == b"first"  # of checkpoints
    clock.now += JOB_LEASE_SECONDS
    assert not find_job(store).is_held


def test_a_job_that_was_stopped_or_claimed_meanwhile_is_left_alone(
    tmp_path: Path, store: EmbeddedStore, clock: Clock
) -> None:
    job, other = make_job(tmp_path / "one"), make_job(tmp_path / "two")
    claim_job(job)
    before = find_job(store)
    clock.now += JOB_LEASE_SECONDS
    claim_job(other)
    clock.now += JOB_LEASE_SECONDS
    with pytest.raises(JobEnded, match="another supervisor was started"):
        claim_job(job, before.revision)
    seen = find_job(store)
    assert forget_job(Paths(tmp_path), "images-1") and not forget_job(Paths(tmp_path), "images-1")
    assert list_supervised(store)[0] == {}
    with pytest.raises(JobEnded, match="was stopped"):
        claim_job(job, seen.revision)
    claim_job(job)  # a user has it continue
    for elsewhere in (tmp_path, tmp_path / "two"):  # without a folder of it, and with an old one
        with pytest.raises(JobRunning, match="Give the command there"):
            forget_job(Paths(elsewhere), "images-1")
    assert find_job(store).is_held and forget_job(Paths(tmp_path / "one"), "images-1")


def test_of_two_that_claim_at_once_one_does(
    tmp_path: Path, store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, other = make_job(tmp_path / "one"), make_job(tmp_path / "two")
    grant = store.grant

    def grant_late(seconds: float) -> int:
        monkeypatch.setattr(store, "grant", grant)
        claim_job(other)
        return grant(seconds)

    monkeypatch.setattr(store, "grant", grant_late)
    with pytest.raises(JobRunning, match="by another process just now"):
        claim_job(job)
    assert not job.lease.exists() and other.lease.stat().st_mode & 0o777 == 0o600


def test_a_job_that_is_claimed_while_another_home_stops_it_is_still_supervised(
    tmp_path: Path, store: EmbeddedStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path / "one")
    claim_job(job)
    clock.now += JOB_LEASE_SECONDS
    get = store.get

    def get_and_claim(keys: Sequence[str]) -> tuple[dict[str, Record], int]:
        monkeypatch.setattr(store, "get", get)
        found = get(keys)
        claim_job(job)
        return found

    monkeypatch.setattr(store, "get", get_and_claim)
    with pytest.raises(JobRunning, match="Give the command there"):
        forget_job(Paths(tmp_path / "two"), "images-1")
    assert find_job(store).is_held


def test_jobs_of_one_machine_and_homes_without_etcd_have_no_leases(
    tmp_path: Path, store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path)
    monkeypatch.setattr(job_leases, "read_spec", lambda job: SimpleNamespace(engine="local"))
    claim_job(job)
    monkeypatch.undo()
    monkeypatch.setattr(job_leases, "read_spec", lambda job: SimpleNamespace(engine="hosts"))
    claim_job(job)
    assert not job.term.exists() and not job.lease.exists() and keep_lease(job) is None
    assert not is_outdated(job) and not forget_job(Paths(tmp_path), "images-1")


def test_a_key_that_nobody_can_read_is_an_error(tmp_path: Path, store: EmbeddedStore) -> None:
    job = make_job(tmp_path)
    store.transact([], [Put("supervision/images-1/job", b"{}")], "1" * 32)
    with pytest.raises(CorruptMetadata, match="must say who supervises a job"):
        claim_job(job)


SUPERVISOR = """
import sys, time
from pathlib import Path
from insitu.cluster.leases import job_leases
from insitu.cluster.leases.leading import read_clock
from insitu.base.errors import StoreUnavailable
from insitu.metadata.embedded import EmbeddedStore
from insitu.base.paths import JobPaths

job, (lease, value, age, kind) = JobPaths(Path(sys.argv[2])), sys.argv[3:]
class Silent(EmbeddedStore):
    def keep(self, lease):
        raise StoreUnavailable("no answer")
store = (Silent if kind in ("silent", "late", "suspended") else EmbeddedStore)(Path(sys.argv[1]), "c")
job_leases.KEEP_SECONDS = 0.01
jump, clock = [0.0], job_leases.read_clock
job_leases.read_clock = lambda: clock() + jump[0]
held = job_leases.JobLease(store, job, int(lease), value.encode(), read_clock() - float(age))
if kind == "suspended":  # its machine wakes: timers stood still, the clock didn't
    jump[0] = 1000.0
    time.sleep(5)
    sys.exit(9)
time.sleep(1)
if kind == "ends":
    held.end()
    sys.exit(7)
time.sleep(0 if kind == "kept" else 60)
sys.exit(8)
"""


@pytest.mark.parametrize(
    ("kind", "age", "code"),
    [
        ("kept", 6.5, 8),  # the timer is set anew
        ("ends", 0.0, 7),
        ("silent", 6.5, -signal.SIGALRM),
        ("late", 1000.0, -signal.SIGALRM),
        ("suspended", 0.0, -signal.SIGALRM),
        ("lost", 0.0, -signal.SIGKILL),
    ],
)
def test_a_supervisor_goes_on_as_long_as_its_lease(tmp_path: Path, kind: str, age: float, code: int) -> None:
    job = make_job(tmp_path)
    path = tmp_path / "x.sqlite"
    with contextlib.closing(EmbeddedStore(path, "c", create=True)) as store:
        lease = store.grant(JOB_LEASE_SECONDS)
        keys = [Put(f"supervision/images-1/{name}", b"{}", lease) for name in ("job", "supervisor")]
        store.transact([], keys, "1" * 32)
        given = [str(each) for each in (path, job.root, lease, "[]" if kind == "lost" else "{}", age, kind)]
        ended = subprocess.run([sys.executable, "-c", SUPERVISOR, *given], timeout=60)
        assert ended.returncode == code
        assert (store.range("supervision/")[0] == []) == (kind == "ends")
    if kind == "silent":
        assert "etcd doesn't keep the lease" in job.output.read_text()


def test_what_a_claim_writes_is_what_a_supervisor_reads(
    tmp_path: Path, store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path)
    claim_job(job)
    given: list[object] = []
    monkeypatch.setattr(job_leases, "read_settings", lambda paths: "settings")
    monkeypatch.setattr(job_leases, "open_etcd", lambda settings: store)
    monkeypatch.setattr(job_leases, "JobLease", lambda *each: given.extend(each))
    keep_lease(job)
    lease, value, asked_at = json.loads(job.lease.read_text())
    assert given == [store, job, lease, value.encode(), asked_at] and store.keep(lease)
    assert store.get(["supervision/images-1/supervisor"])[0].popitem()[1].value == value.encode()
