"""The head's care for jobs whose supervisors are lost, if etcd holds the metadata: it starts others.

When it does so is decided in `decide/supervision.py`. `insitu resume` does it, in a process of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from insitu.base.errors import InsituError
from insitu.base.paths import HOME_ENV, Paths
from insitu.cluster.decide import Membership, Starts, SupervisedJob, choose_starts
from insitu.cluster.leases.job_leases import SUPERVISION, list_supervised
from insitu.cluster.wire import CLUSTER_ENV, TOKEN_FILE_ENV
from insitu.metadata import MetadataStore

logger = logging.getLogger("insitu")
RESUME_COMMAND = (sys.executable, "-P", "-m", "insitu", "resume")
_AGAIN_SECONDS = 1.0


class JobUpkeep:
    """A thread that follows the keys of jobs, and the processes that start supervisors."""

    def __init__(self, paths: Paths, store: MetadataStore, command: Sequence[str] = RESUME_COMMAND) -> None:
        self._paths, self._store, self._command = paths, store, command
        self._closing = threading.Event()
        #: The jobs that should run. Written by the thread.
        self._jobs: Mapping[str, SupervisedJob] = {}
        self._starts = Starts()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        threading.Thread(target=self._run, name="insitu-supervision", daemon=True).start()

    def close(self) -> None:
        """Start nothing any more. A start that has begun continues: etcd refuses it if it must."""
        self._closing.set()

    def advance(self, members: Membership, now: float) -> None:
        """Start what is due, without waiting. `now`: the monotonic clock."""
        for job_id, process in list(self._processes.items()):
            if process.poll() is not None:
                del self._processes[job_id]
                self._starts = self._starts.end(job_id, now, failed=process.returncode != 0)
        connected = {node for node, m in members.members.items() if m.connection is not None}
        expected = {node for node, m in members.members.items() if m.state in ("alive", "silent")}
        jobs = self._jobs
        self._starts, begun = choose_starts(self._starts, jobs, connected, expected, now)
        for job_id in begun:
            logger.warning("no supervisor holds the lease of %s, so one is started here", job_id)
            command = [*self._command, "--lost-at", str(jobs[job_id].revision), job_id]
            environment = {
                n: value for n, value in os.environ.items() if n not in (CLUSTER_ENV, TOKEN_FILE_ENV)
            }
            environment[HOME_ENV] = str(self._paths.home)
            try:
                self._processes[job_id] = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
            except OSError as error:
                logger.warning("no supervisor of %s can be started: %s", job_id, error)
                self._starts = self._starts.end(job_id, now, failed=True)

    def _run(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(InsituError, OSError):  # the head's lease says it if etcd doesn't answer
                self._jobs, revision = list_supervised(self._store)
                for changes in self._store.watch(SUPERVISION, revision):
                    if changes or self._closing.is_set():
                        break
                continue
            self._closing.wait(_AGAIN_SECONDS)
