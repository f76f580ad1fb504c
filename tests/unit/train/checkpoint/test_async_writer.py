"""Checkpoints are written behind the training, from copies."""

from __future__ import annotations

import errno
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from insitu.base.errors import CheckpointError
from insitu.train.checkpoint import async_writer
from insitu.train.checkpoint import store as module
from insitu.train.checkpoint.async_writer import AsyncCheckpointWriter
from insitu.train.checkpoint.store import Checkpoint, CheckpointStore


def a_checkpoint(epoch: int = 1, step: int = 2, value: float = 0.5) -> Checkpoint:
    import ml_dtypes

    values = {
        "trainable/0": np.full((2, 3), value, "float32"),
        "seeds/0": np.array([7, 2**40], "int64"),
        "first/0": np.array(True),
        "mean/0": np.full((3,), value, ml_dtypes.bfloat16),
    }
    return Checkpoint(epoch, step, values, {"memory": {0: {"best": value}}, "list": [1, (2, None)]})


def test_the_writer_writes_behind_and_tells_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    store = CheckpointStore(tmp_path, fit=0)
    writer = AsyncCheckpointWriter(store)
    gate, began, problem = threading.Event(), threading.Event(), []
    write, used = module.write_pages, []

    def held_up(path: Path, pages: memoryview, size: int) -> None:
        used.append(np.frombuffer(pages, np.uint8).ctypes.data)
        began.set()
        assert gate.wait(30)
        if problem:
            raise problem[0]
        write(path, pages, size)

    monkeypatch.setattr(module, "write_pages", held_up)
    writer.submit(a_checkpoint(1, 0))
    assert began.wait(30)
    # While the first is being written, the second gives way to the third.
    writer.submit(a_checkpoint(2, 0))
    writer.submit(a_checkpoint(3, 0))
    gate.set()
    writer.finish()
    assert [p.name for p in sorted((tmp_path / "fit-00000").iterdir())] == [
        "epoch-00001.step-00000000",
        "epoch-00003.step-00000000",
    ]
    problem.append(OSError(errno.ENOSPC, "No space left on device"))
    writer.submit(a_checkpoint(4, 0))
    writer.finish()
    assert "No room is left" in caplog.text
    assert "Training continues" in caplog.text
    problem[0] = OSError(errno.EIO, "Input/output error")
    writer.submit(a_checkpoint(5, 0))
    with pytest.raises(CheckpointError, match="Input/output"):
        writer.finish()
    assert store.load_latest().epoch == 3
    # One buffer for what is written, one for what waits; the one given up was used again.
    assert len(used) == 4 and len(set(used)) <= 3


def test_what_training_changes_afterwards_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = CheckpointStore(tmp_path, fit=0)
    writer = AsyncCheckpointWriter(store)
    gate, write = threading.Event(), module.write_pages

    def held_up(path: Path, pages: memoryview, size: int) -> None:
        assert gate.wait(30)
        write(path, pages, size)

    monkeypatch.setattr(module, "write_pages", held_up)
    values, remembered = {"trainable/0": np.ones(4, "float32")}, [1, np.arange(3)]
    writer.submit(Checkpoint(1, 0, values, remembered))
    values["trainable/0"][:] = 2
    remembered[1][:] = 7
    remembered.append(9)
    gate.set()
    writer.finish()
    loaded = store.load_latest()
    assert loaded.values["trainable/0"].tolist() == [1, 1, 1, 1]
    assert loaded.more[0] == 1 and loaded.more[1].tolist() == [0, 1, 2] and len(loaded.more) == 2


def test_nothing_is_left_of_a_writer_that_has_written(tmp_path: Path):
    """Neither a thread nor its buffers, each as large as the model, outlive the fit."""
    before = set(threading.enumerate())
    writer = AsyncCheckpointWriter(CheckpointStore(tmp_path, fit=0))
    for epoch in (1, 2):
        writer.submit(a_checkpoint(epoch, 0))
        writer.finish()
        for thread in set(threading.enumerate()) - before:
            thread.join(30)
        assert not set(threading.enumerate()) - before
    assert writer.written == 2 and writer.store.load_latest().epoch == 2
    known = weakref.ref(writer)
    del writer
    assert known() is None


def test_a_storage_that_never_answers_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(async_writer, "WRITE_TIMEOUT", 0.05)
    store = CheckpointStore(tmp_path, fit=0)
    writer = AsyncCheckpointWriter(store)
    gate, began = threading.Event(), threading.Event()

    def hang(path: Path, pages: memoryview, size: int) -> None:
        began.set()
        assert gate.wait(60)

    monkeypatch.setattr(module, "write_pages", hang)
    writer.submit(a_checkpoint(1, 0))
    assert began.wait(30)
    try:
        with pytest.raises(CheckpointError, match=rf"no answer from {tmp_path}"):
            writer.finish()
        with pytest.raises(CheckpointError, match="no answer"):
            async_writer.wait_for_writers(CheckpointStore(tmp_path, fit=0))
        async_writer.wait_for_writers(CheckpointStore(tmp_path, fit=1))
        writer._wait_at_exit()
        assert "no answer" in caplog.text
    finally:
        gate.set()
    monkeypatch.setattr(async_writer, "WRITE_TIMEOUT", 60.0)
    writer.finish()
