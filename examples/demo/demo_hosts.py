"""Trains on several hosts; one loses its power meanwhile, another one joins, and data and shards move there.

The hosts are namespaces of this machine, each with processes, a network address and shared memory of its own.
They need root, iproute2 and util-linux. All is removed at the end. The data is scikit-learn's digits, or with
--data the Quick, Draw! files of a folder (one .npy file per class). The job is run again on
one host, if nothing is lost: the weights must have the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from demo import DEADLINE, HERE, Plan, console, describe, digits, insitu, quickdraw, train
from rich.rule import Rule
from rich.table import Table

sys.path.insert(0, str(HERE.parents[1] / "tests" / "support"))

from hosts_lab import Host, HostsLab, find_obstacle

INSITU = f"{sys.executable} -m insitu"
PORT = 7070
"""The port of the head, at an address that only this demo has."""
MOST_HOSTS = 16


def read_nodes() -> dict[str, dict[str, Any]]:
    """Return what `insitu nodes` says of each node, by name."""
    return {node["node"]: node for node in json.loads(insitu("nodes", "--json", show=False))}


def import_data(plan: Plan, split: str, partitions: int) -> None:
    insitu("import", "--label-from-filename", "--split", split, "--partitions", str(partitions),
           "--backups", "1", plan.name, str(plan.source))  # fmt: skip


@dataclass
class Disturbance:
    """Takes a host away from a job, and lets another one join while the job continues."""

    lab: HostsLab
    home: Path
    victim: Host
    joining: Host
    #: The epoch in which the victim lost its power; 0 before.
    killed: int = 0
    #: The epoch in which data had moved to the host that has joined; 0 before.
    moved: int = 0
    #: What `insitu rebalance` has moved there: bytes by cache.
    bytes: dict[str, int] = field(default_factory=dict)

    def disturb(self, job_id: str, epoch: int, plan: Plan) -> None:
        if not self.killed and epoch == plan.epochs // 10 + 2:
            self.killed = epoch
            console.print(f"[bold red]  {self.victim.name} loses its power, in epoch {epoch}[/]")
            self.victim.kill()
        elif (
            self.killed
            and not self.moved
            and any(recovery["seconds"] is not None for recovery in describe(job_id)["recoveries"])
        ):
            self.join()
            self.move(plan)
            self.moved = len(describe(job_id)["ledger"]) + 1

    def join(self) -> None:
        """Start an agent on the host that waits, as somebody who is logged in there would."""
        words = ("agent", "--head", f"{self.lab.gateway}:{PORT}", "--detach", "--token-stdin")
        console.print(f"[bold cyan]{self.joining.name}$ insitu {' '.join(words)} < token[/]")
        launcher = self.lab.launcher.replace("{host}", self.joining.address).split()
        done = subprocess.run(
            [*launcher, f"{INSITU} {' '.join(words)}"],
            input=(self.home / "token").read_text(),
            text=True,
            timeout=DEADLINE,
        )
        if done.returncode:
            sys.exit(f"insitu agent ended with {done.returncode} on {self.joining.name}")

    def move(self, plan: Plan) -> None:
        """Move partitions to the host that has joined, when the loss of the other one is known."""
        deadline = time.monotonic() + DEADLINE
        while read_nodes()[self.victim.name]["state"] != "lost":
            if time.monotonic() > deadline:
                sys.exit(f"{self.victim.name} doesn't count as lost after {DEADLINE:g} s")
            time.sleep(0.5)
        for part in ("train", "test"):
            cache = f"{plan.name}/{part}"
            before = read_nodes().get(self.joining.name, {}).get("bytes", 0)
            insitu("rebalance", cache)
            self.bytes[cache] = read_nodes()[self.joining.name]["bytes"] - before
        console.print(
            f"  [dim]A worker that shares a host with another one follows to {self.joining.name}.[/]"
        )


def show_outcome(
    disturbance: Disturbance, job_id: str, result: dict[str, str], undisturbed: dict[str, str], plan: Plan
) -> bool:
    """Print what has come of it. Return True if all is as it must be."""
    job, victim = describe(job_id), disturbance.victim.name
    ledger, tasks = job["ledger"], job["task_list"]
    lost, repeated = sum(e["lost"] for e in ledger), sum(e["repeated"] for e in ledger)
    replaced = [r for r in job["recoveries"] if r["seconds"] is not None]
    followed = [r for r in replaced if r["how"] == "moved"]
    joined = disturbance.joining.name
    in_time = 0 < disturbance.moved <= plan.epochs
    same = result["weights"] == undisturbed["weights"]
    table = Table(show_header=False, box=None)
    accuracy = float(result["accuracy"])
    table.add_row("accuracy on held-out rows", f"[bold]{accuracy:.3f}[/] (at least {plan.least_accuracy})")
    counted = sum(e["counted"] for e in ledger)
    table.add_row(f"rows in {len(ledger)} epochs", f"{counted:,} counted, {lost} lost, {repeated} repeated")
    table.add_row(f"{victim} lost its power", f"in epoch {disturbance.killed} of {plan.epochs}")
    for recovery in replaced:
        after = f"all tasks completed the next step after {recovery['seconds']:.1f} s"
        table.add_row(f"{', '.join(recovery['tasks'])} {recovery['how']}", after)
    for task in tasks:
        reads = task["reads"]
        read = f"{reads['local_bytes']:,} bytes there, {reads['remote_bytes']:,} from others"
        table.add_row(f"{task['task']} on {task['node']} read", read)
    table.add_row("restarts of the job", str(len(job["attempts"]) - 1))
    for cache, size in disturbance.bytes.items():
        table.add_row(f"{cache} moved", f"{size:,} bytes to {disturbance.joining.name}")
    when = f"in epoch {disturbance.moved} of {plan.epochs}" if in_time else "[red]AFTER THE TRAINING[/]"
    table.add_row("data had moved", when)
    table.add_row("weights after all that", result["weights"])
    verdict = "the same bits" if same else "[red]DIFFERENT BITS[/]"
    table.add_row("weights on one host, no loss", f"{undisturbed['weights']}: [bold]{verdict}[/]")
    console.print(Rule("results"), table)
    return (
        accuracy >= plan.least_accuracy
        and len(ledger) == plan.epochs
        and all(epoch["clean"] and epoch["complete"] for epoch in ledger)
        and lost == repeated == 0
        and len(job["attempts"]) == 1
        and len(replaced) > len(followed) > 0
        and any(task["node"] == joined for task in tasks)
        and all(task["node"] != victim for task in tasks)
        and in_time
        and all(disturbance.bytes.values())
        and same
    )


def take_down(lab: HostsLab, victim: Host) -> bool:
    """End everything on all hosts. Return whether nothing is left there."""
    console.print(f"[bold]  {victim.name} has its power again[/]")
    victim.start()
    victim.wait_for_link()
    insitu("down", "--force")
    processes = [words for host in lab.hosts for words in host.processes().values()]
    files = [name for host in lab.hosts for name in host.shared_memory()]
    left = f"{len(processes)} processes, {len(files)} files of shared memory"
    console.print(f"left on {len(lab.hosts)} hosts: {left}")
    return not processes and not files


def run(folder: Path, data: Path | None, count: int) -> bool:
    """Run the demo with `count` hosts and one that joins. Return whether all was as it must be."""
    plan = quickdraw(data) if data else digits(folder)
    plan = replace(plan, epochs=8 if data else 400)
    split = f"train={0.9 if data else 0.85},test={0.1 if data else 0.15}"
    with HostsLab(folder, count + 1) as lab:
        *hosts, joining = lab.hosts
        home = folder / "head"
        os.environ["INSITU_HOME"] = str(home)
        (folder / "hosts.txt").write_text("".join(f"{host.address}\n" for host in hosts))
        console.print(Rule(f"bring up {count} hosts and import a data set"))
        insitu("up", "--hosts", str(folder / "hosts.txt"), "--launcher", lab.launcher, "--insitu", INSITU,
               "--interface", lab.gateway, "--port", str(PORT))  # fmt: skip
        import_data(plan, split, 4 * count)
        insitu("nodes")
        console.print(Rule(f"train on them; {hosts[1].name} loses its power, {joining.name} joins"))
        disturbance = Disturbance(lab, home, victim=hosts[1], joining=joining)
        job_id, result = train(plan, disturbance.disturb, workers=count)
        insitu("describe", f"{plan.name}/train", "--verify")
        console.print(Rule("run the same job on one host, if nothing is lost"))
        os.environ["INSITU_HOME"] = str(folder / "alone")
        insitu("up", "--nodes", str(count))
        import_data(plan, split, 4 * count)
        _, undisturbed = train(plan, workers=count)
        insitu("down", "--force")
        os.environ["INSITU_HOME"] = str(home)
        good = show_outcome(disturbance, job_id, result, undisturbed, plan)
        console.print(Rule("take the hosts down"))
        return take_down(lab, disturbance.victim) and good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=3, help="how many hosts come up at first")
    parser.add_argument("--data", type=Path, help="a folder of Quick, Draw! .npy files")
    arguments = parser.parse_args()
    if not 2 <= arguments.hosts <= MOST_HOSTS:
        parser.error(f"--hosts must be from 2 to {MOST_HOSTS}. Received: {arguments.hosts}")
    if obstacle := find_obstacle():
        sys.exit(f"The demo on several hosts can't run: {obstacle}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="insitu-demo-") as folder:
        good = run(Path(folder), arguments.data, arguments.hosts)
    console.print(f"[dim]{time.monotonic() - started:.0f} s, cleaned up[/]")
    if not good:
        sys.exit("The demo failed: see the results above")


if __name__ == "__main__":
    main()
