"""The processes of an agent's host that run tasks, one for each job; see `host_server.py`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths, Paths
from insitu.base.spec import NodeId, is_simple_name
from insitu.cluster.job_backup import drop_old_copies
from insitu.cluster.job_hosts.host_server import end_server, is_whole_job
from insitu.cluster.job_hosts.places import drop_old_orders, order_server
from insitu.cluster.wire import Message, is_locked, is_own_folder, open_input, parse_job_order
from insitu.grid import list_nodes_with_stores

_END_SECONDS = 15.0
"""Seconds in which a server ends its tasks and itself, before it is killed."""


class TaskServers:
    """Starts them for the head, and ends them with the agent."""

    def __init__(
        self, paths: Paths, node: NodeId, token: str, tied_to: Sequence[tuple[int, int]] = ()
    ) -> None:
        """`tied_to`: processes, as (pid, start), with which servers end, too: what kills these, such as Ray,
        may kill the agent before it can end them."""
        self._paths = paths
        self._tied_to = tied_to
        self._node = node
        self._token = token
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, message: Message, host: str) -> None:
        """Start a server for the job that the message names, whose tasks listen at `host`.

        It says itself to the job's supervisor what comes of it. Raises ClusterError.
        """
        job_id, address, has_place = parse_job_order(message)
        if has_place:
            order_server(self._paths, job_id, address)
            return
        self._processes = [each for each in self._processes if each.poll() is None]
        process = start_server(self._paths, self._node, job_id, address, host, self._token, self._tied_to)
        self._processes.append(process)
        threading.Thread(target=process.wait, daemon=True).start()  # it must leave nothing when it ends

    def close(self) -> None:
        """End the servers, with all their tasks."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.wait()
        end_servers(self._paths, self._node)


def start_server(
    paths: Paths,
    node: NodeId,
    job_id: str,
    address: str,
    host: str,
    token: str,
    tied_to: Sequence[tuple[int, int]] = (),
) -> subprocess.Popen[bytes]:
    """Start the server of a job on a host, whose tasks listen at `host`. It ends with one of the processes
    `tied_to`. Raises ClusterError."""
    arguments = [str(paths.home), node, job_id, address, host, json.dumps(tied_to)]
    try:
        with open_input(f"{token}\n") as source:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "insitu.cluster.job_hosts.host_server", *arguments],
                stdin=source,
                stdout=subprocess.DEVNULL,
                cwd=paths.home,
                start_new_session=True,
            )
    except OSError as error:
        raise ClusterError(f"A process can't be started: {error}. Check memory and ulimit -u") from error


def list_engine_jobs(paths: Paths, node: NodeId) -> list[JobPaths]:
    """Return the jobs of which this home has a folder for the tasks of a node. Those of other members of a
    shared home are left alone."""
    try:
        names = sorted(os.listdir(paths.jobs))
    except FileNotFoundError:
        return []
    jobs = [paths.job(name) for name in names if is_simple_name(name)]
    return [job for job in jobs if is_own_folder(job.root) and job.engine_lock(node).exists()]


def end_servers(paths: Paths, node: NodeId) -> None:
    """Kill servers that an agent before this one has started, and remove what they have left."""
    for job in list_engine_jobs(paths, node):
        if is_locked(job.engine_lock(node)):
            end_server(job.engine_lock(node))
    sweep_jobs(paths, node)


def remove_host_copy(paths: Paths, job: JobPaths) -> None:
    """Have a job be no longer run here for a supervisor on another machine, and remove its folder. Raises
    InputError for one of another user, OSError."""
    if job.root.exists() and not is_whole_job(paths, job):
        for node in list_nodes_with_stores(paths):
            end_server(job.engine_lock(node))
        shutil.rmtree(job.memory, ignore_errors=True)
        shutil.rmtree(job.root)


def sweep_jobs(paths: Paths, node: NodeId) -> None:
    """Remove what servers that were killed have left on this host."""
    drop_old_copies(paths)
    drop_old_orders(paths)
    for job in list_engine_jobs(paths, node):
        if is_locked(job.engine_lock(node)):
            continue
        if is_whole_job(paths, job):
            job.engine_lock(node).unlink(missing_ok=True)
        else:
            shutil.rmtree(job.memory, ignore_errors=True)
            shutil.rmtree(job.root, ignore_errors=True)
