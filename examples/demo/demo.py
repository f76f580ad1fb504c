"""Trains on three simulated nodes, kills a worker, and shows that the weights are as without the kill.

Everything is written to a temporary folder, which is removed at the end. The data is scikit-learn's digits,
or with --data the Quick, Draw! files of a folder (one .npy file per class).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

HERE = Path(__file__).parent
WORKERS = 3
DEADLINE = 300.0
"""Seconds that one command may take, before the demo fails."""

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Plan:
    """The data to import, and how to train on it."""

    name: str
    source: Path
    epochs: int
    batch: int
    brightest: float
    """The value of a white pixel."""
    least_accuracy: float
    """The accuracy on held-out rows below which the demo fails."""


def digits(folder: Path) -> Plan:
    """Write scikit-learn's digits to `folder`, one .npy file per class."""
    from sklearn.datasets import load_digits

    source = folder / "digits"
    source.mkdir()
    data = load_digits()
    for label in range(10):
        np.save(source / f"{label}.npy", data.images[data.target == label].astype(np.uint8))
    return Plan("digits", source, epochs=30, batch=96, brightest=16.0, least_accuracy=0.95)


def quickdraw(source: Path) -> Plan:
    if not list(source.glob("*.npy")):
        sys.exit(f"--data must be a folder of .npy files, one for each class. Received: {source}")
    return Plan("quickdraw", source, epochs=2, batch=192, brightest=255.0, least_accuracy=0.85)


Disturb = Callable[[str, int, Plan], None]
"""What happens to a job: gets its id, the epoch that begins, and the plan."""


def insitu(*arguments: str, show: bool = True) -> str:
    """Run an `insitu` command as a user would, print it and its output, and return the output."""
    if show:
        console.print(f"[bold cyan]$ insitu {' '.join(arguments)}[/]")
    done = subprocess.run(
        [sys.executable, "-m", "insitu", *arguments], stdout=subprocess.PIPE, text=True, timeout=DEADLINE
    )
    if done.returncode:
        sys.exit(f"insitu {arguments[0]} ended with {done.returncode}")
    if show and done.stdout.strip():
        console.print(done.stdout.rstrip(), markup=False)
    return done.stdout


def describe(job_id: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(insitu("describe", job_id, "--ledger", "--json", show=False))
    return answer


def process_of(job_id: str, task: str) -> psutil.Process | None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if (environment.get("INSITU_JOB_ID"), environment.get("INSITU_TASK")) == (job_id, task):
                return process
    return None


def kill_worker(job_id: str, epoch: int, plan: Plan) -> None:
    """Kill worker 1 in the middle of the training without a warning, as a power cut would."""
    if epoch != plan.epochs // 2 + 1:
        return
    victim = process_of(job_id, "worker:1")
    if victim is not None:
        console.print(f"[bold red]$ kill -9 {victim.pid}[/]   [red]# worker:1, in epoch {epoch}[/]")
        victim.send_signal(signal.SIGKILL)


def train(plan: Plan, disturb: Disturb | None = None, workers: int = WORKERS) -> tuple[str, dict[str, str]]:
    """Run one job to its end. Return its id and the values of the script's RESULT line.

    `disturb` is called when each epoch begins.
    """
    command = ["start", "--workers", str(workers), "--threads", "1", "--seed", "7", "--name", plan.name]
    command += [f"{plan.name}/train", str(HERE), "train.py", plan.name, "--epochs", str(plan.epochs)]
    command += ["--batch", str(plan.batch), "--brightest", str(plan.brightest)]
    console.print(f"[bold cyan]$ insitu {' '.join(command)}[/]")
    process = subprocess.Popen(
        [sys.executable, "-m", "insitu", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    job_id, result = "", {}
    lines: Iterator[str] = process.stdout or iter(())
    for line in lines:
        if not job_id:
            job_id = line.strip()
        if found := re.search(r"RESULT (.*)", line):
            result = dict(pair.split("=") for pair in found[1].split())
        if interesting(line, plan):
            console.print(f"  {line.rstrip()}", markup=False)
        if disturb and (began := re.search(r"Epoch (\d+)/", line)):
            disturb(job_id, int(began[1]), plan)
    if process.wait(DEADLINE) or not result:
        sys.exit(f"The training failed. Its last output: insitu logs {job_id}")
    return job_id, result


def interesting(line: str, plan: Plan) -> bool:
    """Return True for the lines of insitu itself, of some epochs, and of the result."""
    if "[insitu]" in line or "RESULT" in line:
        return True
    epoch = re.search(r"Epoch (\d+)/", line)
    if epoch:
        interesting.epoch = int(epoch[1])  # type: ignore[attr-defined]
    every = max(1, plan.epochs // 6)
    shown = getattr(interesting, "epoch", 0) % every == 0 or plan.epochs <= 3
    return shown and ("accuracy" in line or bool(epoch))


def show_outcome(job_id: str, result: dict[str, str], undisturbed: dict[str, str], plan: Plan) -> bool:
    """Print accuracy, rows, bytes, recovery and weights. Return True if all are as they must be."""
    job = describe(job_id)
    first, *others = job["attempts"]
    replaced = [r for r in job["recoveries"] if r["seconds"] is not None]
    accuracy = float(result["accuracy"])
    lost = sum(epoch["lost"] for epoch in job["ledger"])
    repeated = sum(epoch["repeated"] for epoch in job["ledger"])
    counted = sum(epoch["counted"] for epoch in job["ledger"])
    whole = len(job["ledger"]) == plan.epochs and all(epoch["clean"] for epoch in job["ledger"])
    same = result["weights"] == undisturbed["weights"]
    console.print(Rule("results"))
    table = Table(show_header=False, box=None)
    table.add_row("accuracy on held-out rows", f"[bold]{accuracy:.3f}[/] (at least {plan.least_accuracy})")
    table.add_row(f"rows in {plan.epochs} epochs", f"{counted:,} counted, {lost} lost, {repeated} repeated")
    for task in job["task_list"]:
        reads = task["reads"]
        read = f"{reads['local_bytes']:,} bytes from its own node, {reads['remote_bytes']:,} from others"
        table.add_row(f"{task['task']} on {task['node']} read", read)
    for recovery in replaced:
        tasks = ", ".join(recovery["tasks"])
        after = f"all tasks completed the next step after {recovery['seconds']:.2f} s"
        table.add_row(f"{tasks} {recovery['how']}", after)
    for attempt in others:
        table.add_row(f"attempt {attempt['number']} began", f"after {first['cause']['text']}")
    table.add_row("weights after the kill", result["weights"])
    verdict = "the same bits" if same else "[red]DIFFERENT BITS[/]"
    table.add_row("weights without a kill", f"{undisturbed['weights']}: [bold]{verdict}[/]")
    console.print(table)
    return (
        accuracy >= plan.least_accuracy
        and whole
        and lost == repeated == 0
        and same
        and bool(replaced or others)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a folder of Quick, Draw! .npy files")
    data = parser.parse_args().data
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="insitu-demo-") as folder:
        os.environ["INSITU_HOME"] = str(Path(folder) / "home")
        plan = quickdraw(data) if data else digits(Path(folder))
        console.print(Rule("bring up three nodes and import a data set"))
        insitu("up", "--nodes", "3")
        split = f"train={0.9 if data else 0.85},test={0.1 if data else 0.15}"
        insitu("import", "--label-from-filename", "--split", split, "--partitions", "12", "--backups", "1",
               plan.name, str(plan.source))  # fmt: skip
        insitu("caches")
        console.print(Rule("train, and kill a worker"))
        job_id, result = train(plan, kill_worker)
        console.print(Rule("run the same job without a kill"))
        _, undisturbed = train(plan)
        good = show_outcome(job_id, result, undisturbed, plan)
        insitu("down", "--force")
    console.print(f"[dim]{time.monotonic() - started:.0f} s, cleaned up[/]")
    if not good:
        sys.exit("The demo failed: see the results above")


if __name__ == "__main__":
    main()
