"""What runs in the pods: the head, and the agent of a store.

Commands of insitu in the head's pod find the head, since they have the same INSITU_HOME. The supervisors of
jobs end with the head's container, so a head resumes the jobs that ran.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from insitu.base.errors import ClusterError, InputError, InsituError
from insitu.base.paths import Paths
from insitu.base.process.process_log import start_logging
from insitu.base.spec import NodeId
from insitu.extensions.kubernetes.objects import DRAIN_SECONDS, HEAD_PORT, STORE_PORT

logger = logging.getLogger("insitu")
_LOOK_SECONDS = 1.0
_TRY_SECONDS = 5.0
_KEEP_SECONDS = 60.0
_OTHERS = 0o077


def prepare_home(home: Path) -> None:
    """Take back the rights that Kubernetes has given to the pod's group in all of a home. Raises OSError.

    It may do so whenever it mounts the disk, whatever `fsGroupChangePolicy` says, and insitu would take the
    home for one that its user shares.
    """
    if not home.exists() or not home.stat().st_mode & _OTHERS:
        return
    # The home itself last: until then this is done again.
    for _, _, names, opened in os.fwalk(home, topdown=False):
        for name in names:
            mode = os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode
            if stat.S_ISREG(mode) and mode & _OTHERS:
                os.chmod(name, stat.S_IMODE(mode) & ~_OTHERS, dir_fd=opened)
        os.fchmod(opened, stat.S_IMODE(os.fstat(opened).st_mode) & ~_OTHERS & ~stat.S_ISGID)


def run_head_here(environment: Mapping[str, str]) -> int:
    """Be the head until a signal comes. Returns the exit code. Raises InsituError."""
    from insitu.cluster import read_token_file, run_head

    start_logging()
    address, token = _read_settings(environment)
    paths = Paths.default()

    def report(listens_at: str) -> None:
        logger.info("the head listens at %s", listens_at)
        threading.Thread(target=_resume_jobs, args=(paths,), daemon=True).start()
        threading.Thread(target=_watch_jobs, args=(paths,), daemon=True).start()

    return run_head(paths, address, HEAD_PORT, read_token_file(token), report)


def find_lost_jobs(paths: Paths) -> list[str]:
    """Return the jobs whose supervisor ended before they did."""
    from insitu.cluster import ENDED, Journal, is_running, list_job_ids

    lost = []
    for name in list_job_ids(paths):
        job = paths.job(name)
        try:
            if not is_running(job) and Journal(job.journal).state().phase not in ENDED:
                lost.append(name)
        except (InsituError, OSError) as error:
            logger.warning("whether %s is to be resumed isn't known: %s", name, error)
    return lost


def _resume_jobs(paths: Paths) -> None:
    """Resume jobs once the agents have joined again, or have had the time to."""
    from insitu.service import list_nodes

    jobs = find_lost_jobs(paths)
    deadline = time.monotonic() + _KEEP_SECONDS
    while jobs and time.monotonic() < deadline:
        states = [each["state"] for each in list_nodes(paths, logger.warning) if each["host"] is not None]
        if states and not {*states} - {"alive", "draining", "drained", "left"}:
            break
        time.sleep(_LOOK_SECONDS)
    for job in jobs:
        logger.info("resumes %s, whose supervisor has ended", job)
        command = [sys.executable, "-P", "-m", "insitu", "resume", "--detach", job]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            logger.warning("%s isn't resumed: %s", job, " ".join(done.stderr.split()))


def _watch_jobs(paths: Paths) -> None:
    from insitu.extensions.kubernetes.job_starter import open_client
    from insitu.extensions.kubernetes.job_watch import JobWatch

    try:
        JobWatch(paths, open_client()).run(threading.Event())
    except InsituError as error:
        logger.warning("jobs don't follow their pods: %s", error)


def run_tasks_here(job_id: str, node: str, environment: Mapping[str, str]) -> int:
    """Run the tasks of a job beside a store until it is over, or a signal comes. Returns the exit code: that
    of the job, or 1 for one at which Kubernetes would make another pod. Raises InsituError."""
    from insitu.cluster import keep_server, read_token_file, start_server
    from insitu.extensions.kubernetes.job_pods import TAKEN_AWAY

    start_logging()
    address, file = _read_settings(environment)
    paths, ending = Paths.default(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())

    def start(supervisor: str) -> subprocess.Popen[bytes]:
        logger.info("runs tasks of %s for the supervisor at %s", job_id, supervisor)
        return start_server(paths, NodeId(node), job_id, supervisor, address, read_token_file(file))

    code = keep_server(paths, job_id, start, ending)
    return 1 if code in TAKEN_AWAY and not ending.is_set() else code


def run_store_here(head: str, environment: Mapping[str, str]) -> None:
    """Be the agent of this pod's store until a signal comes. Raises InsituError.

    A store that no head knows yet waits for one. The node stays, also if an earlier pod of it was drained:
    it is there because the StatefulSet wants it.
    """
    from insitu.cluster import AgentOptions, read_token_file, run_agent

    start_logging()
    address, file = _read_settings(environment)
    token, paths = read_token_file(file), Paths.default()
    if not any(paths.nodes.glob("*/agent.json")):
        _wait_for_head(head)

    def keep(joined: dict[str, Any]) -> None:
        logger.info("%s serves at %s", joined["node"], joined["address"])
        threading.Thread(target=_keep_node, args=(head, token, NodeId(joined["node"])), daemon=True).start()

    options = AgentOptions(head, interface=address, port=STORE_PORT, drain_seconds=DRAIN_SECONDS)
    run_agent(paths, options, token, keep)


def _read_settings(environment: Mapping[str, str]) -> tuple[str, Path]:
    """Return the address of this pod, and the file with the cluster's token. Raises InputError."""
    missing = [name for name in ("POD_IP", "INSITU_TOKEN_FILE", "INSITU_HOME") if not environment.get(name)]
    if missing:
        raise InputError(
            "This command runs in a pod that `insitu k8s render` describes. Received: no "
            f"{', '.join(missing)}. "
            f"Use `insitu up` and `insitu agent` elsewhere"
        )
    return environment["POD_IP"], Path(environment["INSITU_TOKEN_FILE"])


def _wait_for_head(address: str) -> None:
    """Return once something listens at an address. Pods start in any order, and a restart costs longer."""
    host, _, port = address.rpartition(":")
    said = ""
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=_TRY_SECONDS).close()
            return
        except OSError as error:
            if str(error) != said:
                said = str(error)
                logger.info("waits for the head at %s: %s", address, said)
        time.sleep(_LOOK_SECONDS)


def _keep_node(head: str, token: str, node: NodeId) -> None:
    """Have the head keep a node that was to leave."""
    from insitu.cluster import ask_to_drain

    deadline = time.monotonic() + _KEEP_SECONDS
    while True:
        try:
            ask_to_drain(head, token, node, None)
            return
        except (InsituError, OSError) as error:
            if time.monotonic() > deadline or not isinstance(error, ClusterError):
                logger.warning("whether %s is to leave isn't known: %s", node, error)
                return
        time.sleep(_LOOK_SECONDS)


def end_process(code: int) -> None:
    """Exit at once: a stream of Flight that nobody reads would keep the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
