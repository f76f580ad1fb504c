"""A script that saves in all of its tasks leaves the files that one process leaves."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from job_runs import insitu_at

SCRIPT = """
import json, os
from pathlib import Path
import keras
import numpy as np
import insitu

me = insitu.context()
if os.environ["WAY"] == "devices":
    insitu.config.set_virtual_devices(2)
    strategy = insitu.MirroredStrategy()
else:
    strategy = insitu.MultiWorkerMirroredStrategy()
out = Path(os.environ["OUT"])

class Log(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        with open("log.txt", "a") as file:
            file.write(f"epoch {epoch}\\n")

with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(512), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((8, 8)), np.ones((8, 1)), batch_size=4, epochs=2, verbose=0,
          callbacks=[Log(), keras.callbacks.CSVLogger("history.csv")])
first = model.layers[0]
for number in range(3):
    first.set_weights([np.full_like(w, number) for w in first.get_weights()])
    for folder in (Path(), out):
        model.save(folder / "model.keras")
        assert keras.models.load_model(folder / "model.keras").layers[0].get_weights()[0][0, 0] == number
        model.save_weights(folder / "model.weights.h5")
        model.load_weights(folder / "model.weights.h5")
        assert first.get_weights()[0][0, 0] == number
    np.savez("history.npz", a=np.full(9999, number))
    assert np.load("history.npz")["a"][-1] == number
    Path("state.tmp").write_text(f"{number}")
    os.replace("state.tmp", "state.txt")
    assert Path("state.txt").read_text() == f"{number}"
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf
        for folder in (Path("exports"), out):
            model.export(folder / "exported", verbose=False)
            tf.saved_model.load(str(folder / "exported"))
    strategy.reduce("sum", 1.0)  # a task that is behind would put its own number in the place of this one
Path("who.txt").write_text(str(me.task))
np.save(f"part-{me.index}.npy", np.full(3, me.index))
strategy.reduce("sum", 1.0)
print("PARTS", [int(np.load(path)[0]) for path in sorted(Path().glob("part-*.npy"))])
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "backend"),
    [
        ("workers", "tensorflow"),
        ("devices", "jax"),
        pytest.param("workers", "jax", marks=pytest.mark.slow),
        pytest.param("devices", "tensorflow", marks=pytest.mark.slow),
        pytest.param("workers", "torch", marks=pytest.mark.torch),
        pytest.param("devices", "torch", marks=pytest.mark.torch),
    ],
)
def test_what_all_tasks_save_is_written_once_and_whole(tmp_path: Path, way: str, backend: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with insitu_at(tmp_path) as insitu:
        insitu.environment |= {"KERAS_BACKEND": backend, "OUT": str(out), "WAY": way}
        insitu.script(SCRIPT)
        if way == "workers":
            done = insitu.start("--workers", "2", "--max-restarts", "0")
            code, said, names = done.job.code, done.out + done.err, ["part-0.npy", "part-1.npy"]
        else:
            code, names = insitu.folder, ["part-0.npy"]
            said = run_alone(insitu.folder, insitu.environment)
        assert f"PARTS {list(range(len(names)))}" in said
        exports = ["exports"] if backend == "tensorflow" else []
        saved = ["history.csv", "history.npz", "log.txt", "model.keras", "model.weights.h5"]
        others = [*names, *exports, "state.txt", "train.py", "who.txt"]
        assert sorted(os.listdir(code)) == sorted([*saved, *others])
        assert sorted(os.listdir(out)) == ["exported"] * bool(exports) + ["model.keras", "model.weights.h5"]
        assert (code / "log.txt").read_text() == "epoch 0\nepoch 1\n"
        assert (code / "who.txt").read_text() == "worker:0"
        assert len((code / "history.csv").read_text().splitlines()) == 3
        assert np.load(code / "history.npz")["a"][-1] == 2
        for folder in (code, out):
            with zipfile.ZipFile(folder / "model.keras") as archive:
                assert archive.testzip() is None


def run_alone(folder: Path, environment: dict[str, str]) -> str:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
