"""`insitu.Server`: lets the tasks of a script for `tf.distribute` with a coordinator take part.

Such a script has three parts. A chief runs the coordinator's. Workers and ps tasks make a `Server`, whose
`join` serves until the job ends. Here no task is sent anything to run: see `coordinator.py`. So `join` runs
the script once more, from its start, with a TF_CONFIG that names this task the chief: the script takes the
coordinator's part, in which a worker runs the functions that it is given, and a ps task serves.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any, NoReturn

from insitu.base.context import TASK_ENV, TF_CONFIG_ENV, context
from insitu.base.errors import TrainingError

_RUNS_AGAIN_ENV = "INSITU_SCRIPT_RUNS_AGAIN"
"""Set while a script runs for the second time in this process."""


class Server:
    """Stands for `tf.distribute.Server`. All arguments are those of TensorFlow's; what they say about the
    cluster is known from the job.

    Example:
        >>> server = insitu.Server({"worker": ["host-1:2222"]}, "worker", 0)  # doctest: +SKIP
    """

    def __init__(
        self,
        server_or_cluster_def: Any = None,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
    ) -> None:
        del server_or_cluster_def, job_name, task_index, protocol, config, start
        self._context = context()

    @property
    def target(self) -> str:
        """The address of this task, or "" outside of a cluster."""
        addresses = self._context.servers if self._context.role == "ps" else self._context.workers
        return f"grpc://{addresses[self._context.index]}" if self._context.index < len(addresses) else ""

    def start(self) -> None:
        """Do nothing: a task serves as soon as its strategy is made."""

    def join(self) -> NoReturn:
        """Take part until the job ends; never return. See the module.

        Raises TrainingError outside of a job, and if the script doesn't choose its part by TF_CONFIG.
        """
        if self._context.job_id is None or not self._context.workers:
            raise TrainingError(
                "A Server joins the tasks of a job. Received: a process outside of a job. Start the script "
                "with insitu start, with --ps 1 or more."
            )
        if os.environ.get(_RUNS_AGAIN_ENV):
            raise TrainingError(
                "Server.join runs the script again, as the coordinator. Received: another join in that run. "
                "Choose between Server and coordinator by the task's type in TF_CONFIG, as "
                "TFConfigClusterResolver().task_type has it."
            )
        os.environ.update(coordinator_environment(os.environ[TF_CONFIG_ENV], str(self._context.task)))
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit(0)


def coordinator_environment(tf_config: str, task: str) -> dict[str, str]:
    """Return the changes of the environment with which a script takes the coordinator's part."""
    described = {**json.loads(tf_config), "task": {"type": "chief", "index": 0}}
    return {TF_CONFIG_ENV: json.dumps(described), TASK_ENV: task, _RUNS_AGAIN_ENV: "1"}
