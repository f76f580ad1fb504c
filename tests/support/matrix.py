"""The matrix of docs/reference/strategies.md: its rows, how each cell is run, and how the page is written.

python matrix.py               runs every cell on every backend and writes strategies.json and strategies.md
python matrix.py jax torch     runs those of these backends; of others the pages keep what was recorded
python matrix.py --page        writes docs/reference/strategies.md out of the .json beside it
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from free_ports import free_addresses

DOCS = Path(__file__).parents[2] / "docs" / "reference"
RESULTS, PAGE = DOCS / "strategies.json", DOCS / "strategies.md"
RUNS = Path(__file__).with_name("matrix_runs.py")
DEADLINE = 500.0
"""Seconds for all cells of one backend on a machine with other work."""

BACKENDS = ("tensorflow", "jax", "torch")
WAYS = ("fit", "custom loop", "low level")
WORKS, NOT_POSSIBLE, NOT_VERIFIED = "works", "not possible", "not verified"
TOLERANCE = 1e-5

PLAIN, SHARDS = "plain Keras on one device", "one device with as many shards"
CONVERGES = "converges"
"""Instead of agreeing: for modes in which the order of updates is left to chance."""
FALL = 0.75
"""Converging is a last loss of at most so much of the first."""


@dataclass(frozen=True)
class Row:
    """One strategy, in one of its variants. `references` says for each backend and way what it must agree
    with; `impossible` and `unverified` say why there is no run. `tasks` processes run it."""

    strategy: str
    variant: str = ""
    tasks: int = 1
    reference: str = SHARDS
    references: dict[tuple[str, str], str] = field(default_factory=dict)
    impossible: dict[str, str] = field(default_factory=dict)
    unverified: dict[str, str] = field(default_factory=dict)
    """By backend, by way, or "" for all."""

    @property
    def name(self) -> str:
        return f"{self.strategy} ({self.variant})" if self.variant else self.strategy

    def reference_of(self, backend: str, way: str) -> str:
        return self.references.get((backend, way), self.reference)

    def without_run(self, backend: str, way: str) -> tuple[str, str] | None:
        """(status, why) of a cell that isn't run."""
        for status, reasons in ((NOT_POSSIBLE, self.impossible), (NOT_VERIFIED, self.unverified)):
            for key in ("", backend, way, f"{backend} {way}"):
                if key in reasons:
                    return status, reasons[key]
        return None


_ONLY_JAX = "Only JAX can run one program over the processes of a job."
_BY_LAYERS = "Keras lays variables out over a mesh only on JAX. The next row works on this backend."
_BY_FIT = "A custom loop can't use tables on servers. Use MultiWorkerMirroredStrategy without them."

ROWS = (
    Row("OneDeviceStrategy", reference=PLAIN),
    Row("MirroredStrategy", references={("jax", "fit"): PLAIN}),
    Row("MultiWorkerMirroredStrategy", "ring", tasks=2),
    Row(
        "MultiWorkerMirroredStrategy",
        "xla",
        tasks=2,
        references={("jax", "fit"): PLAIN},
        impossible={"tensorflow": _ONLY_JAX, "torch": _ONLY_JAX},
    ),
    Row("CentralStorageStrategy"),
    Row("ParameterServerStrategy", "sync"),
    Row("ParameterServerStrategy", "async", reference=CONVERGES),
    Row("ParameterServerStrategy", "bounded", reference=CONVERGES),
    Row("HybridStrategy", reference=CONVERGES, impossible={"custom loop": _BY_FIT}),
    Row(
        "ModelParallelStrategy",
        "layout map",
        reference=PLAIN,
        impossible={"tensorflow": _BY_LAYERS, "torch": _BY_LAYERS},
    ),
    Row("ModelParallelStrategy", "layers on devices", reference=PLAIN),
    Row("TPUStrategy", unverified={"": "No TPU was available."}),
)

Cell = dict[str, Any]


def all_cells() -> Iterable[tuple[Row, str, str]]:
    for row in ROWS:
        for backend in BACKENDS:
            for way in WAYS:
                yield row, backend, way


def cell_of(row: Row, backend: str, way: str, measured: dict[str, Any] | None) -> Cell:
    """What is recorded of one cell."""
    cell: Cell = {"strategy": row.strategy, "variant": row.variant, "backend": backend, "way": way}
    without = row.without_run(backend, way)
    if without is not None:
        return {**cell, "status": without[0], "why": without[1]}
    if measured is None:
        return {**cell, "status": NOT_VERIFIED, "why": "not run yet"}
    if "error" in measured:
        return {**cell, "status": NOT_VERIFIED, "why": measured["error"]}
    if "fall" in measured:
        cell = {**cell, "reference": CONVERGES, "difference": measured["fall"], "bits": False}
        if measured["fall"] <= FALL:
            return {**cell, "status": WORKS, "why": ""}
        why = f"the loss only fell to {measured['fall']:.2f} of what it was"
        return {**cell, "status": NOT_VERIFIED, "why": why}
    differences = (measured["losses"], measured["weights"])
    difference = max(differences)
    cell = {
        **cell,
        "reference": row.reference_of(backend, way),
        "difference": difference,
        "bits": measured["bits"],
    }
    if all(d <= TOLERANCE for d in differences):
        return {**cell, "status": WORKS, "why": ""}
    return {**cell, "status": NOT_VERIFIED, "why": f"differs from the reference by {difference:.1e}"}


# Running


def environment(backend: str, **more: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("INSITU_") and k != "TF_CONFIG"}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "NPROC", "TF_NUM_INTRAOP_THREADS"), "1")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": backend}
    return {**inherited, **threads, **quiet, **more}


def start(backend: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(RUNS), *arguments],
        env=environment(backend, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the process printed; every cell that it was asked for, or an error."""
    try:
        output, errors = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        return {"error": f"nothing came within {DEADLINE:g} s"}
    for line in output.splitlines():
        if line.startswith("RESULTS"):
            found: dict[str, Any] = json.loads(line.removeprefix("RESULTS"))
            return found
    return {"error": (errors.strip().splitlines() or ["the process printed nothing"])[-1][:200]}


def run(backend: str, names: Iterable[str] | None = None) -> list[Cell]:
    """Runs the cells of `backend` (of the rows `names`): one process for all that one process can do, one
    process for each task of the others."""
    rows = [row for row in ROWS if names is None or row.name in names]
    wanted = {(row.name, way) for row in rows for way in WAYS if row.without_run(backend, way) is None}
    measured: dict[tuple[str, str], Any] = {}
    with tempfile.TemporaryDirectory() as home:
        alone = [list(key) for key in sorted(wanted) if _row(key[0]).tasks == 1]
        answers = answer_of(start(backend, "alone", json.dumps(alone), INSITU_HOME=home))
        for name, way in alone:
            measured[name, way] = answers.get(f"{name}/{way}", {"error": answers.get("error", "no answer")})
        references = answers.get("references")
        for name, way in sorted(wanted):
            row = _row(name)
            if row.tasks > 1:
                reference = (references or {}).get(f"{row.reference_of(backend, way)}")
                measured[name, way] = _run_tasks(backend, row, way, home, reference)
    return [cell_of(row, backend, way, measured.get((row.name, way))) for row in rows for way in WAYS]


def _row(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


def _run_tasks(backend: str, row: Row, way: str, home: str, reference: Any) -> dict[str, Any]:
    cluster = {"worker": free_addresses(row.tasks)}
    processes = [
        start(
            backend,
            "task",
            json.dumps([row.name, way, reference]),
            INSITU_HOME=home,
            INSITU_SHARDS=f"{index}/{row.tasks}",
            INSITU_TASK=f"worker:{index}",
            TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}),
        )
        for index in range(row.tasks)
    ]
    try:
        answers = [answer_of(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = next((answer for answer in answers if "error" in answer), None)
    if failed is not None:
        return failed
    return {
        "losses": max(a["losses"] for a in answers),
        "weights": max(a["weights"] for a in answers),
        "bits": all(a["bits"] for a in answers),
    }


# The page

HEAD = """# Which strategy works where

`make strategies` trains in every cell of the tables below and writes this page. The model has a convolution,
BatchNorm, Dropout and an embedding. It trains for 20 steps. The last batch of each epoch has one row, so one
of two replicas gets none. Replicas are virtual CPU devices of one machine, or processes. Nothing here has
been run on GPUs or TPUs.

The tables show three ways to train:

- **fit**: Keras' `compile`, `fit` and `evaluate`.
- **custom loop**: `strategy.run`, `reduce`, `distribute_dataset` and `compute_average_loss`.
- **low level**: the script computes gradients itself and combines them with `strategy.group()`, a group of
  `insitu.exchange`. With parameter servers it pushes them with `insitu.parameters`. `HybridStrategy` has the
  rows of its embedding on parameter servers here.

A cell says what was compared:

- **works (1)**: the losses of each epoch and the final weights agree with plain Keras on one device, to 1e-5
  of the largest value of each tensor. These strategies compute what one device would for the global batch.
- **works (2)**: they agree as closely with one device that takes the same number of shards in turn. Here each
  replica is its own batch for BatchNorm and Dropout.
- **bits**: they agree in every bit.
- **works (converges)**: the order of updates is left to chance in these modes, so only the loss was checked.
  The last loss is at most 0.75 of the first.

Replicas on the devices of one process run at the same time, except on PyTorch with CPUs.

One shard computes what plain Keras does on the same backend, with one exception on TensorFlow. If a row of an
`Embedding` occurs several times in a batch, optimizers such as Adam square the gradient of each occurrence
there. In a scope insitu adds the occurrences up first, for any number of shards, as Keras does on JAX and
PyTorch, and the chief says so ([keras.md](keras.md#one-device)).
"""


def page(cells: Iterable[Cell]) -> str:
    """docs/reference/strategies.md, out of recorded cells; a cell without a record isn't verified."""
    recorded = {(c["strategy"], c["variant"], c["backend"], c["way"]): c for c in cells}
    notes: list[str] = []
    lines = [HEAD.rstrip("\n"), ""]
    counts = dict.fromkeys((WORKS, NOT_POSSIBLE, NOT_VERIFIED), 0)
    for way in WAYS:
        lines += [
            f"## {way}",
            "",
            f"| strategy | {' | '.join(BACKENDS)} |",
            "|---" * (len(BACKENDS) + 1) + "|",
        ]
        for row in ROWS:
            columns = []
            for backend in BACKENDS:
                key = (row.strategy, row.variant, backend, way)
                cell = recorded.get(key) or cell_of(row, backend, way, None)
                counts[cell["status"]] += 1
                columns.append(_shown(cell, notes))
            name = f"`{row.strategy}`" + (f" {row.variant}" if row.variant else "")
            lines.append(f"| {name} | {' | '.join(columns)} |")
        lines.append("")
    lines += [f"{', '.join(f'{count} {status}' for status, count in counts.items())}.", ""]
    lines += [f"{index}. {note}" for index, note in enumerate(notes, 1)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _shown(cell: Cell, notes: list[str]) -> str:
    if cell["status"] == WORKS:
        if cell["reference"] == CONVERGES:
            return "works (converges)"
        reference = 1 if cell["reference"] == PLAIN else 2
        return f"works ({reference}{', **bits**' if cell['bits'] else ''})"
    if cell["why"] not in notes:
        notes.append(cell["why"])
    return f"*{cell['status']}* [{notes.index(cell['why']) + 1}]"


def load() -> list[Cell]:
    cells: list[Cell] = json.loads(RESULTS.read_text())["cells"]
    return cells


def save(cells: Iterable[Cell]) -> None:
    """Writes both pages, cells in the order of the rows."""
    order = [(row.strategy, row.variant, backend, way) for row, backend, way in all_cells()]
    kept = {(c["strategy"], c["variant"], c["backend"], c["way"]): c for c in cells}
    ordered = [kept[key] for key in order if key in kept]
    RESULTS.write_text(json.dumps({"cells": ordered}, indent=1) + "\n")
    PAGE.write_text(page(load()))


def main() -> None:
    if sys.argv[1:] == ["--page"]:
        PAGE.write_text(page(load()))
        return
    backends = sys.argv[1:] or BACKENDS
    cells = []
    for backend in backends:
        found = run(backend)
        cells += found
        # At once: a run of all takes long, and may be cut short.
        save([*found, *(cell for cell in load() if cell["backend"] != backend)])
    for cell in cells:
        if cell["status"] == NOT_VERIFIED:
            sys.stderr.write(f"{cell}\n")


if __name__ == "__main__":
    main()
