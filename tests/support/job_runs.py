"""Runs the command line on an INSITU_HOME of its own, with a cache that only the catalogue knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from insitu.base.errors import JobEnded
from insitu.base.paths import JobPaths, Paths
from insitu.base.spec import CacheSpec, Column, NodeId, PartitionInfo
from insitu.cluster import list_job_ids, stop_job
from insitu.grid import Catalog

PATIENCE = 60.0
"""Seconds that any one step may take on a loaded machine."""

JOB_PATIENCE = 250.0
"""Seconds that a whole command may take there: a job that trains, loses a process and recovers."""


def wait_for(what: str, condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """The first true answer of `condition`. Fails with `what` when there is none in time."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if answer := condition():
            return answer
        time.sleep(0.02)
    raise AssertionError(f"waited {patience:g} s for {what}")


class Insitu:
    """`insitu` with a home, a cache `data/train` of `partitions` partitions, and a folder for scripts."""

    def __init__(self, root: Path, partitions: int = 4) -> None:
        self.paths = Paths(root / "home")
        self.folder = root / "job"
        self.folder.mkdir(parents=True)
        self.paths.home.mkdir()
        infos = tuple(
            PartitionInfo(i, 10, 100, "crc32:00000000", (NodeId("node-0"),)) for i in range(partitions)
        )
        columns = (Column("x", "uint8", (4,)),)
        Catalog(self.paths).publish([CacheSpec("data/train", 1, columns, infos, 0, None, 0.0)])
        self.environment = {**os.environ, "INSITU_HOME": str(self.paths.home), "NO_COLOR": "1"}

    def script(self, text: str, name: str = "train.py", mode: int = 0o644) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(mode)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "insitu", *arguments]

    def run(self, *arguments: str, code: int | None = 0, **more: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end, which must come with `code` (None: any)."""
        done = subprocess.run(
            self.command(*arguments),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=JOB_PATIENCE,
            **more,
        )
        assert code is None or done.returncode == code, f"{done.returncode}: {done.stdout}\n{done.stderr}"
        return done

    def start(self, *options: str, command: tuple[str, ...] = ("train.py",), code: int | None = 0) -> Run:
        """`insitu start OPTIONS data/train JOB_DIR COMMAND`, to its end."""
        done = self.run("start", *options, "data/train", str(self.folder), *command, code=code)
        return Run(self, done)

    def detach(self, *options: str, command: tuple[str, ...] = ("train.py",)) -> str:
        """Starts a job in the background. Returns its id."""
        return self.start("--detach", *options, command=command).job_id

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)

    def job(self, job_id: str) -> JobPaths:
        return self.paths.job(job_id)

    def output(self, job_id: str) -> str:
        return self.job(job_id).output.read_text()

    def state(self, job_id: str) -> str:
        return str(self.json("describe", job_id)["state"])

    def processes(self) -> dict[int, str]:
        """Every process that has this home in its environment, with its command line."""
        mark = f"INSITU_HOME={self.paths.home}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().decode().replace("\0", " ")
                except OSError:
                    continue
        return found

    def controller(self, job_id: str) -> int:
        """The process id of the job's controller."""
        path = self.job(job_id).controller
        wait_for("the controller's process id", lambda: path.read_text())
        return int(json.loads(path.read_text())["pid"])


class Run:
    """What a `start` that has ended left behind."""

    def __init__(self, insitu: Insitu, done: subprocess.CompletedProcess[str]) -> None:
        self.done = done
        self.out, self.err = done.stdout, done.stderr
        self.job_id = done.stdout.strip() if "--detach" in done.args else done.stderr.split("\n", 1)[0]
        self.job = insitu.job(self.job_id)


@contextmanager
def insitu_at(root: Path, partitions: int = 4) -> Iterator[Insitu]:
    """An Insitu whose jobs are all stopped at the end; fails where a process of one is left."""
    insitu = Insitu(root, partitions)
    try:
        yield insitu
    finally:
        for job_id in list_job_ids(insitu.paths):
            # Twice: a second stop kills at once.
            for _ in range(2):
                with suppress(JobEnded):
                    stop_job(insitu.job(job_id))
        wait_for("no process to be left", lambda: not insitu.processes())
