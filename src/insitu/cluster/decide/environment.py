"""Builds the environment of a task. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from insitu.base.context import (
    ATTEMPT_ENV,
    CACHE_ENV,
    GENERATION_ENV,
    GPU_NUMBERS_ENV,
    GPUS_ENV,
    JOB_ID_ENV,
    MEMORY_CHECKPOINT_ENV,
    NODE_ENV,
    ON_LOSS_ENV,
    PS_BACKUPS_ENV,
    REFRESH_ENV,
    SEED_ENV,
    SHARDS_ENV,
    STALL_TIMEOUT_ENV,
    TASK_ENV,
    TF_CONFIG_ENV,
    format_shards,
)
from insitu.base.paths import HOME_ENV
from insitu.base.roster import Roster
from insitu.base.spec import NO_CACHE, JobSpec, TaskId
from insitu.cluster.decide.job_state import (
    TaskState,
)

THREAD_SETTINGS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC")
"""Variables that set the sizes of thread pools that share one operation: of OpenMP (PyTorch, NumPy's BLAS),
TensorFlow, and XLA on CPUs. The sizes change rounding, so they belong to the job."""


def build_tf_config(roster: Roster, task: TaskId, address: str = "") -> dict[str, Any]:
    """Return the value of TF_CONFIG for `task`; `address` is its own if the roster doesn't name it yet.

    As TensorFlow has it, an evaluator is no part of the cluster that trains: it sees itself, no other task
    sees it.
    """
    cluster: dict[str, list[str]] = {}
    chief = [m for m in roster.others if m.task.role == "chief"]
    rest = [m for m in roster.others if m.task.role != "chief"]
    everybody = [(m.task, m.address) for m in (*chief, *roster.members, *rest)]
    if task not in [name for name, _ in everybody]:
        everybody.append((task, address))
    for name, listens_on in everybody:
        if name.role != "evaluator" or name == task:
            cluster.setdefault(name.role, []).append(listens_on)
    return {"cluster": cluster, "task": {"type": task.role, "index": task.index}}


def count_interop_threads(job: JobSpec) -> int:
    """Return how many operations TensorFlow may run side by side; the number changes no rounding.

    With ps tasks an operation waits for others in other tasks, holding its thread: with fewer threads than
    peers, TensorFlow's parameter servers stand still.
    """
    return job.threads if job.ps == 0 else max(job.threads, job.workers + job.ps + int(job.chief) + 1)


def build_task_environment(
    job: JobSpec,
    roster: Roster,
    task: TaskState,
    address: str,
    home: Path,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """Return the whole environment of one incarnation of a task: `inherited` with the contract's names on
    top.

    `address` is that on which it listens if `roster` doesn't name it yet.

    The seed goes into PYTHONHASHSEED too unless the user chose one, so that the order of sets is the same in
    each incarnation of each task.
    """
    environment = dict(inherited)
    environment.update(
        {
            TF_CONFIG_ENV: json.dumps(build_tf_config(roster, task.task, address)),
            HOME_ENV: str(home),
            JOB_ID_ENV: job.job_id,
            CACHE_ENV: "" if job.cache == NO_CACHE else job.cache,
            TASK_ENV: str(task.task),
            SHARDS_ENV: format_shards(task.shards, job.shards),
            NODE_ENV: task.node or "",
            PS_BACKUPS_ENV: str(job.ps_backups),
            SEED_ENV: str(job.seed),
            ATTEMPT_ENV: str(task.incarnation),
            GENERATION_ENV: str(roster.generation),
            STALL_TIMEOUT_ENV: repr(job.stall_timeout),
            ON_LOSS_ENV: job.on_loss,
            MEMORY_CHECKPOINT_ENV: "1" if job.memory_checkpoint else "",
            # On one machine tasks read rows themselves, by the specification in the job's folder.
            REFRESH_ENV: str(job.refresh) if job.refresh and job.engine != "local" else "",
            "PYTHONUNBUFFERED": "1",
            # Its gRPC servers can't take the bound socket of the task, and listen beside it.
            "TF_GRPC_REUSE_PORT": "1",
            **job.settings,
            **{name: str(job.threads) for name in THREAD_SETTINGS},
            "TF_NUM_INTEROP_THREADS": str(count_interop_threads(job)),
        }
    )
    environment.pop(GPUS_ENV, None)
    environment.pop(GPU_NUMBERS_ENV, None)
    if job.gpus_per_worker:
        trains = task.task.role in ("chief", "worker")
        environment[GPUS_ENV] = str(job.gpus_per_worker if trains else 0)
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    environment.setdefault("PYTHONHASHSEED", str(job.seed))
    # Large tensors are allocated again in each step: large pages spare most of the page faults of that.
    environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    return environment
