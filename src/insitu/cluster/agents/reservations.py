"""What a job's supervisor knows of the GPUs and processors that Ray has given to the job.

Ray itself is asked by a process of its own (`ray_reserving.py`), when a node needs more than it has.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from insitu.cluster.engines import Command
from insitu.context import GPU_NUMBERS_ENV
from insitu.errors import ClusterError
from insitu.spec import JobSpec, NodeId, TaskId, TaskSpec

RESERVE_COMMAND = (sys.executable, "-P", "-m", "insitu.cluster.agents.ray_reserving")
_SECONDS = 40.0
_TRAINING = ("chief", "worker")


class Reservations:
    """The GPUs and processors of one job on the nodes of a Ray cluster."""

    def __init__(
        self, spec: JobSpec, address: str, cluster: str, command: Sequence[str] = RESERVE_COMMAND
    ) -> None:
        """`address`: of the Ray cluster; empty: Ray has started no agents, and nothing is reserved."""
        self._job, self._address, self._cluster = spec.job_id, address, cluster
        #: What each task that trains has for itself.
        self._gpus, self._cores = spec.gpus_per_worker, spec.cores_per_worker
        self._command = command
        #: Ray's ids of the GPUs, by node.
        self._given: dict[NodeId, list[str]] = {}
        #: For how many tasks of each node Ray has given what they need.
        self._counts: dict[NodeId, int] = {}
        #: The node on which each task runs that needs something.
        self._nodes: dict[TaskId, NodeId] = {}

    def require(self, tasks: Iterable[TaskSpec]) -> None:
        """Have what tasks need that train. Raises ClusterError, which says who has it, and reserves nothing
        then."""
        if not self._address or not (self._gpus or self._cores):
            return
        self._nodes |= {task.task: task.node for task in tasks if task.task.role in _TRAINING}
        counts = Counter(self._nodes.values())
        short = {node: count for node, count in counts.items() if self._counts.get(node, 0) < count}
        if not short:
            return
        answer = self._ask(short)
        if answer.get("error"):
            raise ClusterError(f"Nothing can be reserved with Ray: {answer['error']}")
        if answer["failed"]:
            named = "; ".join(f"{node}: {why}" for node, why in sorted(answer["failed"].items()))
            raise ClusterError(
                f"Ray must have free what the job's tasks are given. Received: {named}. Wait until that has "
                f"ended, or start with fewer --workers, --gpus-per-worker or --cores-per-worker"
            )
        for node, gpus in answer["gpus"].items():
            self._given[NodeId(node)] = list(map(str, gpus))
            self._counts[NodeId(node)] = short[NodeId(node)]

    def forget(self, node: NodeId) -> None:
        """Ask Ray again before tasks run on a node: its host may have been away, and Ray with it."""
        self._given.pop(node, None)
        self._counts.pop(node, None)

    def _ask(self, counts: Mapping[NodeId, int]) -> dict[str, Any]:
        wanted = {
            n: {"gpus": self._gpus * count, "cores": self._cores * count} for n, count in counts.items()
        }
        message = {"address": self._address, "cluster": self._cluster, "job": self._job, "wanted": wanted}
        try:
            done = subprocess.run(
                self._command, input=json.dumps(message), capture_output=True, text=True, timeout=_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"error": str(error)}
        try:
            answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        except (ValueError, IndexError):
            last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            return {"error": f"the process that asks ended with exit code {done.returncode} ({last:.300})"}
        return answer

    def equip(self, task: TaskSpec, command: Command) -> Command:
        """Return the command of a task with the GPUs out of which it gets its own, also on a node that it
        hasn't been on.

        Ray numbers GPUs as the leases of a host do. Raises ClusterError where it names them in another way,
        or can't give what the task needs.
        """
        self.require([task])
        if not self._address or not self._gpus or task.task.role not in _TRAINING:
            return command
        given = self._given.get(task.node, [])
        if not all(gpu.isdecimal() for gpu in given):
            raise ClusterError(
                f"Ray must name GPUs by their numbers. Received: {', '.join(given)} of {task.node}. Start "
                f"Ray there with numbers in CUDA_VISIBLE_DEVICES, or without it"
            )
        return replace(
            command, environment={**command.environment, GPU_NUMBERS_ENV: ",".join(sorted(given, key=int))}
        )
