"""What follows after a head has taken over: jobs go on, and who was away hears whom to obey.

`python -P -m insitu.cluster.agents.succeeding HOME` is kept running by that head (`succession.py`). It is a
process of its own since the head loads no library that moves bytes. A job goes on here where all of this is
so: nobody had to say that this node takes over, the job's `--on-take-over` is `resume`, a host keeps a copy
of it, this home doesn't know it, and no host is served by its supervisor any more. Where somebody has said
so, the supervisor of before hasn't surely ended (`job_lease.py`), and jobs are left to people, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from insitu.cluster.agents.connection import ask_head
from insitu.cluster.agents.host_server import LEASE_SECONDS
from insitu.cluster.agents.job_copy_reading import CopyReader, open_copy_reader
from insitu.cluster.agents.node_list import ask_for_nodes
from insitu.cluster.agents.records import HeadRecord, read_head, read_token
from insitu.cluster.agents.relays import CLUSTER_ENV, ENV_ON_STDIN, TOKEN_FILE_ENV
from insitu.cluster.decide import choose_newest_copy
from insitu.errors import ClusterError, InputError, InsituError
from insitu.paths import HOME_ENV, Paths
from insitu.processes import die_with_parent
from insitu.spec import JobSpec, NodeId

logger = logging.getLogger("insitu")
RESUME_COMMAND = (sys.executable, "-P", "-m", "insitu", "resume", ENV_ON_STDIN, "--detach")
_WAIT_SECONDS = LEASE_SECONDS + 30.0
"""Seconds in which the tasks of a lost supervisor end, and hosts that have promised to obey join."""
_LOOK_SECONDS = 2.0
_RESUME_SECONDS = 300.0
_CLAIM_SECONDS = (2.0, 30.0)
"""The first and the longest pause between two words to those that were away."""
_ASK_SECONDS = 5.0


def resume_jobs(
    paths: Paths,
    agents: Collection[NodeId],
    command: Sequence[str] = RESUME_COMMAND,
    wait_seconds: float = _WAIT_SECONDS,
    claim: Callable[[], None] = lambda: None,
) -> None:
    """Have jobs go on, each once, and log what becomes of each.

    `agents`: those that have promised to obey, and so are about to join. They know whose supervisor lives.
    `claim` is called again and again.
    """
    deadline = time.monotonic() + wait_seconds
    done: set[str] = set()
    while True:
        is_late = time.monotonic() > deadline
        with contextlib.suppress(InsituError, OSError), open_copy_reader(paths) as reader:
            if is_late or reader.nodes >= set(agents):
                done |= _resume_ready(paths, reader, command, done, is_late=is_late)
        if is_late:
            return
        claim()
        time.sleep(_LOOK_SECONDS)


def _resume_ready(
    paths: Paths, reader: CopyReader, command: Sequence[str], done: set[str], *, is_late: bool
) -> set[str]:
    """Return the jobs about which nothing is left to do.

    `is_late`: hosts have noticed by now which supervisors are lost.
    Raises InsituError, OSError where hosts can't be asked.
    """
    found: set[str] = set()
    copies, served = reader.list_copies(), reader.list_served()
    for job_id in sorted(copies.keys() - done):
        node = choose_newest_copy(copies[job_id])
        if node is None or paths.job(job_id).root.exists():
            continue
        if job_id in served:
            if is_late:
                logger.warning("%s goes on where it is: its supervisor serves hosts", job_id)
            continue
        try:
            spec = JobSpec.from_json(reader.read_specification(node, job_id))
        except (InputError, ValueError, TypeError, KeyError) as error:
            logger.warning("the copy of %s on %s can't be read: %s", job_id, node, error)
            found.add(job_id)
            continue
        found.add(job_id)
        if spec.on_take_over == "resume":
            _resume(paths, command, job_id)
        else:
            logger.warning("hosts keep a copy of %s: `insitu resume %s` goes on with it here", job_id, job_id)
    return found


def _resume(paths: Paths, command: Sequence[str], job_id: str) -> None:
    """Run `insitu resume` for a job. It has the variables that the job keeps, and nobody's shell."""
    environment = {
        name: value for name, value in os.environ.items() if name not in (CLUSTER_ENV, TOKEN_FILE_ENV)
    }
    environment |= {HOME_ENV: str(paths.home), "NO_COLOR": "1"}
    try:
        done = subprocess.run(
            [*command, job_id],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            timeout=_RESUME_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("%s doesn't go on here: %s", job_id, error)
        return
    said = " ".join(done.stderr.split())
    if done.returncode:
        logger.warning("%s doesn't go on here: %s. `insitu resume %s` tries it again", job_id, said, job_id)
    else:
        logger.warning("%s goes on here: %s", job_id, said)


class Claims:
    """Tells those that were away, or cut off, which head they obey: agents, and the head of before."""

    def __init__(self, paths: Paths, record: HeadRecord) -> None:
        self._paths = paths
        self._record = record
        self._pause, self._next_at = _CLAIM_SECONDS[0], 0.0

    def advance(self) -> None:
        """Tell them, where it is time for that. What fails is tried again."""
        if time.monotonic() < self._next_at:
            return
        with contextlib.suppress(InsituError, OSError):
            self._tell_head()
        with contextlib.suppress(InsituError, OSError):
            self._tell_agents()
        self._next_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _CLAIM_SECONDS[1])

    def _fields(self) -> dict[str, Any]:
        record = self._record
        return {
            "cluster": record.cluster,
            "address": record.address,
            "epoch": record.epoch,
            "instance": record.instance,
        }

    def _tell_head(self) -> None:
        before = str((self._record.taken_over or {}).get("from", ""))
        if before and before != self._record.address:
            token, message = read_token(self._paths), {"do": "succeeded", **self._fields()}
            ask_head(before, token, message, _ASK_SECONDS, connect_seconds=_ASK_SECONDS)
            logger.warning("the head of before, at %s, is there again and has ended", before)

    def _tell_agents(self) -> None:
        from insitu.cluster.files import RemotePeers, View  # loads Flight
        from insitu.grid.transfer import ServerAddress

        token = read_token(self._paths)
        members = ask_for_nodes(self._record.address, token)
        away = {
            m.facts.node: ServerAddress(m.facts.address, m.facts.port, m.facts.certificate)
            for m in members
            if m.connection is None and m.state != "left"
        }
        if not away:
            return
        with contextlib.closing(RemotePeers(token.encode(), silence=_ASK_SECONDS)) as peers:
            view = View(away, len(members))
            for node in away:
                with contextlib.suppress(InsituError, OSError):
                    peers.find(node, view).act("obey_head", self._fields())
                    logger.warning("%s was away, and obeys from now on", node)


def main(arguments: list[str]) -> int:
    parent = os.getppid()
    die_with_parent(signal.SIGKILL, parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    paths = Paths(Path(arguments[0]))
    record = read_head(paths)
    if record is None or record.taken_over is None:
        raise ClusterError(f"A head that has taken over has jobs go on. Received: {paths.home}")
    claims = Claims(paths, record)
    if record.taken_over["after"]:
        resume_jobs(paths, record.taken_over["agents"], claim=claims.advance)
    while True:
        claims.advance()
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
