"""The newest whole checkpoint is scored, and none that is being written."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import CheckpointError, TrainingError
from insitu.train.checkpoint import Checkpoint, CheckpointStore
from insitu.train.evaluation.checkpoints import (
    AnyCheckpoints,
    BackupCheckpoints,
    Candidate,
    FileCheckpoints,
    choose_next,
)
from insitu.train.replica import read_state, views

# Keras, as it saves
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

NAMES = st.lists(st.integers(0, 9).map(str), unique=True)


@given(NAMES, st.sets(st.integers(0, 9).map(str)), st.sets(st.integers(0, 9).map(str)))
def test_the_newest_readable_one_is_next(names: list[str], done: set[str], skipped: set[str]) -> None:
    chosen = choose_next([Candidate(name) for name in names], done, skipped)
    readable = [name for name in names if name not in skipped]
    if chosen is None:
        assert not readable or readable[-1] in done
    else:
        assert chosen.name == readable[-1] and chosen.name not in done


def model_of(units: int = 3) -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def save(directory: Path, model: Any, fit: int, epoch: int, step: int, **more: Any) -> None:
    values = {name: value.copy() for name, value in views(read_state(model)).items()}
    CheckpointStore(directory, fit).save(Checkpoint(epoch, step, values, more))


def test_checkpoints_of_all_fits_come_in_order_and_give_their_weights(tmp_path: Path) -> None:
    trained, scored = model_of(), model_of()
    source = BackupCheckpoints(tmp_path, None, None)
    assert source.find() == []
    save(tmp_path, trained, 1, 1, 0, final=True)
    save(tmp_path, trained, 0, 3, 0)
    trained.optimizer.iterations.assign(17)
    trained.layers[0].kernel.assign(np.full((2, 3), 5.0))
    save(tmp_path, trained, 0, 3, 4)
    names = [candidate.name for candidate in source.find()]
    assert names == ["epoch 3", "epoch 4, step 4", "fit 2, epoch 1"]
    middle, last = source.find()[1:]
    loaded = source.load(middle, scored)
    assert loaded is not None and (loaded.iterations, loaded.is_final) == (17, False)
    assert np.all(np.asarray(scored.layers[0].kernel) == 5.0)
    assert int(np.asarray(scored.optimizer.iterations)) == 17
    loaded = source.load(last, scored)
    assert loaded is not None and loaded.is_final
    assert [c.name for c in BackupCheckpoints(tmp_path, None, 1).find()] == ["fit 2, epoch 1"]


def test_a_checkpoint_that_is_gone_or_cut_off_changes_nothing(tmp_path: Path) -> None:
    trained, scored = model_of(), model_of()
    before = np.asarray(scored.layers[0].kernel).copy()
    source = BackupCheckpoints(tmp_path, None, None)
    save(tmp_path, trained, 0, 1, 0)
    [candidate] = source.find()
    arrays = next(tmp_path.rglob("arrays.bin"))
    arrays.write_bytes(arrays.read_bytes()[:-8])
    assert source.load(candidate, scored) is None
    CheckpointStore(tmp_path, 0)._folder.remove(arrays.parent.name)
    assert source.load(candidate, scored) is None and source.find() == []
    assert np.array_equal(np.asarray(scored.layers[0].kernel), before)


def test_a_checkpoint_of_another_model_or_writer_is_told(tmp_path: Path) -> None:
    save(tmp_path, model_of(4), 0, 1, 0)
    source = BackupCheckpoints(tmp_path, None, None)
    with pytest.raises(CheckpointError, match="Received: differences in trainable/0"):
        source.load(source.find()[0], model_of())
    with pytest.raises(CheckpointError, match="signed with another key"):
        BackupCheckpoints(tmp_path, b"other" * 8, None).load(source.find()[0], model_of(4))


def test_files_of_keras_are_read_once_they_are_whole(tmp_path: Path) -> None:
    trained, scored = model_of(), model_of()
    source = FileCheckpoints(tmp_path)
    for number in (1, 2):
        trained.optimizer.iterations.assign(number)
        trained.layers[0].kernel.assign(np.full((2, 3), float(number)))
        path = tmp_path / f"{number}.keras"
        trained.save(path)
        os.utime(path, ns=(number, number))
    first, second = source.find()
    loaded = source.load(first, scored)
    assert loaded is not None and loaded.iterations == 1
    assert np.all(np.asarray(scored.layers[0].kernel) == 1.0)
    whole = (tmp_path / "2.keras").read_bytes()
    for end in (0, 10, len(whole) // 2, len(whole) - 1):
        (tmp_path / "2.keras").write_bytes(whole[:end])
        assert source.load(second, scored) is None
    place = whole.rindex(b"model.weights.h5") - 400
    (tmp_path / "2.keras").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    assert source.load(second, scored) is None
    assert np.all(np.asarray(scored.layers[0].kernel) == 1.0)
    (tmp_path / "2.keras").write_bytes(whole)
    assert source.load(second, scored) is not None
    with pytest.raises(TrainingError, match="must be of the model that is scored"):
        source.load(second, model_of(4))


def test_a_file_of_a_model_that_counted_no_updates_tells_none(tmp_path: Path) -> None:
    """Under parameter servers the servers count: each evaluation was told to be behind 0 updates."""
    model_of().save(tmp_path / "1.keras")
    source = FileCheckpoints(tmp_path)
    loaded = source.load(source.find()[0], model_of())
    assert loaded is not None and loaded.iterations is None


def test_files_that_keras_did_not_write_end_no_evaluator(tmp_path: Path) -> None:
    """The directory of the archive says that a part is encrypted, or packed as none is."""
    scored = model_of()
    path = tmp_path / "a.keras"
    source = FileCheckpoints(tmp_path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.weights.h5", bytes(100_000))
    whole = path.read_bytes()
    directory = whole.rindex(b"PK\x01\x02")
    for place, value in ((8, 1), (10, 77)):
        damaged = bytearray(whole)
        damaged[directory + place] = value
        damaged[place - 2] = value
        path.write_bytes(damaged)
        assert source.load(source.find()[0], scored) is None
    path.write_bytes(whole[:50] + b"\xff" * 20 + whole[70:])
    assert source.load(source.find()[0], scored) is None
    path.write_bytes(whole)
    with pytest.raises(TrainingError, match="must be of the model that is scored"):
        source.load(source.find()[0], scored)


def test_files_that_do_not_tell_whether_they_are_whole_are_refused(tmp_path: Path) -> None:
    model_of().save_weights(tmp_path / "a.weights.h5")
    with pytest.raises(TrainingError, match=r"a\.weights\.h5\. Pass insitu\.BackupAndRestore"):
        AnyCheckpoints(tmp_path, None, None).find()
    save(tmp_path, model_of(), 0, 1, 0)
    assert [c.name for c in AnyCheckpoints(tmp_path, None, None).find()] == ["epoch 1"]
