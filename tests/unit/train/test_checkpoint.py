"""Checkpoints: whole or not there."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest

from insitu.errors import CheckpointError, StorageFull
from insitu.train import checkpoint as module
from insitu.train.checkpoint import Checkpoint, CheckpointStore


def a_checkpoint(epoch: int = 1, step: int = 2, value: float = 0.5) -> Checkpoint:
    import ml_dtypes

    values = {
        "trainable/0": np.full((2, 3), value, "float32"),
        "seeds/0": np.array([7, 2**40], "int64"),
        "first/0": np.array(True),
        "mean/0": np.full((3,), value, ml_dtypes.bfloat16),
    }
    return Checkpoint(epoch, step, values, ("{}", ""))


def test_what_was_saved_is_loaded(tmp_path: Path):
    store = CheckpointStore(tmp_path, fit=0)
    saved = a_checkpoint()
    store.save(saved)
    loaded = store.load_latest()
    assert (loaded.epoch, loaded.step, loaded.ledgers) == (1, 2, ("{}", ""))
    for name, value in saved.values.items():
        assert loaded.values[name].dtype == value.dtype
        assert loaded.values[name].shape == value.shape
        assert loaded.values[name].tobytes() == value.tobytes()


def test_fits_have_checkpoints_of_their_own(tmp_path: Path):
    CheckpointStore(tmp_path, fit=0).save(a_checkpoint())
    assert CheckpointStore(tmp_path, fit=1).load_latest() is None


def test_the_newest_are_kept(tmp_path: Path):
    store = CheckpointStore(tmp_path, fit=0, keep=2)
    for epoch, step in ((0, 100), (0, 20), (1, 0), (10, 0)):
        store.save(a_checkpoint(epoch, step))
    names = sorted(p.name for p in (tmp_path / "fit-00000").iterdir())
    assert names == ["epoch-00001.step-00000000", "epoch-00010.step-00000000"]
    with pytest.raises(CheckpointError, match="keep=0"):
        CheckpointStore(tmp_path, fit=0, keep=0)


@pytest.mark.parametrize("damage", ["flip", "truncate", "no state", "half a state"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture):
    store = CheckpointStore(tmp_path, fit=0)
    store.save(a_checkpoint(1, 0, value=1.0))
    newest = store.save(a_checkpoint(2, 0, value=2.0))
    arrays, state = newest / "arrays.npz", newest / "state.json"
    if damage == "flip":
        data = bytearray(arrays.read_bytes())
        data[len(data) // 2] ^= 1
        arrays.write_bytes(data)
    elif damage == "truncate":
        arrays.write_bytes(arrays.read_bytes()[:-9])
    elif damage == "no state":
        state.unlink()
    else:
        state.write_text(state.read_text()[:20])
    loaded = store.load_latest()
    assert loaded.epoch == 1
    assert loaded.values["trainable/0"][0, 0] == 1.0
    assert str(newest) in caplog.text


def test_a_full_disk_leaves_the_last_one_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = CheckpointStore(tmp_path, fit=0)
    store.save(a_checkpoint(1, 0))

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.np, "savez", full)
    with pytest.raises(StorageFull, match="stands"):
        store.save(a_checkpoint(2, 0))
    assert [p.name for p in (tmp_path / "fit-00000").iterdir()] == ["epoch-00001.step-00000000"]
    assert store.load_latest().epoch == 1


def test_what_a_killed_writer_left_is_invisible_and_goes(tmp_path: Path):
    store = CheckpointStore(tmp_path, fit=0)
    left = tmp_path / "fit-00000" / ".staging-12345"
    left.mkdir(parents=True)
    (left / "state.json").write_text(json.dumps({"epoch": 9}))
    assert store.load_latest() is None
    store.save(a_checkpoint())
    assert not left.exists()
