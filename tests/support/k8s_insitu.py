"""A cluster of insitu on test nodes of Kubernetes: its commands, and a job to train."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CliRunner
from k8s_kubelet import Cluster
from k8s_plane import wait_for

from insitu.extensions.kubernetes.client import KubeconfigTransport

IMAGE = "insitu:test"
SMALL = ("--cpu", "200m", "--memory", "1Gi", "--image", IMAGE, "--timeout", "3m")
START = ("insitu", "start", "--workers", "2", "--seed", "1", "--threads", "1", "--standby", "0")
CODE = ("d", "/tmp/job", "train.py")
IN_PODS = ("--engine", "k8s", "--memory-per-worker", "256")
_USER = "10001"
SCRIPT = """
import hashlib
import keras, insitu
train = insitu.dataset("d", label="y").shuffle().batch(64)
with insitu.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
model.fit(train, epochs=40, callbacks=[insitu.BackupAndRestore()], verbose=0)
print("weights", hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest())
"""


def use(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands read a kubeconfig."""
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))


def act_as_administrator(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands reach a cluster. The test kubelet runs no commands in pods for others, so `execute`
    enters a container's namespaces in its place."""
    use(cluster.plane.kubeconfig, monkeypatch)

    def execute(_: object, namespace: str, pod: str, container: str, command: Sequence[str]) -> Any:
        done = run_in(cluster, namespace, pod, *command, container=container)
        return done.returncode, done.stdout, done.stderr

    monkeypatch.setattr(KubeconfigTransport, "execute", execute)


def run_in(
    cluster: Cluster, namespace: str, pod: str, *command: str, container: str = "head", given: bytes = b""
) -> subprocess.CompletedProcess[str]:
    """Run a command in a container, as `kubectl exec` does."""
    found = next(each for each in cluster.find(namespace, pod).containers if each.name == container)
    enter = [
        "nsenter",
        "-t",
        str(found.pid),
        *["-m", "-p", "-u", "-i", "-n", "--root", "-S"],
        _USER,
        "-G",
        _USER,
    ]
    variables = [f"{name}={value}" for name, value in found.environment.items()]
    return subprocess.run(
        [*enter, "env", "-i", *variables, "KERAS_BACKEND=jax", *command],
        input=given.decode(),
        capture_output=True,
        text=True,
        timeout=200,
        cwd="/",
    )


def head(cluster: Cluster, namespace: str, *command: str, given: bytes = b"") -> str:
    """Run a command in the head's pod. Returns its output."""
    done = run_in(cluster, namespace, "head-0", *command, given=given)
    assert done.returncode == 0, done.stderr
    return done.stdout


def insitu(*arguments: str) -> tuple[int, str, str]:
    """Run `insitu k8s`."""
    done = CliRunner().run(["k8s", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def write_input(cluster: Cluster, namespace: str) -> None:
    """Write rows for a cache, and a job's folder, into the head's pod."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 8)).astype("float32").tolist()
    lines = "".join(json.dumps({"x": row, "y": int(sum(row) > 0)}) + "\n" for row in x)
    for path, text in (("/tmp/d.jsonl", lines), ("/tmp/job/train.py", SCRIPT)):
        script = f"mkdir -p /tmp/job && cat > {path}"
        head(cluster, namespace, "sh", "-c", script, given=text.encode())


def make_stores(cluster: Cluster, namespace: str) -> None:
    """Make two stores in a new namespace, and import the rows of jobs."""
    with pytest.MonkeyPatch.context() as patch:
        act_as_administrator(cluster, patch)
        code, _, said = insitu("up", "--nodes", "2", "--create-namespace", "--namespace", namespace, *SMALL)
        assert code == 0, said
        write_input(cluster, namespace)
        head(cluster, namespace, "insitu", "import", "d", "/tmp/d.jsonl", "--backups", "1")


def train_in_stores(cluster: Cluster, namespace: str) -> str:
    """Train in the pods of the stores. Returns the digest of the weights."""
    head(cluster, namespace, *START, "--name", "calm", *CODE)
    (found,) = read_weights(cluster, namespace, "calm")
    return found


def start_in_pods(cluster: Cluster, namespace: str, name: str, *options: str) -> str:
    """Start a job in pods of its own. Returns its id."""
    return head(cluster, namespace, *START, "--name", name, "--detach", *IN_PODS, *options, *CODE).strip()


def wait_until_trains(cluster: Cluster, namespace: str, name: str) -> None:
    wait_for(
        lambda: (list_jobs(cluster, namespace)[name]["progress"] or {}).get("epoch", 0) >= 2,
        120,
        lambda: head(cluster, namespace, "insitu", "logs", name),
    )


def wait_for_state(cluster: Cluster, namespace: str, name: str, state: str) -> None:
    wait_for(
        lambda: list_jobs(cluster, namespace)[name]["state"] == state,
        240,
        lambda: head(cluster, namespace, "insitu", "logs", name),
    )


def list_jobs(cluster: Cluster, namespace: str) -> dict[str, dict[str, Any]]:
    """Return what the head says of each job, by the beginning of its id."""
    listed = json.loads(head(cluster, namespace, "insitu", "ps", "--all", "--json"))
    return {each["job_id"].rpartition("-")[0]: each for each in listed}


def read_weights(cluster: Cluster, namespace: str, job: str) -> set[str]:
    """Return the digests of weights that the tasks of a job have printed."""
    logs = head(cluster, namespace, "insitu", "logs", job)
    return {line.rsplit(" ", 1)[-1] for line in logs.splitlines() if " weights " in line}
