"""What a task finds in its environment, read back as a task does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from insitu.base.context import GPUS_ENV, read_context
from insitu.base.roster import Member, Roster
from insitu.base.spec import JobSpec, NodeId, TaskId
from insitu.cluster.decide.environment import THREAD_SETTINGS, build_task_environment, build_tf_config
from insitu.cluster.decide.job_state import (
    TaskState,
)

NODE = NodeId("node-1")
TASKS = tuple(
    TaskState(TaskId.parse(name), NODE, shards, incarnation=2)
    for name, shards in [
        ("chief", ()),
        ("worker:0", (0, 1)),
        ("worker:1", (2,)),
        ("ps", ()),
        ("evaluator", ()),
    ]
)
MEMBERS = tuple(Member(t.task, 2, f"127.0.0.1:{1000 + i}", t.shards) for i, t in enumerate(TASKS))
ROSTER = Roster(4, MEMBERS[1:3], (MEMBERS[0], *MEMBERS[3:]))
JOB = JobSpec(
    "d-1",
    "d",
    "d/train",
    ("t.py",),
    2,
    3,
    ps=1,
    chief=True,
    evaluator=True,
    seed=7,
    threads=2,
    stall_timeout=9.5,
    on_loss="restart",
    settings={"INSITU_VIRTUAL_DEVICES": "cpu:2"},
)


def environment(task: int, **inherited: str) -> dict[str, str]:
    return build_task_environment(JOB, ROSTER, TASKS[task], "", Path("/home/i"), inherited)


def test_a_task_reads_what_the_job_says() -> None:
    context = read_context(environment(1, PATH="/bin", TF_CONFIG="old"))
    assert (context.job_id, context.cache, str(context.task)) == ("d-1", "d/train", "worker:0")
    assert (context.shards, context.num_shards, context.node) == ((0, 1), 3, "node-1")
    assert (context.seed, context.incarnation, context.stall_timeout) == (7, 2, 9.5)
    assert (context.generation, context.on_loss) == (4, "restart")
    assert context.workers == ("127.0.0.1:1001", "127.0.0.1:1002") and context.has_chief
    assert context.paths.home == Path("/home/i") and not context.is_chief
    assert read_context(environment(0)).is_chief


def test_tasks_on_hosts_ask_for_the_rows_of_epochs() -> None:
    """On one machine they read the specification, and rows themselves."""
    for engine, every in (("local", 0), ("hosts", 3)):
        job = dataclasses.replace(JOB, engine=engine, refresh=3)
        found = build_task_environment(job, ROSTER, TASKS[1], "", Path("/home/i"), {"INSITU_REFRESH": "9"})
        assert read_context(found).refresh == every


def test_a_task_without_shards_has_none() -> None:
    assert read_context(environment(3)).shards == ()


def test_tf_config_lists_all_but_the_evaluator() -> None:
    trained_by = {
        "chief": ["127.0.0.1:1000"],
        "worker": ["127.0.0.1:1001", "127.0.0.1:1002"],
        "ps": ["127.0.0.1:1003"],
    }
    assert json.loads(environment(2)["TF_CONFIG"]) == {
        "cluster": trained_by,
        "task": {"type": "worker", "index": 1},
    }
    own = build_tf_config(ROSTER, TaskId("evaluator", 0))
    assert own["cluster"] == {**trained_by, "evaluator": ["127.0.0.1:1004"]}


def test_a_newcomer_finds_itself_beside_those_that_train() -> None:
    found = build_tf_config(ROSTER, TaskId("worker", 2), "127.0.0.1:2000")
    assert found["cluster"]["worker"] == ["127.0.0.1:1001", "127.0.0.1:1002", "127.0.0.1:2000"]


def test_threads_are_the_jobs_and_the_users_other_choices_stay() -> None:
    found = environment(1, OMP_NUM_THREADS="64", TF_CPP_MIN_LOG_LEVEL="0", PYTHONHASHSEED="5", OTHER="x")
    assert {found[name] for name in THREAD_SETTINGS} == {"2"}
    assert found["TF_NUM_INTEROP_THREADS"] == "5"
    assert (found["TF_CPP_MIN_LOG_LEVEL"], found["PYTHONHASHSEED"], found["OTHER"]) == ("0", "5", "x")
    assert (environment(1)["TF_CPP_MIN_LOG_LEVEL"], environment(1)["PYTHONHASHSEED"]) == ("2", "7")


def test_what_the_job_asks_of_devices_is_there_over_what_was_inherited() -> None:
    found = environment(1, INSITU_VIRTUAL_DEVICES="cpu:8")
    assert found["INSITU_VIRTUAL_DEVICES"] == "cpu:2"


def test_tasks_that_train_are_given_gpus_and_the_others_none() -> None:
    assert GPUS_ENV not in environment(1, INSITU_GPUS="7")
    job = dataclasses.replace(JOB, gpus_per_worker=2)
    found = [build_task_environment(job, ROSTER, task, "", Path("/home/i"), {})[GPUS_ENV] for task in TASKS]
    assert found == ["2", "2", "2", "0", "0"]
