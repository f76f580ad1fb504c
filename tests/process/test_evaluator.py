"""A job with an evaluator: it scores the last checkpoint whoever is killed, and the job ends with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 280.0
HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"

KILLED = """
import json, os, signal, sys
from pathlib import Path
import keras
import numpy as np
import insitu

out, me = Path(sys.argv[1]), insitu.context()
keras.utils.set_random_seed(5)
x = np.random.default_rng(0).normal(size=(230, 6)).astype("float32")
y = (x[:, 0] > 0).astype("int64")
strategy = insitu.MultiWorkerMirroredStrategy()
with strategy.scope():
    layers = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])


def die(place):
    if me.incarnation == 1:
        (out / f"killed-{place}").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)


class Kill(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1 and me.is_chief:
            die("chief")

    def on_test_end(self, logs=None):
        if me.role == "evaluator":
            die("evaluator")


if me.role == "evaluator":
    insitu.SidecarEvaluator(model, (x[:100], y[:100]), callbacks=[Kill()], poll_seconds=0.1).start()
else:
    model.fit(x, y, batch_size=50, epochs=4, verbose=0, callbacks=[insitu.BackupAndRestore(), Kill()])
    scores = model.evaluate(x[:100], y[:100], verbose=0, return_dict=True)
    if me.is_chief:
        (out / "scores.json").write_text(json.dumps(scores))
"""


class Jobs:
    """`insitu start` of one script in a home of its own."""

    def __init__(self, root: Path, script: str) -> None:
        self.out = root / "out"
        self.out.mkdir()
        self._folder = root / "job"
        self._folder.mkdir()
        (self._folder / "train.py").write_text(script)
        self._environment = {**os.environ, "INSITU_HOME": str(root / "home"), "NO_COLOR": "1"}

    def insitu(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "insitu", *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    def run(self, *options: str) -> tuple[dict[str, Any], str]:
        """(what `describe` says of the job, its output)."""
        done = self.insitu("start", *options, "-", str(self._folder), "train.py", str(self.out))
        job_id = done.stderr.splitlines()[0].strip()
        return json.loads(self.insitu("describe", job_id, "--goodput", "--json").stdout), done.stdout


SEVERAL = """
import json, sys
from pathlib import Path
import keras
import numpy as np
import insitu
from insitu import estimator as est

out, me = Path(sys.argv[1]), insitu.context()
x = np.arange(64, dtype="float32")[:, None] / 64


def model_fn(features, labels, mode):
    found = keras.layers.Dense(1, kernel_initializer="ones")(features)
    loss = keras.ops.mean(keras.ops.square(found - labels))
    return est.EstimatorSpec(mode, found, loss, keras.optimizers.SGD(0.1))


def run(trained, factor, max_steps, hooks=()):
    data = lambda: (x, factor * x)
    given = {} if isinstance(trained, est.Estimator) else {"config": est.RunConfig(save_checkpoints_steps=5)}
    spec = est.EvalSpec(data, start_delay_secs=0, throttle_secs=0)
    est.train_and_evaluate(trained, est.TrainSpec(data, max_steps, hooks), spec, **given)


config = est.RunConfig(save_checkpoints_steps=5, keep_checkpoint_max=2)
one = est.Estimator(model_fn, str(out / "one"), config)
two = est.Estimator(model_fn, str(out / "two"), config)
run(one, 2, 20)
if me.role == "evaluator" and me.incarnation == 1:
    sys.exit(3)  # it is started again, and continues with the second
run(two, 3, 1 << 30, [est.stop_if_lower_hook("loss", 0.1)])  # ends by scores alone
run(one, 2, 25)
with insitu.MultiWorkerMirroredStrategy().scope():
    plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
if me.role != "evaluator":
    plain.fit(x, x, verbose=0, callbacks=[insitu.BackupAndRestore()])
run(plain, 4, 1 << 30, [est.stop_if_higher_hook("loss", -1.0)])
"""


@pytest.mark.long
def test_each_training_of_a_script_is_scored_while_it_goes_on(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, SEVERAL)
    job, _output = jobs.run("--workers", "1", "--evaluator", "--threads", "1")
    assert job["state"] == "finished"
    found = [(e["checkpoint"], e["iterations"], e["metrics"]["loss"]) for e in job["evaluations"]]
    of = {
        number: [(steps, loss) for name, steps, loss in found if name.startswith(f"training {number}, ")]
        for number in (2, 3, 4)
    }
    first = [(steps, loss) for name, steps, loss in found if not name.startswith("training")]
    assert first[-1][0] == 20 and of[3][-1][0] == 25 and of[3][-1][1] < first[-1][1]
    assert of[2][-1][1] < 0.1 and len(of[4]) >= 2
    assert len({name for name, *_ in found}) == len(found)
    assert {
        path.name for path in (Path(job["folder"]) / "summaries" / "evaluator-0").iterdir() if path.is_dir()
    } == {
        "training-2",
        "training-3",
        "training-4",
    }


@pytest.mark.long
def test_the_last_checkpoint_is_scored_though_the_evaluator_and_the_chief_are_killed(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, KILLED)
    job, output = jobs.run("--workers", "2", "--evaluator", "--threads", "1")
    assert {path.name for path in jobs.out.glob("killed-*")} == {"killed-chief", "killed-evaluator"}
    assert job["state"] == "finished" and job["exit_code"] == 0
    attempts = {task["task"]: task["attempt"] for task in job["task_list"]}
    assert attempts == {"worker:0": 2, "worker:1": 1, "evaluator:0": 2}
    names = [evaluation["checkpoint"] for evaluation in job["evaluations"]]
    assert names[-1] == "epoch 4" and len(set(names)) == len(names)
    expected = json.loads((jobs.out / "scores.json").read_text())
    assert job["evaluations"][-1]["metrics"] == pytest.approx(expected, rel=1e-5)
    assert "evaluation of epoch 4 (20 updates): " in output
    (account,) = job["goodput"]["other_tasks"]
    assert account["task"] == "evaluator:0" and account["seconds"]["evaluation"] > 0
    assert account["seconds"]["wait"] > 0 and account["seconds"]["recovery"] > 0  # it was killed once
    assert sum(account["seconds"].values()) == pytest.approx(job["goodput"]["wall"], rel=0.01)
    assert list((Path(job["folder"]) / "summaries" / "evaluator-0").iterdir())


def examples() -> list[str]:
    texts = [(HOW_TO / name).read_text() for name in ("evaluator.md", "train-and-evaluate.md")]
    return re.findall(r"```python\n(.*?)```", "".join(texts), re.DOTALL)


@pytest.mark.long
def test_the_example_beside_fit_runs_as_written(tmp_path: Path) -> None:
    job, _ = Jobs(tmp_path, examples()[0]).run("--workers", "2", "--evaluator")
    assert job["state"] == "finished"
    assert job["evaluations"][-1]["checkpoint"] == "epoch 4"
    assert set(job["evaluations"][-1]["metrics"]) == {"loss", "mae"}


KILL = """
import os, signal, sys
from pathlib import Path


class Kill(estimator.SessionRunHook):
    def after_run(self, run_context, run_values):
        me = insitu.context()
        if self.global_step == 60 and me.is_chief and me.incarnation == 1:
            Path(sys.argv[1], "killed").write_text(str(me.task))
            os.kill(os.getpid(), signal.SIGKILL)


"""


@pytest.mark.slow
def test_a_chief_that_is_killed_changes_no_score_of_train_and_evaluate(tmp_path: Path) -> None:
    before, strategy, after = examples()[1].partition("with insitu.MultiWorkerMirroredStrategy()")
    killing = before + KILL + strategy + after.replace("hooks=[", "hooks=[Kill(), ", 1)
    scores = []
    for name, script in (("whole", examples()[1]), ("killed", killing)):
        (tmp_path / name).mkdir()
        jobs = Jobs(tmp_path / name, script)
        job, _ = jobs.run("--chief", "--workers", "1", "--evaluator", "--threads", "1")
        assert job["evaluations"][-1]["iterations"] == 100
        scores.append(job["evaluations"][-1]["metrics"])
    assert (jobs.out / "killed").read_text() == "worker:0"
    assert scores[0] == scores[1]


@pytest.mark.parametrize("evaluator", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.long
def test_the_example_of_train_and_evaluate_runs_as_written(tmp_path: Path, evaluator: bool) -> None:
    options = ("--evaluator",) if evaluator else ()
    job, output = Jobs(tmp_path, examples()[1]).run("--chief", "--workers", "1", *options)
    assert job["state"] == "finished" and job["tasks"]["worker"] == 2
    assert job["evaluations"][-1]["iterations"] == 100
    assert "step 50: loss = " in output and output.count("step 100: loss = ") == 1
    final = Path(job["folder"]) / "export" / "final" / "00000100.keras"
    assert final.exists() and f"published {final}" in output
