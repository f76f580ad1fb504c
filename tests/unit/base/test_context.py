"""The identity of a process, from its environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from insitu.base.context import Context, format_shards, parse_shards, read_context
from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.base.spec import TaskId


def test_outside_a_job_a_process_is_one_replica_over_everything() -> None:
    context = read_context({})
    assert (context.job, context.checkpoint_dir, context.secret()) == (None, None, None)
    assert (context.shards, context.num_shards, context.incarnation) == ((0,), 1, 1)
    assert context.is_chief and (context.role, context.index) == ("worker", 0)


def test_the_first_worker_is_the_chief_where_there_is_none() -> None:
    def chief(task: str, *roles: str) -> bool:
        cluster = {role: ["a:1"] for role in roles}
        return read_context({"INSITU_TASK": task, "TF_CONFIG": json.dumps({"cluster": cluster})}).is_chief

    assert chief("worker:0", "worker") and not chief("worker:1", "worker")
    assert chief("chief:0", "worker", "chief") and not chief("worker:0", "worker", "chief")


def test_a_strategy_in_an_evaluator_is_alone() -> None:
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}}
    environment = {"INSITU_JOB_ID": "j", "INSITU_TASK": "evaluator:0", "INSITU_SHARDS": "/2"}
    here = read_context({**environment, "INSITU_SEED": "4", "TF_CONFIG": json.dumps(config)})
    alone = here.for_strategy()
    assert (here.role, here.shards, here.evaluates, here.is_chief) == ("evaluator", (), False, False)
    assert (alone.role, alone.shards, alone.num_shards, alone.workers) == ("worker", (0,), 1, ())
    assert (alone.job, alone.seed, alone.evaluates) == (None, 4, True)
    worker = read_context({**environment, "INSITU_TASK": "worker:1", "INSITU_SHARDS": "1/2"})
    assert worker.for_strategy() is worker


def test_shards_are_split_over_replicas() -> None:
    context = Context(Paths(Path("/h")), shards=(0, 2), num_shards=3)
    assert context.split_over(1) is context
    split = context.split_over(2)
    assert (split.shards, split.num_shards, split.shards_of_job) == ((0, 1, 4, 5), 6, (0, 2))


@pytest.mark.parametrize(("shards", "count", "text"), [((0, 1), 4, "0,1/4"), ((), 4, "/4")])
def test_shards_are_written_and_read(shards: tuple[int, ...], count: int, text: str) -> None:
    assert format_shards(shards, count) == text
    assert parse_shards(text) == (shards, count)


@pytest.mark.parametrize("text", ["", "0", "0,0/2", "2/2", "-1/2", "a/2", "0/0", "0/b"])
def test_shards_of_no_form_are_an_error(text: str) -> None:
    with pytest.raises(InputError, match="INSITU_SHARDS"):
        parse_shards(text)


@pytest.mark.parametrize(("shards", "count"), [((), 0), ((0,), 0), ((1,), 1), ((-1,), 2), ((0, 0), 2)])
def test_shards_that_a_task_cannot_have_are_refused(shards: tuple[int, ...], count: int) -> None:
    with pytest.raises(InputError, match=rf"num_shards at least 1\. Received: .*num_shards={count}"):
        Context(Paths(Path("/h")), shards=shards, num_shards=count)


def test_a_value_of_no_form_is_an_error() -> None:
    with pytest.raises(InputError, match="TF_CONFIG must be a JSON object"):
        read_context({"TF_CONFIG": "{"})
    with pytest.raises(InputError, match="ROLE:INDEX"):
        read_context({"INSITU_TASK": "boss"})


def test_a_task_of_a_job_finds_its_files_and_secret(tmp_path: Path) -> None:
    job = Paths(tmp_path).job("j-1")
    job.root.mkdir(parents=True)
    job.secret.write_bytes(b"s")
    environment = {"INSITU_HOME": str(tmp_path), "INSITU_JOB_ID": "j-1", "INSITU_TASK": "worker:1"}
    context = read_context(environment)
    assert context.job == job and context.secret() == b"s" and context.task == TaskId("worker", 1)
    assert context.signing_secret() == b"s"
    job.signing_secret.write_bytes(b"of before")  # the job was brought to another machine
    assert (context.secret(), context.signing_secret()) == (b"s", b"of before")
    assert context.memory_checkpoint_dir is None
    kept = read_context({**environment, "INSITU_MEMORY_CHECKPOINT": "1"}).memory_checkpoint_dir
    assert kept == job.memory_of(TaskId("worker", 1))
