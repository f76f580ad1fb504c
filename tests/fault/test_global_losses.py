"""A worker is killed while it trains a loss over the rows of the global batch: the job ends with the same
bits, which are plain Keras' numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_runs import insitu_at

SCRIPT = """
import json, os, signal, sys
from contextlib import nullcontext
from pathlib import Path

import keras
import numpy as np

import insitu

ops, me, out = keras.ops, insitu.context(), Path(sys.argv[1])
kill = len(sys.argv) > 2


class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if kill and me.index == 1 and self.model.optimizer.iterations == 5 and not (out / "killed").exists():
            (out / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def contrast(pairs, found):
    own = ops.arange(ops.shape(found)[0])
    return keras.losses.sparse_categorical_crossentropy(own, found @ ops.transpose(pairs), from_logits=True)


x, y = np.random.default_rng(0).normal(size=(2, 43, 4)).astype("float32")
keras.utils.set_random_seed(3)
with insitu.MultiWorkerMirroredStrategy().scope() if me.job_id else nullcontext():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(4)])
    model.compile(keras.optimizers.Adam(0.01), insitu.over_batch(contrast, rows="global"))
history = model.fit(
    x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, validation_data=(x, y),
    callbacks=[insitu.BackupAndRestore(), Kill()] if me.job_id else [],
).history
values = [w.tolist() for w in model.get_weights()]
if not me.job_id or me.is_chief:
    (out / "result.json").write_text(json.dumps([history, values]))
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


def result_of(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("backend", ["tensorflow", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_killed_worker_changes_nothing(backend: str, tmp_path: Path) -> None:
    with insitu_at(tmp_path) as insitu:
        insitu.environment["KERAS_BACKEND"] = backend
        insitu.script(SCRIPT)
        results = []
        for options in ((), ("kill",)):
            folder = tmp_path / f"results {len(options)}"
            folder.mkdir()
            started = insitu.start(
                "--workers", "2", "--threads", "1", command=("train.py", str(folder), *options)
            )
            results.append(result_of(folder))
        assert (folder / "killed").exists()
        job = insitu.json("describe", started.job_id)
        assert [each["how"] for each in job["recoveries"]] == ["replaced"], job["recoveries"]
        plain = tmp_path / "plain"
        plain.mkdir()
        script = [sys.executable, str(insitu.folder / "train.py"), str(plain)]
        environment = {**os.environ, "KERAS_BACKEND": backend}
        subprocess.run(script, env=environment, check=True, timeout=200, capture_output=True)
    assert results[0] == results[1]
    (history, weights), (expected, expected_weights) = results[0], result_of(plain)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    for mine, theirs in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
