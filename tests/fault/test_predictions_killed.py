"""Predictions of a job are in the file once each, with the numbers of their rows, whatever is killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from job_runs import insitu_at

from insitu.base.context import Context
from insitu.grid import bring_up, dataset, import_cache

ROWS = 300
SCRIPT = """
import os, signal
from pathlib import Path
import keras
import numpy as np
import insitu

way, victim = os.environ["WAY"].split("-")
me = insitu.context()
rows = insitu.dataset("rows").batch(20)
with insitu.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

def predict_early(epoch, logs):
    try:
        insitu.predict_into(model, rows, "early.parquet")
    except insitu.errors.TrainingError as error:
        print("REFUSED", error)

model.fit(rows, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=predict_early)])
if me.is_chief:
    np.savez("weights.npz", *model.get_weights())
killed = Path(os.environ["OUT"]) / "killed"
steps = 0

def count(x, label):
    global steps
    steps += 1
    if way != "alone" and me.index == int(victim) and steps == 5 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return x, label

if way != "alone" or me.is_chief:
    insitu.predict_into(model, rows.map(count), "predicted.parquet")
    print("THERE", os.path.exists("predicted.parquet"))
"""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("way", "backend"),
    [
        ("kill-0", "tensorflow"),
        ("adopt-1", "tensorflow"),
        ("alone-0", "tensorflow"),
        ("kill-1", "jax"),
        pytest.param("kill-1", "tensorflow", marks=pytest.mark.slow),
    ],
)
def test_each_row_is_predicted_once(tmp_path: Path, way: str, backend: str) -> None:
    with insitu_at(tmp_path) as insitu:
        bring_up(insitu.paths, 2)
        rng = np.random.default_rng(0)
        x = rng.normal(size=(ROWS, 4)).astype("float32")
        np.savez(tmp_path / "rows.npz", x=x, label=rng.integers(0, 3, ROWS))
        import_cache(insitu.paths, "rows", [str(tmp_path / "rows.npz")], partitions=6)
        insitu.environment |= {"KERAS_BACKEND": backend, "OUT": str(tmp_path), "WAY": way}
        insitu.script(SCRIPT)
        options = ["--on-loss", "adopt"] if way == "adopt-1" else []
        arguments = ["start", "--workers", "2", "--env", "WAY", "--env", "OUT", *options, "rows"]
        done = insitu.run(*arguments, str(insitu.folder), "train.py")
        assert (tmp_path / "killed").exists() is (way != "alone-0")
        (job,) = insitu.json("ps", "--all")
        described = insitu.json("describe", job["job_id"])
        # Nobody starts again but the victim.
        assert len(described["attempts"]) == 1, done.stdout
        # The file is whole as soon as a call returns.
        assert "THERE True" in done.stdout and "THERE False" not in done.stdout
        assert "REFUSED In a job predict_into is called by the script" in done.stdout
        code = insitu.job(job["job_id"]).code
        found = pq.read_table(code / "predicted.parquet").sort_by("row")
        np.testing.assert_array_equal(found["row"], np.arange(ROWS))
        (of_numbers,) = dataset(
            "rows",
            features=["row", "x"],
            label=None,
            paths=insitu.paths,
            context=Context(insitu.paths),
        ).batch(ROWS)
        kernel, bias = np.load(code / "weights.npz").values()
        assert of_numbers["row"].tolist() == list(range(ROWS))
        np.testing.assert_allclose(
            np.array(found["value"].to_pylist()), of_numbers["x"] @ kernel + bias, rtol=1e-4, atol=1e-5
        )
