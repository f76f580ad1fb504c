"""Checkpoints in memory: the newest whole one of any task is used, a damaged one never."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_ranks import in_threads

import insitu.exchange
from insitu.base import paths as paths_module
from insitu.base.context import Context, read_context
from insitu.base.paths import Paths
from insitu.base.spec import TaskId
from insitu.train.checkpoint.backup import broadcast_newest, memory_store
from insitu.train.checkpoint.store import Checkpoint, CheckpointStore


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    monkeypatch.setattr(paths_module, "MEMORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    paths = Paths(tmp_path)
    paths.job("j-1").root.mkdir(parents=True)
    paths.job("j-1").secret.write_bytes(b"s" * 32)
    yield Context(paths, job_id="j-1", memory_checkpoint=True)


def at_task(context: Context, index: int) -> CheckpointStore:
    store = memory_store(replace(context, task=TaskId("worker", index)), fit=0)
    assert store is not None
    return store


def save(store: CheckpointStore, epoch: int, rank: int) -> Path:
    return Path(store.save(Checkpoint(epoch, 3, {"w": np.full(1000, rank, "float32")}, {"logs": {}})))


def restored(stores: list[CheckpointStore]) -> list[Any]:
    def rank(index: int, addresses: list[str]) -> Any:
        with insitu.exchange.join(
            index, addresses, shards=(index,), num_shards=len(addresses), timeout=40.0
        ) as group:
            return broadcast_newest(group, stores[index].load_latest())

    return in_threads(len(stores), rank)


def test_the_newest_of_any_task_is_given_to_all(context: Context):
    stores = [at_task(context, index) for index in range(3)]
    assert restored(stores) == [None, None, None]
    save(stores[1], 2, 1)
    save(stores[2], 2, 2)
    save(stores[2], 1, 2)
    for position, values, more in restored(stores):
        assert (tuple(position), more) == ((2, 3), {"logs": {}})
        assert (values["w"] == 1).all()


@pytest.mark.parametrize("damage", ["flip", "truncate", "half-written"])
def test_a_damaged_one_is_not_used(context: Context, damage: str, caplog: pytest.LogCaptureFixture):
    stores = [at_task(context, index) for index in range(3)]
    save(stores[1], 1, 1)
    newest = save(stores[2], 2, 2)
    arrays = newest / "arrays.bin"
    if damage == "flip":
        data = bytearray(arrays.read_bytes())
        data[1234] ^= 8
        arrays.write_bytes(data)
    elif damage == "truncate":
        arrays.write_bytes(arrays.read_bytes()[:-1])
    else:
        newest.rename(newest.with_name(".staging-1"))
    for position, values, _ in restored(stores):
        assert tuple(position) == (1, 3)
        assert (values["w"] == 1).all()
    assert (damage == "half-written") != (str(newest) in caplog.text)


def test_one_is_kept_in_a_folder_of_this_user_alone(context: Context):
    store = at_task(context, 1)
    for epoch in (1, 2, 3):
        newest = save(store, epoch, 1)
    assert list(newest.parent.iterdir()) == [newest]
    assert context.job is not None
    assert context.job.memory.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_to_is_not_used(context: Context, caplog: pytest.LogCaptureFixture):
    assert context.job is not None
    context.job.memory.mkdir(mode=0o777)
    context.job.memory.chmod(0o777)
    assert memory_store(context, fit=0) is None
    assert "must belong to this user alone" in caplog.text


def test_only_jobs_that_ask_for_it_keep_any(context: Context):
    assert memory_store(replace(context, memory_checkpoint=False), fit=0) is None
    assert memory_store(replace(context, job_id=None), fit=0) is None
    assert not read_context({}).memory_checkpoint
    assert read_context({"INSITU_MEMORY_CHECKPOINT": "1"}).memory_checkpoint
