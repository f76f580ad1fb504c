"""Decides what --chief and --evaluator mean for a job's script.

To insitu's strategies a chief is worker 0, which trains a shard and does what one does for all; an evaluator
reads checkpoints. Scripts that use TensorFlow alone have a chief task that coordinates. So what counts is
whether the job's code imports insitu. It is read, not run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from insitu.cluster.decide import EVALUATOR_GRACE, choose_thread_count
from insitu.cluster.task import ResolvedCommand, find_insitu_import
from insitu.spec import JobSpec

SCORING_GRACE = 600.0
"""Seconds that an evaluator which knows insitu has, by default, to score the last checkpoint."""


def imports_insitu(folder: Path, command: ResolvedCommand) -> bool:
    """Return whether the code in `folder` that the command may run imports insitu."""
    # A program may run any file of the folder.
    starts = [Path(command.arguments[0])] if command.script else sorted(folder.rglob("*.py"))
    return find_insitu_import(folder.absolute(), [s.absolute() for s in starts]) is not None


def assign_roles(
    spec: JobSpec, *, knows_insitu: bool, shards: int | None, grace: float | None, cores: int | None
) -> JobSpec:
    """Return `spec` with the tasks that --chief and --evaluator stand for.

    A chief of a script that imports insitu is one more worker, the first, with a shard of its own. `shards`
    and the evaluator's `grace` are those that were given, None for the defaults; `cores` are those that the
    default number of threads shares out, None where that number was given.
    """
    default = SCORING_GRACE if knows_insitu else EVALUATOR_GRACE
    spec = replace(spec, evaluator_grace=default if grace is None else grace)
    if not (spec.chief and knows_insitu):
        return spec
    workers = spec.workers + 1
    threads = spec.threads if cores is None else choose_thread_count(cores, workers, spec.evaluator)
    return replace(
        spec, chief=False, workers=workers, shards=workers if shards is None else shards, threads=threads
    )
