"""Has jobs follow their objects: a job stops if they are deleted, and pauses if its queue suspends them.

The head's process asks again and again; nothing is kept but a mark in the folder of a paused job.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from insitu.base.errors import InsituError
from insitu.base.paths import JobPaths, Paths
from insitu.extensions.kubernetes.client import Client
from insitu.extensions.kubernetes.job_pods import is_suspended, name_of_job
from insitu.extensions.kubernetes.job_starter import list_objects
from insitu.extensions.kubernetes.objects import Object

logger = logging.getLogger("insitu")
_LOOK_SECONDS = 2.0
_PAUSED = "paused-by-queue"


@dataclass(frozen=True, slots=True)
class WatchedJob:
    """A job with pods, as the head's home has it."""

    #: Whether its supervisor lives.
    is_running: bool
    #: Whether tasks were launched in this attempt.
    has_begun: bool
    #: Whether it has ended, in any way.
    has_ended: bool
    #: Whether it was stopped since its queue took its pods away.
    is_paused: bool


Step = Literal["", "stop", "pause", "resume", "forget"]


def decide_step(job: WatchedJob, objects: Sequence[Object]) -> Step:
    """Return what follows for a job from its JobSet, or its Jobs. Pure."""
    if not objects:
        if job.is_paused:
            return "forget"
        return "stop" if job.is_running and job.has_begun else ""
    if is_suspended(objects):
        return "pause" if job.is_running and job.has_begun and not job.is_paused else ""
    return "resume" if job.is_paused and job.has_ended and not job.is_running else ""


class JobWatch:
    """Asks for the objects of this home's jobs, in a thread of the head."""

    def __init__(self, paths: Paths, client: Client) -> None:
        self._paths, self._client = paths, client
        #: Why it couldn't ask, as it was logged last.
        self._said = ""
        #: The threads that do what follows for jobs, by the names of their JobSets.
        self._acting: dict[str, threading.Thread] = {}

    def run(self, ending: threading.Event) -> None:
        """Look until the head ends. The API server may be away: jobs continue."""
        while not ending.wait(_LOOK_SECONDS):
            try:
                self.look()
                self._said = ""
            except (InsituError, OSError) as error:
                if str(error) != self._said:
                    self._said = str(error)
                    logger.warning("the pods of jobs can't be looked at: %s", error)

    def look(self) -> None:
        """Look once, and do what follows. Raises InsituError, OSError."""
        jobs = self._list_jobs()
        if not jobs:
            return
        found = list_objects(self._client)
        for job in jobs:
            name = job.root.name
            if name in self._acting and self._acting[name].is_alive():
                continue
            if step := decide_step(self._read(job), found.get(name, ())):
                # A stop takes as long as tasks take to end, and others don't wait for it.
                self._acting[name] = threading.Thread(target=self._do, args=(step, job), daemon=True)
                self._acting[name].start()

    def _list_jobs(self) -> list[JobPaths]:
        from insitu.cluster import list_job_ids, read_spec

        found = []
        for each in list_job_ids(self._paths):
            job = self._paths.job(each)
            try:
                watched = self._read(job)
                if (watched.is_running or watched.is_paused) and read_spec(job).starter == "k8s":
                    found.append(job)
            except InsituError as error:
                logger.warning("%s can't be read: %s", each, error)
        return found

    def _read(self, job: JobPaths) -> WatchedJob:
        from insitu.cluster import ENDED, Journal, is_running

        state = Journal(job.journal).state()
        return WatchedJob(
            is_running(job),
            # A job that resumes has no objects yet, or those of its last attempt.
            state.phase not in (*ENDED, "pending") and any(task.incarnation > 0 for task in state.tasks),
            state.phase in ENDED,
            (job.root / _PAUSED).exists(),
        )

    def _do(self, step: Step, job: JobPaths) -> None:
        from insitu.cluster import MergedLog

        name, paused = name_of_job(job.root.name), job.root / _PAUSED
        if step == "forget":
            paused.unlink(missing_ok=True)
            return
        if step == "pause":
            paused.touch()
            MergedLog(job).log(f"the queue has suspended {name}: the job pauses")
        elif step == "stop":
            MergedLog(job).log(f"{name} was deleted in Kubernetes: the job is stopped")
        elif step == "resume":
            MergedLog(job).log(f"the queue has admitted {name} again")
        arguments = ["resume", "--detach"] if step == "resume" else ["stop"]
        command = [sys.executable, "-P", "-m", "insitu", *arguments, job.root.name]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            logger.warning("%s: %s", job.root.name, " ".join(done.stderr.split()))
        elif step == "resume":
            paused.unlink(missing_ok=True)
