"""Work of the chief alone, after the scripts of the other workers have ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_runs import Run, insitu_at

SCRIPT = """
import sys
import keras
import numpy as np
import insitu
from insitu.base.errors import CollectiveMismatch

me = insitu.context()
strategy = insitu.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(50, 4)).astype("float32"), rng.normal(size=(50, 1)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
if sys.argv[1] == "fit":
    if me.is_chief:
        model.fit(x, y, verbose=0)
    sys.exit()
model.fit(x, y, batch_size=16, epochs=2, verbose=0)
if me.is_chief:
    logs = model.evaluate(x, y, batch_size=16, verbose=0)
    predicted = model.predict(x, batch_size=16, verbose=0)
    model.save("model.keras")
    plain = keras.models.load_model("model.keras")
    np.testing.assert_allclose(logs, plain.evaluate(x, y, batch_size=16, verbose=0), rtol=1e-6)
    np.testing.assert_allclose(predicted, plain.predict(x, batch_size=16, verbose=0), rtol=1e-6)
    print("RESULT equal", len(predicted))
    for call in (lambda: model.fit(x, y, verbose=0), lambda: strategy.reduce("sum", 1.0)):
        try:
            call()
        except CollectiveMismatch as error:
            print("REFUSED", error)
"""


def run(root: Path, how: str, code: int) -> Run:
    with insitu_at(root) as insitu:
        insitu.script(SCRIPT)
        return insitu.start("--workers", "2", command=("train.py", how), code=code)


def test_the_chief_evaluates_predicts_and_saves_alone(tmp_path: Path) -> None:
    done = run(tmp_path, "whole", 0)
    output = done.out + done.err
    assert "RESULT equal 50" in output
    assert "worker:1 ended well; the others continue without: worker:0 runs shards 0, 1" in output
    refused = [line for line in output.splitlines() if "REFUSED" in line]
    assert len(refused) == 2 and all("the script of worker:1 has ended" in line for line in refused)
    assert "makes fit() as call 4 at train.py:" in refused[0]
    assert "attempt 2" not in output


@pytest.mark.slow
def test_a_fit_of_the_chief_alone_is_told_once(tmp_path: Path) -> None:
    done = run(tmp_path, "fit", 1)
    output = done.out + done.err
    assert "worker:0 makes fit() as call 1 at train.py:" in output
    assert "the script of worker:1 has ended" in output and "attempt 2" not in output
