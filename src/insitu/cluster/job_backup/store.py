"""The copy of a job that a host keeps while the job runs, for the day on which the job's machine is lost.

It has what another supervisor needs: specification, environment, placement, shards, JOB_DIR, the journal, and
what tasks have written, such as checkpoints and the ledger, with the secret that signs these. It lacks the
logs, and variables that are secrets.
The process that resumes it draws another secret that tasks prove to each other, so earlier tasks can't join
later ones.

The supervisor sends it, see `sender.py`, a second late at most, and nothing waits for it: a job that
resumes from a copy starts all of its tasks again from the last checkpoint in there, in a new attempt. So what
is missing at the end of the journal costs steps that are done again, with the same rows and bits.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from insitu.base.disk.access import PRIVATE_FILE, make_sticky_folder
from insitu.base.disk.durable import replace_file, replace_folder, sync_folder, sync_tree
from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths, Paths
from insitu.base.spec import is_simple_name
from insitu.cluster.engines import Message
from insitu.cluster.job_backup.folder_copies import FolderCopy
from insitu.cluster.job_files import Journal
from insitu.cluster.leases import parse_term, read_term, write_term
from insitu.cluster.wire import is_own_folder

KEEP_SECONDS = 30 * 86400.0
"""Seconds for which a copy is kept that nothing comes to any more."""


class JobCopyFolder:
    """Writes the copy of one job. A copy that is begun again takes the place of the old one when it is
    whole."""

    def __init__(self, paths: Paths, job_id: str) -> None:
        self._paths = paths
        #: The path of the copy once it is whole.
        self._final = paths.job_copy(job_id)
        #: The path at which it is made before.
        self._staged = JobPaths(self._final.root.with_name(f".{job_id}"))
        #: The folder that is written now; None before the first message.
        self._job: JobPaths | None = None
        self._files: FolderCopy | None = None

    def take(self, message: Message) -> None:
        """Take in one message of `JobCopying`. Raises ClusterError, OSError; then it must be begun again."""
        if message.get("of") == "begin":
            self._begin(message)
            return
        if self._job is None or self._files is None:
            raise ClusterError(f"A copy of a job has a beginning. Received: {message.get('of')!r:.100}")
        os.utime(self._job.root)  # for `drop_old_copies`
        match message.get("of"):
            case "signing_secret":
                data = base64.b64decode(str(message["data"]), validate=True)
                replace_file(self._job.signing_secret, data, mode=PRIVATE_FILE)
            case "shards":
                self._job.shard_maps.mkdir(exist_ok=True)
                replace_file(self._job.shard_map(str(message["cache"])), str(message["text"]).encode())
            case "code":
                _append(self._job.code_archive, base64.b64decode(str(message["part"]), validate=True))
            case "file":
                self._files.take(message)
            case "removed":
                for path in message["paths"]:
                    self._files.remove(path)
            case "journal":
                Journal(self._job.journal).append_rows(message["rows"])
            case "whole":
                self._publish()
            case other:
                raise ClusterError(f"A copy of a job has known parts. Received: {other!r:.100}")

    def _begin(self, message: Message) -> None:
        make_sticky_folder(self._paths.home, self._paths.job_copies)
        shutil.rmtree(self._staged.root, ignore_errors=True)
        self._staged.root.mkdir(mode=0o700)
        self._job, self._files = self._staged, FolderCopy(self._staged.root)
        replace_file(self._job.spec, str(message["spec"]).encode())
        replace_file(self._job.placement, str(message["placement"]).encode())
        replace_file(self._job.environment, str(message["environment"]).encode(), mode=PRIVATE_FILE)
        write_term(self._job.term, parse_term(message.get("term")))

    def _publish(self) -> None:
        if self._job != self._staged:
            return
        # The machine may lose its power at any moment: the old copy goes once the new one has its name.
        sync_tree(self._staged.root)
        old = replace_folder(self._staged.root, self._final.root)
        sync_folder(self._final.root.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        self._job, self._files = self._final, FolderCopy(self._final.root)

    def drop(self) -> None:
        """Remove what isn't whole yet."""
        shutil.rmtree(self._staged.root, ignore_errors=True)
        if self._job == self._staged:
            self._job = self._files = None

    def remove(self) -> None:
        """Remove the copy: the job has ended."""
        self.drop()
        shutil.rmtree(self._final.root, ignore_errors=True)
        self._job = self._files = None


def _append(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_FILE)
    with open(file, "wb") as archive:
        archive.write(data)


def list_copies(paths: Paths) -> list[JobPaths]:
    """Return the copies of jobs in this home that are whole. Those of other users of a shared home aren't
    believed: what they have would be run."""
    try:
        names = sorted(entry.name for entry in os.scandir(paths.job_copies) if entry.is_dir())
    except FileNotFoundError:
        return []
    found = [paths.job_copy(name) for name in names if is_simple_name(name)]
    return [job for job in found if is_own_folder(job.root)]


def drop_old_copies(paths: Paths) -> None:
    """Remove copies that nothing has come to for long: this host was offline when their jobs ended."""
    before = time.time() - KEEP_SECONDS
    for job in list_copies(paths):
        with contextlib.suppress(OSError):
            if job.root.stat().st_mtime < before:
                shutil.rmtree(job.root, ignore_errors=True)
                paths.job_term(job.root.name).unlink(missing_ok=True)


def list_files(root: Path) -> Iterator[tuple[str, int]]:
    """Yield (path below `root`, bytes) of each file of a copy, but not what is about to become one."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path.relative_to(root).as_posix(), path.stat().st_size


def describe_copies(paths: Paths) -> list[list[Any]]:
    """Return [job, term, last entry of its journal] of each copy in this home that can be read."""
    found: list[list[Any]] = []
    for job in list_copies(paths):
        try:
            found.append([job.root.name, read_term(job.term).number, Journal(job.journal).last_sequence()])
        except ClusterError:
            continue
    return found
