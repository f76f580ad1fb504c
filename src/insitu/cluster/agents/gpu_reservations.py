"""What a job's supervisor knows of GPUs that Ray has given to the job.

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
from insitu.context import GPU_NUMBERS_ENV, GPUS_ENV
from insitu.errors import ClusterError
from insitu.spec import NodeId, TaskId, TaskSpec

RESERVE_COMMAND = (sys.executable, "-P", "-m", "insitu.cluster.agents.ray_reserving")
_SECONDS = 40.0
_TRAINING = ("chief", "worker")


class GpuReservations:
    """The GPUs of one job on the nodes of a Ray cluster."""

    def __init__(
        self, job: str, address: str, cluster: str, command: Sequence[str] = RESERVE_COMMAND
    ) -> None:
        """`address`: of the Ray cluster; empty: Ray has started no agents, and nothing is reserved."""
        self._job, self._address, self._cluster = job, address, cluster
        self._command = command
        self._given: dict[NodeId, list[str]] = {}
        #: The node on which each task runs that has GPUs.
        self._nodes: dict[TaskId, NodeId] = {}

    def require(self, tasks: Iterable[TaskSpec], each: int) -> None:
        """Have the GPUs of tasks, `each` for one that trains. Raises ClusterError, which says who has them,
        and reserves nothing then."""
        self._nodes |= {task.task: task.node for task in tasks if each and task.task.role in _TRAINING}
        counts = {node: each * count for node, count in Counter(self._nodes.values()).items()}
        short = {node: count for node, count in counts.items() if len(self._given.get(node, ())) < count}
        if not self._address or not short:
            return
        answer = self._ask(short)
        if answer.get("error"):
            raise ClusterError(f"GPUs can't be reserved with Ray: {answer['error']}")
        if answer["failed"]:
            named = "; ".join(f"{node}: {why}" for node, why in sorted(answer["failed"].items()))
            raise ClusterError(
                f"Ray must have the GPUs free that the job's tasks are given. Received: {named}. Wait until "
                f"that has ended, or start with fewer --workers or --gpus-per-worker"
            )
        self._given |= {NodeId(node): list(map(str, gpus)) for node, gpus in answer["gpus"].items()}

    def forget(self, node: NodeId) -> None:
        """Ask Ray again before tasks get GPUs of a node: its host may have been away, and Ray with it."""
        self._given.pop(node, None)

    def _ask(self, counts: Mapping[NodeId, int]) -> dict[str, Any]:
        message = {"address": self._address, "cluster": self._cluster, "job": self._job, "gpus": dict(counts)}
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
        or can't give them.
        """
        each = int(command.environment.get(GPUS_ENV) or 0)
        if not self._address or not each:
            return command
        self.require([task], each)
        given = self._given.get(task.node, [])
        if not all(gpu.isdecimal() for gpu in given):
            raise ClusterError(
                f"Ray must name GPUs by their numbers. Received: {', '.join(given)} of {task.node}. Start "
                f"Ray there with numbers in CUDA_VISIBLE_DEVICES, or without it"
            )
        return replace(
            command, environment={**command.environment, GPU_NUMBERS_ENV: ",".join(sorted(given, key=int))}
        )
