"""Runs one script undisturbed and with faults, and compares all that it leaves behind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from disturbed_hits import SUPERVISOR, Hits
from hosts_lab import Host

FOLDER = Path(__file__).parent
SCRIPTS = FOLDER / "disturbed_job"
PATIENCE = 800.0
PATHS = f"{FOLDER / 'disturbance'}:{FOLDER}"
"""PYTHONPATH of a task."""

Fault = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where commands are run, and what can be hit there."""

    #: The home of the commands.
    home: Path
    #: What the commands are appended to, to run on a host.
    enter: tuple[str, ...] = ()
    #: The hosts that run the tasks; none: this machine.
    hosts: tuple[Host, ...] = ()

    def insitu(self, *args: str) -> str:
        """Return what a command has printed that must not fail."""
        done = self.run(args)
        assert done.returncode == 0, f"{args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def run(
        self, args: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with further variables, and return how it ended."""
        environment = {"INSITU_HOME": str(self.home), **(variables or {})}
        settings = [f"{name}={value}" for name, value in environment.items()]
        return subprocess.run(
            [*self.enter, "env", *settings, sys.executable, "-m", "insitu", *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if args[0] in ("start", "resume") else subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=False,
        )


def bring_up(home: Path, nodes: int = 2) -> Place:
    """So many nodes on this machine."""
    place = Place(home)
    place.insitu("up", "--nodes", str(nodes))
    return place


def make_cache(place: Place, folder: Path, *options: str) -> None:
    """Import the cache `rows`: 44 rows of 6 numbers, a target and a key, in 4 partitions."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(44, 6)).astype("float32")
    y = (x @ rng.normal(size=(6, 1)) + 1).astype("float32")
    np.savez(folder / "rows.npz", x=x, y=y, id=np.arange(44))
    place.insitu("import", "--partitions", "4", *options, "rows", str(folder / "rows.npz"))


def run(
    place: Place,
    folder: Path,
    options: Sequence[str],
    faults: Sequence[Fault] = (),
    variables: Mapping[str, str] | None = None,
    *,
    kills: str = "",
    script: str = "train.py",
) -> tuple[dict[str, Any], str]:
    """Run a script in a job, and resume it each time that it ended with its supervisor; return what it
    has left behind, by file, and what the job has printed. Fails if a fault hasn't fired, or the job has
    another exit code than 0. `kills` are random ones; see `disturbance/sitecustomize.py`."""
    fired = folder / "fired"
    job = folder / "job"
    fired.mkdir(parents=True)
    job.mkdir()
    (job / script).write_text((SCRIPTS / script).read_text())
    named = [{"name": f"{number}", **fault} for number, fault in enumerate(faults)]
    environment = {
        **(variables or {}),
        "INSITU_TEST_FAULTS": json.dumps(named),
        "INSITU_TEST_FIRED": str(fired),
        "INSITU_TEST_KILLS": kills,
        "PYTHONPATH": PATHS,
        "OUT": str(folder / "out"),
    }
    command = ["start", *options, "--max-restarts", "40", "--seed", "5", "rows", str(job), script]
    homes = [place.home, *(host.home for host in place.hosts)]
    with Hits(fired, homes, place.hosts) as hits:
        done = place.run(command, environment)
        printed = done.stdout
        for _ in [fault for fault in named if fault.get("target") in ("", SUPERVISOR)]:
            if done.returncode:
                done = place.run(["resume", printed.split()[0]])
                printed += done.stdout
    assert done.returncode == 0, f"{command}: {done.returncode}\n{printed}"
    missing = [fault for fault in named if not (fired / fault["name"]).exists()]
    assert not missing and not hits.problems, f"not fired: {missing} {hits.problems}\n{printed}"
    identifier = printed.split()[0]
    found = read_artifacts(folder / "out")
    found["ledger"] = json.loads(place.insitu("describe", identifier, "--ledger", "--json"))["ledger"]
    scores = json.loads(place.insitu("describe", identifier, "--json"))["evaluations"]
    found["scores"] = [[one["checkpoint"], one["metrics"]] for one in scores[-1:]]
    return found, printed


def read_artifacts(folder: Path) -> dict[str, Any]:
    """Return what files hold, by path: numbers of models, events without their times, text."""
    found: dict[str, Any] = {}
    events: dict[str, list[Any]] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            continue
        if "tfevents" in path.name:
            events.setdefault(str(path.parent.relative_to(folder)), []).extend(read_events(path))
        elif path.suffix in (".keras", ".h5"):
            found[name] = read_model(path)
        else:
            found[name] = path.read_text()
    for name, listed in events.items():
        found[name] = sorted(listed)
    return found


def read_model(path: Path) -> dict[str, Any]:
    """Return the arrays of a saved model, and its description without times."""
    import zipfile

    import h5py

    found: dict[str, Any] = {}
    folder = path.parent
    weights = path
    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            config = archive.read("config.json").decode()
            found["config"] = re.sub(r'"shared_object_id": \d+', "", config)
            weights = folder / f".{path.name}.weights"
            weights.write_bytes(archive.read("model.weights.h5"))
    with h5py.File(weights) as file:
        file.visititems(
            lambda name, item: (
                found.update({name: np.asarray(item).tolist()}) if isinstance(item, h5py.Dataset) else None
            )
        )
    if weights != path:
        weights.unlink()
    return found


def read_events(path: Path) -> list[Any]:
    """Return [step, tag, value] of each event in a file."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = []
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            content = value.tensor.SerializeToString() or value.SerializeToString()
            if "steps_per_second" not in value.tag:
                found.append([event.step, value.tag, content.hex()])
        if event.graph_def:
            found.append([event.step, "graph", ""])
    return found


def outline(found: dict[str, Any]) -> dict[str, Any]:
    """Return which files there are, and what callbacks have heard of epochs, tests and ends, by result."""
    outlined: dict[str, Any] = {}
    for name, content in found.items():
        if name.startswith("result-"):
            counted = json.loads(content)["counted"][0]
            outlined[name] = [event.partition(" [")[0] for event in counted]
        elif name != "ledger":
            outlined[name] = ""
    return outlined


def find_differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return a line for each thing that differs."""
    lines = [f"{name}: missing" for name in expected.keys() - found.keys()]
    lines += [f"{name}: not expected" for name in found.keys() - expected.keys()]
    for name in sorted(found.keys() & expected.keys()):
        if found[name] != expected[name]:
            lines.append(f"{name}: {_tell(found[name], expected[name])}")
    return lines


def _tell(found: Any, expected: Any) -> str:
    if isinstance(found, dict) and isinstance(expected, dict):
        return "; ".join(find_differences(found, expected))[:600]
    if isinstance(found, list) and isinstance(expected, list):
        more = [one for one in found if found.count(one) > expected.count(one)]
        less = [one for one in expected if expected.count(one) > found.count(one)]
        return f"{len(more)} more: {str(more[:3])[:300]}, {len(less)} less: {str(less[:3])[:300]}"
    return f"{str(found)[:400]!r} instead of {str(expected)[:400]!r}"
