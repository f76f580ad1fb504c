"""A rebalancing beside a training: bytes that move, and what it costs the training's steps.

    python benchmarks/rebalancing.py [--quick] [--json FILE]

Hosts are namespaces of this machine, so that needs root, iproute2 and util-linux. Two hosts hold a cache of
rows of 3 KB, on which one worker for each trains a small network. A third one joins, and `insitu rebalance`
moves a third of the copies there. Contenders, in turn: steps that are trained alone, beside the rebalancing
at the default rate, and beside one without a limit. The figure is milliseconds a step, from the rows that the
first worker has trained in that span. Then the data moves back by `insitu drain`, for the next round. Workers
stay where they are (`--on-rebalance stay`), so that the figure has no move of a task in it. Printed before:
bytes that moved, and the fewest that any plan moves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

INSITU = [sys.executable, "-m", "insitu"]
PATIENCE = 300.0
ALONE, DEFAULT, UNLIMITED = "alone", "beside a rebalancing", "beside one without a limit"
SCRIPT = """
import os
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import insitu

strategy = insitu.MultiWorkerMirroredStrategy()
train = insitu.dataset().shuffle().batch(128)
with strategy.scope():
    model = keras.Sequential([keras.Input((768,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(train.map(lambda row: (row, row[:, :1])), epochs=100000, verbose=0)
"""


def run(*arguments: str, given: str = "") -> str:
    """Run a command of insitu; return what it prints."""
    done = subprocess.run(
        [*INSITU, *arguments], capture_output=True, text=True, input=given, timeout=PATIENCE
    )
    if done.returncode:
        raise RuntimeError(f"insitu {' '.join(arguments)}: {done.stderr}")
    return done.stdout


def wait_until(is_so: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {PATIENCE:g} s: {what}")
        time.sleep(0.05)


class Lab:
    """Three hosts, of which the third holds nothing at first, and a job on the other two."""

    def __init__(self, hosts: Any, folder: Path, megabytes: int) -> None:
        self.hosts = hosts
        first, second, self.joining = hosts.hosts
        listed = "".join(f"{host.address}\n" for host in (first, second, self.joining))
        (folder / "hosts.txt").write_text(listed)
        self.file, self.insitu = folder / "hosts.txt", f"{sys.executable} -m insitu"
        self.up()
        run("drain", self.joining.name, "--deadline", "1h")  # so that the import gives it nothing
        rows = megabytes * 1_000_000 // 3072
        np.save(folder / "rows.npy", np.random.default_rng(0).normal(size=(rows, 768)).astype(np.float32))
        run("import", "rows", str(folder / "rows.npy"), "--partitions", "24")
        run("drain", self.joining.name, "--cancel")
        code = folder / "code"
        code.mkdir()
        (code / "train.py").write_text(SCRIPT)
        # Without a standby: while one loads it takes a processor from the training, rebalancing or not.
        options = ("--workers", "2", "--threads", "1", "--standby", "0", "--on-rebalance", "stay")
        done = subprocess.run(
            [*INSITU, "start", "--detach", "--name", "beside", *options, "rows", str(code), "train.py"],
            capture_output=True,
            text=True,
        )
        self.job = done.stdout.strip()
        wait_until(lambda: self.rows() > 5000, "the training")

    def up(self) -> None:
        run("up", "--hosts", str(self.file), "--launcher", self.hosts.launcher, "--insitu", self.insitu,
            "--interface", self.hosts.gateway)  # fmt: skip

    def empty(self) -> None:
        """Take all data off the host that joins, and give it an empty store: in the old one copies stay for a
        minute, which a rebalancing then needn't fetch."""
        run("drain", self.joining.name, "--deadline", "1h")
        wait_until(lambda: self.state() == "drained", "the host is drained")
        command = [*self.hosts.launcher.replace("{host}", self.joining.address).split()]
        deleted = f"{self.insitu} agent --stop --delete"
        subprocess.run([*command, deleted], check=True, capture_output=True, timeout=PATIENCE)
        self.up()
        run("drain", self.joining.name, "--cancel")

    def state(self) -> str:
        nodes = json.loads(run("nodes", "--json"))
        return str(next(node["state"] for node in nodes if node["node"] == self.joining.name))

    def rows(self) -> int:
        """Return the rows that the first worker has trained."""
        from insitu.base.paths import Paths
        from insitu.base.progress import read_progress
        from insitu.base.spec import TaskId

        found = read_progress(Paths.default().job(self.job).progress(TaskId("worker", 0)))
        return 0 if found is None else found.rows

    def time_steps(self, doing: Any) -> float:
        """Return the milliseconds that a step's rows take while something is done."""
        before, began = self.rows(), time.monotonic()
        doing()
        rows, seconds = self.rows() - before, time.monotonic() - began
        if rows <= 0:
            raise RuntimeError("the training has not continued")
        return seconds * 1e3 * 64 / rows


def main() -> None:
    made = common.parser(__doc__ or "")
    made.add_argument("--only", default="", help="contenders, separated by commas")
    made.add_argument("--megabytes", type=int, help="the size of the cache (1200; 60 with --quick)")
    options = made.parse_args()
    machine = common.machine()
    from hosts_lab import HostsLab, find_obstacle

    if obstacle := find_obstacle():
        sys.exit(f"Hosts can't be made here: {obstacle}")
    rounds = options.rounds or (1 if options.quick else 5)
    megabytes = options.megabytes or (60 if options.quick else 1200)
    moved: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory() as folder, HostsLab(Path(folder), 3) as hosts:
        os.environ["INSITU_HOME"] = str(Path(folder) / "head")
        try:
            lab = Lab(hosts, Path(folder), megabytes)

            def rebalance(*more: str) -> float:
                def move() -> None:
                    (found,) = json.loads(run("rebalance", "rows", "--json", *more))
                    moved.append({"moved": found["moved"], "fewest": found["bytes"]})

                taken = lab.time_steps(move)
                lab.empty()
                return taken

            contenders = {
                ALONE: lambda: lab.time_steps(lambda: time.sleep(3.0 if options.quick else 10.0)),
                DEFAULT: rebalance,
                UNLIMITED: lambda: rebalance("--rate", "0"),
            }
            wanted = options.only.split(",") if options.only else list(contenders)
            chosen = {name: contenders[name] for name in wanted}
            results = common.alternate(chosen, "ms a step of one worker", rounds)
        finally:
            subprocess.run([*INSITU, "down", "--force"], capture_output=True, timeout=PATIENCE)
    most = max(entry["moved"] - entry["fewest"] for entry in moved)
    print(common.machine_line(machine))
    fewest = moved[0]["fewest"]
    print(f"\n{len(moved)} rebalancings moved {fewest:,} bytes each, the fewest; {most:,} more at most\n")
    print(common.results_table(results, wanted[0], more_is_better=False, form="{:.2f}".format))
    common.save_json(options.json, "rebalancing", machine, moved=moved, results=common.results_json(results))


if __name__ == "__main__":
    main()
