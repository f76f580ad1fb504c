"""Jobs that experiment trackers show, with MLflow's server and Trackio's folder. Run by `make test-track`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from free_ports import free_addresses
from job_runs import JOB_PATIENCE, Insitu, insitu_at, wait_for

mlflow_tracking = pytest.importorskip("mlflow.tracking")
trackio_storage = pytest.importorskip("trackio.sqlite_storage")
pytestmark = pytest.mark.long

EPOCHS = 6
SCRIPT = f"""
import os, signal, sys, time
from pathlib import Path
import keras
import insitu

me = insitu.context()
where, how = Path(sys.argv[1]), sys.argv[2]
keras.utils.set_random_seed(0)
strategy = insitu.MultiWorkerMirroredStrategy()
train = insitu.dataset("rows").shuffle().batch(32)


class Dying(keras.callbacks.Callback):
    # Comes behind the tracker: an epoch is logged, and no task has done the unit behind it.

    def on_epoch_end(self, epoch, logs=None):
        if me.is_chief and how == "kill" and me.incarnation == 1 and epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if me.is_chief and how == "stop" and epoch == 3 and not (where / "seen").exists():
            (where / "seen").touch()
            time.sleep(600)

    def on_train_batch_end(self, batch, logs=None):
        if me.is_chief and how == "kill" and me.incarnation == 2 and self.model.optimizer.iterations == 85:
            os.kill(os.getpid(), signal.SIGKILL)


with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
given = [insitu.track(sys.argv[3], every=5, parameters={{"note": "mine"}})] if len(sys.argv) > 3 else []
model.fit(train, epochs={EPOCHS}, verbose=2, callbacks=[*given, insitu.BackupAndRestore(), Dying()])
model.save("model.keras")
"""
STEPS = 19
"""Steps of an epoch: 600 rows."""


class Server:
    """MLflow's server on this machine, which can be taken away."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (host,) = free_addresses(1)
        self.port = host.rpartition(":")[2]
        self.address = f"http://{host}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", self.port]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/store.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = {n: value for n, value in os.environ.items() if not n.startswith("INSITU_")}
        environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        wait_for("MLflow's server", self._answers, JOB_PATIENCE)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def read_runs(self, experiment: str) -> list[dict[str, Any]]:
        client = mlflow_tracking.MlflowClient(self.address)
        found = client.get_experiment_by_name(experiment)
        runs = client.search_runs([found.experiment_id]) if found else []
        return [
            {
                "name": run.info.run_name,
                "status": run.info.status,
                "parameters": run.data.params,
                "files": [each.path for each in client.list_artifacts(run.info.run_id)],
                "steps": {
                    name: [each.step for each in client.get_metric_history(run.info.run_id, name)]
                    for name in run.data.metrics
                },
            }
            for run in runs
        ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("mlflow"))
    found.start()
    yield found
    found.stop()


@pytest.fixture
def insitu(tmp_path: Path) -> Iterator[Insitu]:
    rng = np.random.default_rng(0)
    with insitu_at(tmp_path) as insitu:
        rows = rng.normal(size=(600, 4)).astype(np.float32)
        np.savez(insitu.folder / "rows.npz", x=rows, label=rows[:, :3].argmax(axis=1))
        insitu.run("import", "rows", "rows.npz", cwd=insitu.folder)
        insitu.script(SCRIPT)
        insitu.environment |= {"KERAS_BACKEND": "jax", "TRACKIO_DIR": str(tmp_path / "trackio")}
        yield insitu


def start(
    insitu: Insitu, how: str, *options: str, tracker: str = "", code: int | None = 0
) -> tuple[str, str]:
    """Runs a job on two workers. Returns its id and its output."""
    script = ["train.py", str(insitu.folder.parent), how, *([tracker] if tracker else [])]
    done = insitu.run("start", "--workers", "2", *options, "rows", str(insitu.folder), *script)
    job = insitu.json("ps", "--all")[-1]["job_id"]
    return job, done.stdout + done.stderr


def test_a_killed_chief_leaves_one_run_with_each_step_once(server: Server, insitu: Insitu) -> None:
    job, output = start(insitu, "kill", tracker=f"mlflow:{server.address}#killed")
    assert output.count("replacing worker:0") == 2, output
    (run,) = server.read_runs("killed")
    assert (run["name"], run["status"], run["files"]) == (job, "FINISHED", ["model.keras"])
    ends = [STEPS * epoch for epoch in range(1, EPOCHS + 1)]
    assert run["steps"]["loss"] == run["steps"]["accuracy"] == run["steps"]["system/memory_bytes"] == ends
    assert run["steps"]["batch/loss"] == list(range(5, STEPS * EPOCHS + 1, 5))
    expected = {"job/workers": "2", "job/cache": "rows", "note": "mine", "model/parameters": "15"}
    assert expected.items() <= run["parameters"].items()
    (described,) = insitu.json("describe", job)["tracking"]
    assert described["link"].startswith(f"{server.address}/#/experiments/") and described["waiting"] == 0
    assert described["link"] in insitu.run("describe", job).stdout
    assert described["link"] in insitu.output(job)


def test_a_resumed_job_continues_its_run(server: Server, insitu: Insitu) -> None:
    uri = f"mlflow:{server.address}#resumed"
    script = ["train.py", str(insitu.folder.parent), "stop"]
    command = ["start", "--detach", "--workers", "2", "--track", uri, "rows", str(insitu.folder), *script]
    job = insitu.run(*command).stdout.strip()
    wait_for("the fourth epoch", (insitu.folder.parent / "seen").exists, JOB_PATIENCE)
    insitu.run("stop", job)
    insitu.run("resume", job)
    (run,) = server.read_runs("resumed")
    assert (run["name"], run["status"]) == (job, "FINISHED")
    assert run["steps"]["loss"] == list(range(EPOCHS))


def test_a_tracker_that_is_unreachable_costs_no_training_and_gets_all_later(
    server: Server, insitu: Insitu
) -> None:
    server.stop()
    insitu.environment["MLFLOW_TRACKING_TOKEN"] = "do-not-print-this-token"
    job, output = start(insitu, "end", "--track", f"mlflow:{server.address}#late")
    assert output.count("it isn't reachable") == 1, output
    assert output.count("`insitu track JOB` sends them later") == 1, output
    (described,) = insitu.json("describe", job)["tracking"]
    # Parameters, the epochs, the model, the end.
    assert described["waiting"] == 1 + EPOCHS + 1 + 1 and described["problem"]
    assert "The tracker takes no records" in insitu.run("track", job, code=1).stderr
    server.start()
    assert server.read_runs("late") == []
    for _ in range(2):  # the second time there is nothing left
        insitu.run("track", job)
    (run,) = server.read_runs("late")
    assert (run["status"], run["steps"]["loss"], run["files"]) == (
        "FINISHED",
        list(range(EPOCHS)),
        ["model.keras"],
    )
    written = [path.read_bytes() for path in insitu.job(job).root.rglob("*") if path.is_file()]
    assert written and not any(b"do-not-print-this-token" in each for each in written)


def test_trackio_shows_one_run_with_each_step_once(insitu: Insitu) -> None:
    job, output = start(insitu, "kill", tracker="trackio#killed")
    assert output.count("replacing worker:0") == 2, output
    program = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S; "
        "print(json.dumps([[r['name'], [[l['step'], sorted(l)] for l in S.get_logs('killed', r['name'])]] "
        "for r in S.get_run_records('killed')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=insitu.environment,
        capture_output=True,
        text=True,
        timeout=JOB_PATIENCE,
        check=True,
    )
    ((name, logs),) = json.loads(done.stdout.splitlines()[-1])
    assert name == job
    assert [step for step, names in logs if "loss" in names] == [STEPS * e for e in range(1, EPOCHS + 1)]
    assert [s for s, names in logs if "batch/loss" in names] == list(range(5, STEPS * EPOCHS + 1, 5))
