"""Has jobs follow their objects: a job stops if they are deleted, and pauses if its queue suspends them.

The head's process asks again and again; nothing is kept but a mark in the folder of a paused job.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from insitu.base.errors import InsituError
from insitu.base.paths import JobPaths, Paths
from insitu.extensions.kubernetes.client import Client
from insitu.extensions.kubernetes.job_pods import is_over, is_suspended, name_of_job
from insitu.extensions.kubernetes.job_starter import list_objects
from insitu.extensions.kubernetes.objects import Object

logger = logging.getLogger("insitu")
_LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class WatchedJob:
    """A job with pods, as the head's home has it."""

    #: Whether its supervisor lives.
    is_running: bool
    #: Whether tasks were launched in this attempt.
    has_begun: bool
    #: Whether it has ended, and could resume.
    has_ended: bool
    #: Whether it was stopped since its queue took its pods away.
    is_paused: bool


Step = Literal["", "stop", "end", "pause", "resume", "forget"]
_SAID = {
    "pause": "the queue has suspended {}: the job pauses",
    "end": "{} has failed in Kubernetes: the job is stopped",
    "stop": "{} was deleted in Kubernetes: the job is stopped",
    "resume": "the queue has admitted {} again",
}


def decide_step(job: WatchedJob, objects: Sequence[Object], *, had_objects: bool) -> Step:
    """Return what follows for a job from its JobSet, or its Jobs. `had_objects`: some were there while it
    ran, or was paused. Pure."""
    if not objects:
        if job.is_paused:
            return "forget"
        return "stop" if job.is_running and job.has_begun and had_objects else ""
    if is_suspended(objects):
        return "pause" if job.is_running and job.has_begun and not job.is_paused else ""
    if is_over(objects) and job.is_running and job.has_begun:
        return "end"
    return "resume" if job.is_paused and job.has_ended and not job.is_running else ""


class JobWatch:
    """Asks for the objects of this home's jobs, in a thread of the head."""

    def __init__(self, paths: Paths, client: Client) -> None:
        self._paths, self._client = paths, client
        #: Why it couldn't ask, as it was logged last.
        self._said = ""
        #: The jobs that have had objects. Those that resume after `insitu k8s down` have none at first.
        self._seen: set[str] = set()
        #: The threads that do what follows for jobs, by their ids.
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
        self._acting = {name: thread for name, thread in self._acting.items() if thread.is_alive()}
        found = list_objects(self._client) if self._list_jobs() else {}
        jobs = self._list_jobs()  # after their objects, which end once a job is over
        self._seen = jobs.keys() & (self._seen | found.keys())
        for name, watched in jobs.items():
            if name in self._acting:
                continue
            if step := decide_step(watched, found.get(name, ()), had_objects=name in self._seen):
                # A stop takes as long as tasks take to end, and others don't wait for it.
                thread = threading.Thread(target=self._do, args=(step, self._paths.job(name)), daemon=True)
                self._acting[name] = thread
                thread.start()

    def _list_jobs(self) -> dict[str, WatchedJob]:
        """Return the jobs with pods that run or are paused, by their ids."""
        from insitu.cluster import list_job_ids

        found = {}
        for name in list_job_ids(self._paths):
            try:
                if (watched := self._read(self._paths.job(name))) is not None:
                    found[name] = watched
            except InsituError as error:
                logger.warning("%s can't be read: %s", name, error)
        return found

    def _read(self, job: JobPaths) -> WatchedJob | None:
        """Return a job with pods; None for one that neither runs nor is paused, and for others."""
        from insitu.cluster import ENDED, Journal, is_running, read_spec

        runs, paused = is_running(job), job.paused.exists()
        # Most jobs of a home have ended long ago: nothing else of them is read.
        if not (runs or paused) or read_spec(job).starter != "k8s":
            return None
        state = Journal(job.journal).state()
        return WatchedJob(
            runs,
            # A job that resumes has no objects yet, or those of its last attempt.
            state.phase not in (*ENDED, "pending") and any(task.incarnation > 0 for task in state.tasks),
            state.phase in ENDED and state.phase != "finished",
            paused,
        )

    def _do(self, step: Step, job: JobPaths) -> None:
        from insitu.cluster import MergedLog, end_job, resume_job

        if step == "pause":
            job.paused.touch()
        if step in _SAID:
            MergedLog(job).log(_SAID[step].format(name_of_job(job.root.name)))
        try:
            if step in ("pause", "stop", "end"):
                end_job(job, logger.warning, pauses=step == "pause")
            elif step == "resume":
                resume_job(job, only_paused=True)
            else:
                job.paused.unlink(missing_ok=True)
        except InsituError as error:
            logger.warning("%s: %s: %s", job.root.name, step, error)
