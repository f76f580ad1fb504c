"""Has rows of Ignite read again for the epochs that the tasks of a job on hosts come to.

A process of its own does that, see `refresh_reading.py`: the supervisor loads no library that moves bytes.
It inherits the environment of `insitu start` or `insitu resume`, in which credentials are.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from insitu.cluster.job_files import read_placement, read_spec
from insitu.grid import Refresh, find_refreshing_epoch, read_refreshes, record_failed_refresh
from insitu.paths import JobPaths

READ_COMMAND = (sys.executable, "-P", "-m", "insitu.cluster.agents.refresh_reading")


class JobRefreshes:
    """Reads for one epoch at a time. An epoch whose rows can't be read has those of the one before."""

    def __init__(self, job: JobPaths, command: Sequence[str] = READ_COMMAND) -> None:
        self._job = job
        self._command = command
        self._every = read_spec(job).refresh
        self._wanted: set[int] = set()
        #: What is under way: the epoch, and the process.
        self._reading: tuple[int, subprocess.Popen[bytes]] | None = None

    def note_wanted(self, epoch: int) -> None:
        """Note that tasks wait for the rows of an epoch. One at which nothing is read is ignored."""
        if epoch and self._every and find_refreshing_epoch(epoch, self._every) == epoch:
            self._wanted.add(epoch)

    def take_done(self) -> list[Refresh]:
        """Return what is known of epochs that tasks wait for, and go on with the others. Doesn't wait.

        Raises GridError.
        """
        if not self._wanted or (self._reading is not None and self._reading[1].poll() is None):
            return []
        if self._reading is not None:
            epoch, process = self._reading
            self._reading = None
            self._note_failure(
                epoch, f"the process that reads them ended with exit code {process.returncode}"
            )
        done = [each for each in read_refreshes(self._job) if each.epoch in self._wanted]
        self._wanted -= {each.epoch for each in done}
        if self._wanted:
            self._begin(min(self._wanted))
        return done

    def give_up(self) -> None:
        """Forget who waits: their waits have a limit."""
        self._wanted.clear()

    def _begin(self, epoch: int) -> None:
        command = [*self._command, str(self._job.root), str(epoch)]
        try:
            self._reading = epoch, subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except OSError as error:
            why = f"a process can't be started: {error}. Check memory and ulimit -u"
            self._note_failure(epoch, why)

    def _note_failure(self, epoch: int, why: str) -> None:
        """Write down why an epoch has no rows of its own, unless there is a record of it."""
        _, cache = read_placement(self._job)
        record_failed_refresh(self._job, cache, epoch, why)

    def close(self) -> None:
        """End what is under way."""
        if self._reading is not None:
            _, process = self._reading
            process.kill()
            process.wait()
            self._reading = None
