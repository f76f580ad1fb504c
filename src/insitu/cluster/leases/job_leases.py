"""Decides which process supervises a job on hosts, if etcd holds the metadata: it has its key, by a lease.

A job has a key from its start until it ends, or a user stops it. The next supervisor *claims* it: its term
grows in the transaction that takes the key of the supervisor. The decisions are in `decide/supervision.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from insitu.base.disk.access import PRIVATE_FILE
from insitu.base.disk.durable import replace_file
from insitu.base.errors import ClusterError, CorruptMetadata, InputError, InsituError, JobEnded, JobRunning
from insitu.base.paths import JobPaths, Paths
from insitu.base.process.processes import read_host
from insitu.cluster.decide import (
    JOB_LEASE_SECONDS,
    KEEP_SECONDS,
    Claim,
    SupervisedJob,
    count_seconds_left,
)
from insitu.cluster.job_files import MergedLog, read_spec
from insitu.cluster.leases.job_terms import begin_term, draw_term, encode_term, parse_term, read_term
from insitu.cluster.leases.leading import read_clock
from insitu.cluster.wire import HOSTS_ENGINE
from insitu.metadata import (
    Compare,
    Delete,
    MetadataStore,
    Put,
    Record,
    compare_found,
    open_etcd,
    read_settings,
)

logger = logging.getLogger("insitu")
SUPERVISION = "supervision/"
"""Prefix of the keys of jobs and supervisors."""
_RETRY_SECONDS = 0.5
_ALL = 1 << 30


def _job_key(job_id: str) -> str:
    return f"{SUPERVISION}{job_id}/job"


def _supervisor_key(job_id: str) -> str:
    return f"{SUPERVISION}{job_id}/supervisor"


@dataclass(frozen=True, slots=True)
class _Holder:
    """The value of both keys."""

    #: The term of the supervisor that has claimed the job last.
    term: Claim
    #: The host on which it was started.
    host: str

    def encode(self) -> bytes:
        return json.dumps({"term": encode_term(self.term), "host": self.host}).encode()


def _read_holder(record: Record | None) -> _Holder | None:
    if record is None:
        return None
    try:
        found = json.loads(record.value)
        return _Holder(parse_term(found["term"]), str(found["host"]))
    except (ValueError, KeyError, TypeError, ClusterError) as error:
        raise CorruptMetadata(
            f"The key {record.key} in etcd must say who supervises a job. Received: {record.value!r:.200} "
            f"({error}). Remove it by etcdctl, then `insitu resume`"
        ) from error


def list_supervised(store: MetadataStore) -> tuple[dict[str, SupervisedJob], int]:
    """Return the jobs that should run, and the revision at which that is so. Raises MetadataError."""
    records, revision = store.range(SUPERVISION, "", _ALL)
    found = {record.key: record.revision for record in records}
    jobs = [key.removeprefix(SUPERVISION).removesuffix("/job") for key in found if key.endswith("/job")]
    return {job: SupervisedJob(found[_job_key(job)], _supervisor_key(job) in found) for job in jobs}, revision


@contextlib.contextmanager
def _open_store(paths: Paths) -> Iterator[MetadataStore | None]:
    """Yield the store of a home whose metadata is in etcd, else None. Raises InputError, MetadataError."""
    settings = read_settings(paths)
    if settings is None:
        yield None
        return
    with contextlib.closing(open_etcd(settings)) as store:
        yield store


def _paths_of(job: JobPaths) -> Paths:
    return Paths(job.root.parent.parent)


# Before a supervisor runs


def claim_job(job: JobPaths, revision: int | None = None) -> None:
    """Take the key of a job's supervisor for the one that is about to be started, whose lock this process
    holds. It writes that, with its term and the secret of its tasks, into the job's folder.

    `revision`: that of the job's key, which must be unchanged. None: a user resumes it, or starts it. Does
    nothing for a job that isn't on hosts, or without etcd. Raises JobRunning if another supervisor may live,
    JobEnded if the job may not resume, MetadataError.
    """
    if read_spec(job).engine != HOSTS_ENGINE:
        return
    with _open_store(_paths_of(job)) as store:
        if store is not None:
            _claim(store, job, revision)


def _claim(store: MetadataStore, job: JobPaths, revision: int | None) -> None:
    job_id = job.root.name
    keys = _job_key(job_id), _supervisor_key(job_id)
    found, _ = store.get(keys)
    known, living = (_read_holder(found.get(key)) for key in keys)
    own = read_term(job.term)
    # One whose term this folder has is dead: it would hold the lock.
    if living is not None and living.term != own:
        raise _make_running(job_id, living)
    if revision is not None:
        _require_unchanged(found.get(keys[0]), job_id, revision)
    term = draw_term(max(own.number, 0 if known is None else known.term.number) + 1)
    begin_term(job, term)
    asked_at, value, lease = read_clock(), _Holder(term, read_host()).encode(), store.grant(JOB_LEASE_SECONDS)
    compare = compare_found(keys, found)
    outcome = store.transact(
        compare, [Put(keys[0], value), Put(keys[1], value, lease)], secrets.token_hex(16)
    )
    if not outcome.succeeded:
        store.revoke(lease)
        raise JobRunning(f"{job_id} was claimed, stopped or ended by another process just now. Try again")
    replace_file(job.lease, json.dumps([lease, value.decode(), asked_at]).encode(), mode=PRIVATE_FILE)


def _require_unchanged(record: Record | None, job_id: str, revision: int) -> None:
    if record is None or record.revision != revision:
        raise JobEnded(f"{job_id} was stopped or has ended, or another supervisor was started")


def check_lost(paths: Paths, job_id: str, revision: int) -> None:
    """Raise JobEnded unless a job's key is still that of `revision`, JobRunning if a supervisor keeps its
    lease; MetadataError."""
    with _open_store(paths) as store:
        found = {} if store is None else store.get([_job_key(job_id), _supervisor_key(job_id)])[0]
    _require_unchanged(found.get(_job_key(job_id)), job_id, revision)
    living = _read_holder(found.get(_supervisor_key(job_id)))
    if living is not None:
        raise _make_running(job_id, living)


def _make_running(job_id: str, holder: _Holder) -> JobRunning:
    return JobRunning(
        f"A job has one supervisor. Received: {job_id}, whose supervisor on {holder.host} keeps its lease. "
        f"Give the command there. If that machine is lost, the job continues by itself within seconds"
    )


def is_outdated(job: JobPaths) -> bool:
    """Return whether a job has resumed elsewhere since this folder was its supervisor's. Raises JobRunning if
    it runs there, MetadataError, ClusterError."""
    with _open_store(_paths_of(job)) as store:
        if store is None:
            return False
        keys = _job_key(job.root.name), _supervisor_key(job.root.name)
        found, _ = store.get(keys)
        known, living = (_read_holder(found.get(key)) for key in keys)
        own = read_term(job.term)
        if living is not None and living.term != own:
            raise _make_running(job.root.name, living)
        return known is not None and known.term != own and known.term.number >= own.number


def forget_job(paths: Paths, job_id: str) -> bool:
    """Have nobody start a supervisor of a job any more. Returns whether the head would have done so, once
    this home's one has died. Raises JobRunning if one of another home runs it, MetadataError."""
    with _open_store(paths) as store:
        if store is None:
            return False
        keys = _job_key(job_id), _supervisor_key(job_id)
        while True:
            found, _ = store.get(keys)
            living = _read_holder(found.get(keys[1]))
            if living is not None and living.term != read_term(paths.job(job_id).term):
                raise _make_running(job_id, living)
            if keys[0] not in found:
                return False
            compare = compare_found(keys, found)
            if store.transact(compare, [Delete(keys[0])], secrets.token_hex(16)).succeeded:
                return True


# While it runs


class JobLease:
    """The lease of a supervisor, in its own process. A thread keeps it until `end`.

    If it isn't kept in time the system kills the process, by a timer, and its tasks end with it. So one that
    was suspended does nothing any more.
    """

    def __init__(
        self, store: MetadataStore, job: JobPaths, lease: int, value: bytes, asked_at: float
    ) -> None:
        """`value`: of the supervisor's key, which names its term. `asked_at`: when the lease was asked for,
        on `read_clock`."""
        self._store, self._job, self._lease, self._value = store, job, lease, value
        #: Set once nobody starts a supervisor of this job any more.
        self._ended = threading.Event()
        self._lock = threading.Lock()
        #: True: `end` is removing the keys.
        self._is_ending = False
        self._has_warned = False
        #: When what kept the lease last was asked for. Written under the lock.
        self._asked_at = asked_at
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self._set_timer(asked_at)
        threading.Thread(target=self._run, name="insitu-lease", daemon=True).start()
        threading.Thread(target=self._follow_clock, name="insitu-lease-clock", daemon=True).start()

    def _follow_clock(self) -> None:
        """Set the timer again and again: it stands still while the machine is suspended."""
        while not self._ended.wait(KEEP_SECONDS):
            self._set_timer(0.0)

    def _set_timer(self, asked_at: float) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._asked_at = max(self._asked_at, asked_at)
                # A timer of 0 would be none.
                left = count_seconds_left(self._asked_at, read_clock())
                signal.setitimer(signal.ITIMER_REAL, left + 1e-3)

    def _run(self) -> None:
        pause = 0.0
        while not self._ended.wait(pause):
            pause, asked_at = KEEP_SECONDS, read_clock()
            try:
                if self._store.keep(self._lease) and self._has_key():
                    self._set_timer(asked_at)
                elif not self._is_ending:
                    self._give_up()
            except InsituError as error:
                if self._ended.is_set():
                    return
                pause = _RETRY_SECONDS
                self._warn(f"etcd doesn't keep the lease of the job's supervisor, which ends soon: {error}")

    def _has_key(self) -> bool:
        key = _supervisor_key(self._job.root.name)
        found, _ = self._store.get([key])
        return key in found and found[key].value == self._value

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            # A disk that hangs keeps nobody from ending.
            threading.Thread(target=MergedLog(self._job).log, args=(text,), daemon=True).start()

    def _give_up(self) -> None:
        logger.warning("%s: the lease of this supervisor has ended, and so it ends", self._job.root.name)
        os.kill(os.getpid(), signal.SIGKILL)

    def end(self) -> None:
        """Have the metadata know that the job is over. If etcd doesn't answer the timer ends the process."""
        self._is_ending = True
        keys = [_supervisor_key(self._job.root.name), _job_key(self._job.root.name)]
        change = secrets.token_hex(16)
        while not self._ended.is_set():
            try:
                compare = [Compare(keys[0], value=self._value)]
                outcome = self._store.transact(compare, [Delete(key) for key in keys], change)
            except InsituError:
                self._ended.wait(_RETRY_SECONDS)
                continue
            if not outcome.succeeded:
                self._give_up()
            with self._lock:
                self._ended.set()
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            with contextlib.suppress(InsituError):
                self._store.revoke(self._lease)
            self._store.close()


def keep_lease(job: JobPaths) -> JobLease | None:
    """Keep the lease with which this job was claimed; None: it needs none. Raises InsituError."""
    try:
        lease, value, asked_at = json.loads(job.lease.read_text())
    except FileNotFoundError:
        return None
    settings = read_settings(_paths_of(job))
    if settings is None:
        raise InputError(f"{job.lease} is for a cluster whose metadata is in etcd. Received: one without it")
    return JobLease(open_etcd(settings), job, lease, value.encode(), asked_at)
