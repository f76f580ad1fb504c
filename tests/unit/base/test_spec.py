"""The frozen values that all rooms share."""

from __future__ import annotations

import dataclasses
import json

import pytest

from insitu.base.errors import InputError, JobSpecError
from insitu.base.spec import (
    CacheSpec,
    Column,
    JobSpec,
    NodeId,
    PartitionInfo,
    TaskId,
    Topology,
    check_cache_name,
)

JOB = JobSpec("a-1", "a", "a", ("train.py",), workers=2, shards=3)


def test_caches_and_jobs_survive_json() -> None:
    partition = PartitionInfo(0, 5, 320, "crc32:00000000", (NodeId("node-0"), NodeId("node-1")))
    columns = (Column("x", "uint8", (2, 3)), Column("t", "str"))
    cache = CacheSpec("a/train", 2, columns, (partition,), 1, "t", 1.5, ("cat", "dog"))
    assert CacheSpec.from_json(json.loads(json.dumps(cache.to_json()))) == cache
    # What an insitu without compression reads, too.
    assert not {"codec", "column_bytes"} & cache.to_json().keys()
    assert "raw_bytes" not in cache.to_json()["partitions"][0]
    assert JobSpec.from_json(json.loads(json.dumps(JOB.to_json()))) == JOB
    assert JobSpec.from_json({**JOB.to_json(), "environment": {}}) == JOB, "of a version before"
    assert cache.rows == 5 and cache.bytes == 320


@pytest.mark.parametrize("name", ["a", "a/b", "A_1.2-x/y", "x" * 200])
def test_names_of_caches(name: str) -> None:
    assert check_cache_name(name) == name


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", ".a", "-a", "a@b", "a~b", "a b", "x" * 201])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"A cache's name is made of letters.*Received"):
        check_cache_name(name)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"workers": 0}, "--workers must be at least 1. Received: 0"),
        ({"shards": 1}, "--shards must be at least 2. Received: 1"),
        ({"ps_backups": 1}, "--ps-backups must be below --ps"),
        ({"standby": 1, "gpus_per_worker": 2}, "A process that stands by has no GPUs yet"),
        ({"command": ()}, "JOB_CMD is missing"),
        ({"memory_checkpoint": True, "workers": 1}, "--memory-checkpoint is for workers"),
    ],
)
def test_jobs_that_cannot_be(changed: dict[str, object], message: str) -> None:
    with pytest.raises(JobSpecError, match=message):
        dataclasses.replace(JOB, **changed)  # type: ignore[arg-type]


def test_tasks_are_named_by_role_and_index() -> None:
    assert TaskId.parse("worker:12") == TaskId("worker", 12)
    assert TaskId.parse("chief") == TaskId("chief", 0) and str(TaskId("ps", 1)) == "ps:1"
    for text in ("driver:0", "worker:-1", "worker:x", ""):
        with pytest.raises(InputError, match="A task is ROLE:INDEX"):
            TaskId.parse(text)


def test_nodes_and_owners_are_distinct() -> None:
    twice = (NodeId("node-0"), NodeId("node-0"))
    for nodes in ((), twice):
        with pytest.raises(InputError, match="at least one node, each named once"):
            Topology(nodes)
        with pytest.raises(ValueError, match="owners must be distinct"):
            PartitionInfo(0, 1, 1, "crc32:0", nodes)
