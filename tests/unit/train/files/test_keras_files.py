"""Keras' own saving, loading and callbacks on `insitu://`, and TensorBoard's reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras.src.utils import file_utils

import insitu
from insitu.base.paths import Paths
from insitu.cluster import InsituFileSystem
from insitu.grid import bring_up
from insitu.train.files import install_file_access

X = np.arange(32, dtype="float32").reshape(16, 2)


@pytest.fixture
def system(home: Path) -> InsituFileSystem:
    bring_up(Paths(home), 2)
    return InsituFileSystem(home=str(home), skip_instance_cache=True)


def build() -> Any:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # of Keras and h5py
def test_models_and_callbacks(system: InsituFileSystem) -> None:
    model = build()
    model.fit(
        *(X, X[:, 0]),
        epochs=2,
        verbose=0,
        callbacks=[
            keras.callbacks.BackupAndRestore("insitu://backup", delete_checkpoint=False),
            keras.callbacks.CSVLogger("insitu://logs/history.csv"),
            keras.callbacks.ModelCheckpoint("insitu://models/{epoch}.keras"),
        ],
    )
    model.save("insitu://models/last.keras")
    assert system.ls("models", detail=False) == [f"models/{n}.keras" for n in ("1", "2", "last")]
    loaded = keras.models.load_model("insitu://models/last.keras")
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
    assert len(system.cat("logs/history.csv").splitlines()) == 3
    again = build().fit(
        X, X[:, 0], epochs=3, verbose=0, callbacks=[keras.callbacks.BackupAndRestore("insitu://backup")]
    )
    assert again.epoch == [2] and not system.exists("backup")


def test_insitus_own_checkpoints_and_event_files(system: InsituFileSystem) -> None:
    from tensorboard.backend.event_processing import event_file_loader
    from tensorboard.compat import tensorflow_stub

    with insitu.OneDeviceStrategy().scope():
        model = build()
    callbacks = [insitu.BackupAndRestore("insitu://ckpt"), insitu.TensorBoard("insitu://runs/1")]
    model.fit(X, X[:, 0], epochs=2, verbose=0, callbacks=callbacks)
    assert len(system.glob("ckpt/fit-00000/*/state.json")) == 2
    (path,) = system.find("runs")
    loader = tensorflow_stub.io.gfile
    assert loader.exists(f"insitu://{path}") and loader.glob("insitu://runs/1/*") == [f"insitu://{path}"]
    assert loader.listdir("insitu://runs") == ["1"]
    reader = tensorflow_stub.pywrap_tensorflow.PyRecordReader_New(f"insitu://{path}", 0, b"")
    events = 0
    while True:
        try:
            reader.GetNext()
        except tensorflow_stub.errors.OutOfRangeError:
            break
        events += 1
    assert events >= 4 and event_file_loader


def test_other_schemes_are_keras_own(monkeypatch: pytest.MonkeyPatch) -> None:
    install_file_access()
    access = file_utils.gfile
    install_file_access()
    assert file_utils.gfile is access

    class Original:
        available = False

    monkeypatch.setattr(access, "_original", Original())
    for call in (file_utils.exists, file_utils.isdir, file_utils.listdir, file_utils.makedirs):
        with pytest.raises(ValueError, match="gs://x"):
            call("gs://x/y")
    assert file_utils.join("insitu://v/", "a", "b") == "insitu://v/a/b"
