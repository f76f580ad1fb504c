"""A ps task's status in the job's folder, and the refusals of a job without ps tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from models import in_shards

from insitu.base.errors import InputError, TrainingError
from insitu.parameters import ConsistencyPolicy
from insitu.train.elastic import SideSampler
from insitu.train.parameter_server.server_task import (
    ServerConfig,
    _StatusWriter,
    serve_or_configure,
)

RULES = ConsistencyPolicy("async", 1)


def test_the_last_status_is_in_the_file_when_the_writer_is_done(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    sampler = SideSampler(in_shards((0,), 1))
    with _StatusWriter(path, sampler) as writer:
        for updates in range(3):
            writer.publish([{"updates": updates}])
    assert json.loads(path.read_text()) == {"servers": [{"updates": 2}]}
    with _StatusWriter(None, sampler) as writer:
        writer.publish([])


def test_a_job_needs_ps_tasks_and_a_plain_process_none() -> None:
    alone = in_shards((0,), 1)
    assert serve_or_configure(alone, RULES, "clip", "Tables need ps tasks.").nan == "clip"
    with pytest.raises(TrainingError, match=r"Tables need ps tasks\. Received: a job with 0 ps tasks"):
        serve_or_configure(replace(alone, workers=("h:1",)), RULES, "refuse", "Tables need ps tasks.")
    with pytest.raises(InputError):
        serve_or_configure(alone, RULES, "ignore", "Tables need ps tasks.")


def test_a_job_signs_checkpoints_of_its_servers_with_a_key_of_its_own(tmp_path: Path) -> None:
    """All its ps tasks, and those after a restart, have the same; nobody else does."""
    secret = b"s" * 32
    config = ServerConfig(RULES, "refuse")
    in_job = replace(in_shards((0,), 1), shared_secret=secret)
    keys = []
    for context in (in_job, in_job, replace(in_job, shared_secret=b"t" * 32), in_shards((0,), 1)):
        server = config.server("127.0.0.1:0", context)
        keys.append(server._mirrors._factory.checkpoint_key)
        server.close()
    assert keys[0] == keys[1] != keys[2] and secret not in (keys[0] or b"")
    assert keys[3] is None, "a process without a job has this user's"
