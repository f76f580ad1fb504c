"""An Estimator and `insitu.adapt` in a job of two workers give the numbers of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

PATIENCE = 280.0
SCRIPT = """
import json, sys
from pathlib import Path
import keras
import numpy as np
import insitu
from insitu import estimator as est

out, me = Path(sys.argv[1]), insitu.context()
scale = keras.layers.Normalization(axis=None)
insitu.adapt(scale, insitu.dataset("rows", features="x", label=None))
mean = float(keras.ops.convert_to_numpy(scale.mean).reshape(()))

x = np.arange(96, dtype="float32")[:, None] / 96
y = 3 * x[:, 0] - 1


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return x[32 * index : 32 * index + 32], y[32 * index : 32 * index + 32]


def model_fn(features, labels, mode):
    found = keras.layers.Dense(1, kernel_initializer="ones")(features)[:, 0]
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, found)
    loss = keras.ops.mean(keras.ops.square(found - labels))
    error = keras.metrics.MeanAbsoluteError()
    error.update_state(labels, found)
    return est.EstimatorSpec(mode, found, loss, keras.optimizers.SGD(0.1), {"mae": error})


model = est.Estimator(model_fn).train(Batches, max_steps=6)
scores = model.evaluate(Batches)
held = {name: model.get_variable_value(name).tolist() for name in model.get_variable_names()}
(out / f"worker-{me.index}.json").write_text(json.dumps([mean, scores, held]))
"""


def insitu(home: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "insitu", *arguments],
        env={**os.environ, "INSITU_HOME": str(home), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.slow
def test_two_workers_have_the_numbers_of_one_process(tmp_path: Path) -> None:
    home, job, out = tmp_path / "home", tmp_path / "job", tmp_path / "out"
    job.mkdir()
    out.mkdir()
    (job / "train.py").write_text(SCRIPT)
    values = np.random.default_rng(0).normal(size=5000).astype("float32")
    np.savez(tmp_path / "rows.npz", x=values)
    insitu(home, "up", "--nodes", "2")
    insitu(home, "import", "rows", str(tmp_path / "rows.npz"), "--partitions", "8")
    insitu(home, "start", "--workers", "2", "--threads", "1", "rows", str(job), "train.py", str(out))
    one, two = (json.loads((out / f"worker-{index}.json").read_text()) for index in range(2))
    assert one == two
    mean, scores, held = one
    assert mean == pytest.approx(values.mean(dtype=np.float64), rel=1e-5)
    plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    plain.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    x: Any = np.arange(96, dtype="float32")[:, None] / 96
    y = 3 * x - 1
    plain.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    for value, expected in zip(held.values(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    expected_scores = plain.evaluate(x, y, verbose=0, return_dict=True)
    assert scores == pytest.approx({**expected_scores, "global_step": 6}, rel=1e-4)
