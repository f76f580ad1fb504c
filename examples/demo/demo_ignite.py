"""Trains beside three servers of Apache Ignite; one of them is killed meanwhile, and another one joins.

Needs Java 11 to 21 and Maven. Servers run on loopback, and all is written to a temporary folder that is
removed at the end. The data is scikit-learn's digits, or with --data the Quick, Draw! files of a folder (one
.npy file per class); each drawing is an object with nested metadata.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from demo import DEADLINE, HERE, console, describe, insitu
from rich.rule import Rule
from rich.table import Table

from insitu.grid.sources import describe_moves

sys.path.insert(0, str(HERE.parents[1] / "tests" / "support"))

from ignite_servers import IgniteServers, find_missing

CACHE = "grid16_drawings"
SERVERS = 3


def read_drawings(data: Path | None) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return images, labels, and the names of the classes."""
    if data is not None:
        files = sorted(data.glob("*.npy"))
        if not files:
            sys.exit(f"--data must be a folder of .npy files, one for each class. Received: {data}")
        images = [np.load(file).reshape(-1, 28, 28) for file in files]
        labels = np.repeat(np.arange(len(files), dtype=np.int32), [len(rows) for rows in images])
        return np.concatenate(images), labels, [file.stem for file in files]
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images.astype(np.uint8), digits.target.astype(np.int32), list("0123456789")


def write_rows(target: Path, data: Path | None) -> tuple[int, int]:
    """Write all drawings with their metadata. Returns how many, and the pixels of a side."""
    images, labels, names = read_drawings(data)
    rows = len(images)
    np.savez(
        target,
        **{
            "key": np.arange(rows),
            "image": images,
            "label": labels,
            "meta.word": np.array(names)[labels],
            "meta.ink": images.reshape(rows, -1).astype(bool).mean(axis=1),
            "meta.drawn.second": np.arange(rows) * 7,
        },
    )
    return rows, images.shape[1]


def train(servers: IgniteServers, side: int, epochs: int) -> tuple[str, dict[str, str]]:
    """Run the job; in its middle a server is killed and another one joins.

    Returns its id and the values of the script's RESULT line.
    """
    address = servers.address(CACHE)
    command = ["start", "--workers", "3", "--threads", "1", "--seed", "7", "--tensor"]
    command += [f"image=uint8[{side},{side}]", address, str(HERE), "train_ignite.py", address]
    command += ["drawings/test", "--epochs", str(epochs), "--brightest", "255" if side == 28 else "16"]
    console.print(f"[bold cyan]$ insitu {' '.join(command)}[/]")
    process = subprocess.Popen(
        [sys.executable, "-m", "insitu", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    job_id, result, disturbed = "", {}, False
    for line in process.stdout or ():
        if re.fullmatch(rf"{CACHE}-[0-9a-f]+", line.strip()):
            job_id = line.strip()
        if found := re.search(r"RESULT (.*)", line):
            result = dict(pair.split("=") for pair in found[1].split())
        if line.startswith("Read ") or "[insitu]" in line or re.search(r"Epoch \d+/|RESULT", line):
            console.print(f"  {line.rstrip()}", markup=False)
        if f"Epoch {epochs // 3 + 1}/" in line and not disturbed:
            disturbed = True
            console.print("[bold red]  a server of Ignite is killed, and another one joins[/]")
            servers.kill(1)
            servers.start(SERVERS)
    if process.wait(DEADLINE) or not result:
        sys.exit(f"The training failed. Its last output: insitu logs {job_id}")
    return job_id, result


def show_outcome(job_id: str, result: dict[str, str], least: float) -> bool:
    """Print what has come of it. Return True if all is as it must be."""
    job = describe(job_id)
    snapshot, ledger = job["snapshot"], job["ledger"]
    # As `insitu describe` has it while a job runs.
    now = describe_moves(snapshot, timeout=10.0)
    table = Table(show_header=False, box=None)
    table.add_row("accuracy on held-out rows", f"[bold]{float(result['accuracy']):.3f}[/] (at least {least})")
    counted, lost = sum(e["counted"] for e in ledger), sum(e["lost"] for e in ledger)
    repeated = sum(e["repeated"] for e in ledger)
    table.add_row(f"rows in {len(ledger)} epochs", f"{counted:,} counted, {lost} lost, {repeated} repeated")
    local, remote = snapshot["local_bytes"], snapshot["remote_bytes"]
    table.add_row("read from Ignite", f"{local:,} bytes from primary servers, {remote:,} from others")
    for task in job["task_list"]:
        reads = task["reads"]
        read = f"{reads['local_bytes']:,} bytes from its own node, {reads['remote_bytes']:,} from others"
        table.add_row(f"{task['task']} on {task['node']} read", read)
    table.add_row("restarts", str(len(job["attempts"]) - 1))
    versions = f"version {snapshot['topology'][1][0]}, now {now['topology'][0]}" if now["topology"] else "?"
    table.add_row("topology of Ignite", f"{versions}: {now['moved']} partitions have another primary server")
    console.print(Rule("results"), table)
    return (
        float(result["accuracy"]) >= least
        and lost == repeated == remote == 0
        and all(epoch["clean"] for epoch in ledger)
        and all(task["reads"]["remote_bytes"] == 0 for task in job["task_list"])
        and len(job["attempts"]) == 1
        and bool(now["moved"])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a folder of Quick, Draw! .npy files")
    data = parser.parse_args().data
    if missing := find_missing():
        sys.exit(missing)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="insitu-demo-") as folder:
        os.environ["INSITU_HOME"] = str(Path(folder) / "home")
        rows, side = write_rows(Path(folder) / "drawings.npz", data)
        with IgniteServers(Path(folder) / "ignite", region_mib=256) as servers:
            console.print(Rule(f"start {SERVERS} servers of Ignite, and load {rows:,} drawings"))
            servers.start(*range(SERVERS))
            insitu("up", "--nodes", "3")
            insitu("import", "--split", "train=0.9,test=0.1", "drawings", str(Path(folder) / "drawings.npz"))
            insitu("export", "drawings/train", servers.address(CACHE), "--type", "example.Drawing")
            insitu("describe", servers.address(CACHE))
            console.print(Rule("train beside them"))
            job_id, result = train(servers, side, epochs=3 if data else 60)
            good = show_outcome(job_id, result, least=0.8 if data else 0.9)
            insitu("down", "--force")
    console.print(f"[dim]{time.monotonic() - started:.0f} s, cleaned up[/]")
    if not good:
        sys.exit("The demo failed: see the results above")


if __name__ == "__main__":
    main()
