"""From `insitu start` to the first training step, on three hosts and on this machine alone.

    python benchmarks/start_on_hosts.py [--quick] [--json FILE]

Hosts are namespaces of this machine, so that needs root, iproute2 and util-linux. Agents run and hold the
rows, and one job has run there before: the cluster is warm. Contenders, in turn: three workers on three
nodes of this machine, and three workers on the three hosts. All share the same processors. The figure is the
time from launching the command until each of the three workers has done its first step.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

INSITU = [sys.executable, "-m", "insitu"]
PATIENCE = 300.0
WORKERS = 3
LOCAL, HOSTS = "this machine", "three hosts"
SCRIPT = """
import os, time
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import insitu

class FirstStep(keras.callbacks.Callback):
    told = False

    def on_train_batch_end(self, batch, logs=None):
        if not self.told:
            print(f"first step at {time.time():.3f}", flush=True)
            self.told = True

strategy = insitu.MultiWorkerMirroredStrategy()
train = insitu.dataset().shuffle().batch(96)
with strategy.scope():
    model = keras.Sequential([
        keras.Input((28, 28, 1)), keras.layers.Rescaling(1 / 255),
        keras.layers.Conv2D(16, 3, activation="relu"), keras.layers.MaxPooling2D(),
        keras.layers.Flatten(), keras.layers.Dense(10),
    ])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(train, epochs=1, verbose=0, callbacks=[FirstStep()])
"""


def run(home: Path, *arguments: str) -> str:
    """Run a command of insitu in a home; return all that it prints."""
    done = subprocess.run(
        [*INSITU, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "INSITU_HOME": str(home), "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    if done.returncode:
        raise SystemExit(f"insitu {' '.join(arguments)}: {done.stdout}")
    return done.stdout


def start(home: Path, code: Path) -> float:
    """Return the seconds until all workers of a new job have done their first steps."""
    began = time.time()
    told = run(home, "start", "--workers", str(WORKERS), "--threads", "1", "rows", str(code), "train.py")
    steps = [float(at) for at in re.findall(r"first step at ([\d.]+)", told)]
    if len(steps) != WORKERS:
        raise SystemExit(f"{len(steps)} of {WORKERS} workers told of their first step:\n{told}")
    return max(steps) - began


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    machine = common.machine()
    from hosts_lab import HostsLab, find_obstacle

    if obstacle := find_obstacle():
        sys.exit(f"Hosts can't be made here: {obstacle}")
    with tempfile.TemporaryDirectory() as folder, HostsLab(Path(folder), WORKERS) as hosts:
        root, code = Path(folder), Path(folder) / "code"
        local, head = root / "local", root / "head"
        code.mkdir()
        (code / "train.py").write_text(SCRIPT)
        random = np.random.default_rng(0)
        np.savez(
            root / "rows.npz",
            x=random.integers(0, 256, (3072, 28, 28, 1), dtype=np.uint8),
            label=random.integers(0, 10, 3072),
        )
        (root / "hosts.txt").write_text("".join(f"{host.address}\n" for host in hosts.hosts))
        run(local, "up", "--nodes", str(WORKERS))
        try:
            run(head, "up", "--hosts", str(root / "hosts.txt"), "--launcher", hosts.launcher, "--insitu",
                f"{sys.executable} -m insitu", "--interface", hosts.gateway)  # fmt: skip
            for home in (local, head):
                run(home, "import", "rows", str(root / "rows.npz"), "--partitions", "6")
            contenders: dict[str, Callable[[], float]] = {
                LOCAL: lambda: start(local, code),
                HOSTS: lambda: start(head, code),
            }
            rounds = options.rounds or (1 if options.quick else 5)
            results = common.alternate(contenders, "seconds to the first step of all", rounds)
        finally:
            for home in (head, local):
                subprocess.run(
                    [*INSITU, "down", "--force"],
                    capture_output=True,
                    timeout=PATIENCE,
                    env={**os.environ, "INSITU_HOME": str(home)},
                )
    print(common.machine_line(machine))
    print(common.results_table(results, LOCAL, more_is_better=False, form="{:.2f}".format))
    common.save_json(options.json, "start_on_hosts", machine, results=common.results_json(results))


if __name__ == "__main__":
    main()
