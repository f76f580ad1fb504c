"""What all benchmarks share: the machine's name, alternating runs, medians, tables, JSON.

A benchmark is a set of contenders. Each is a function that does the work once and returns its figure, or
raises Unavailable. They run alternately, so that other work on the machine affects all of them alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DRAWINGS = Path(os.environ.get("DATA") or "quickdraw")
"""Folder of Quick, Draw! bitmaps, as of `make demo DATA=...`. Benchmarks continue without one."""


class Unavailable(Exception):
    """A contender can't run on this machine; the message says what is missing."""


@dataclass
class Result:
    """All figures of one contender, in the order of the runs. `missing` says why there are none."""

    name: str
    unit: str
    figures: list[float] = field(default_factory=list)
    missing: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.figures) if self.figures else None


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo")
    models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
        "commit": _commit(),
    }


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine_line(machine: Mapping[str, Any]) -> str:
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['system']}, "
        f"Python {machine['python']}, load before {machine['load_before']}"
    )


def alternate(
    contenders: Mapping[str, Callable[[], float]], unit: str, rounds: int, *, warm_up: int = 0
) -> dict[str, Result]:
    """Runs each contender once per round, in turn; the first `warm_up` rounds aren't counted.

    One that raises Unavailable is named as missing and not asked again.
    """
    results = {name: Result(name, unit) for name in contenders}
    for turn in range(warm_up + rounds):
        for name, run in contenders.items():
            result = results[name]
            if result.missing is not None:
                continue
            say(f"  {'warm-up' if turn < warm_up else f'round {turn - warm_up + 1}/{rounds}'}: {name}")
            try:
                figure = run()
            except Unavailable as error:
                result.missing = str(error)
                continue
            if turn >= warm_up:
                result.figures.append(figure)
    return results


def timed(run: Callable[[], Any]) -> float:
    """Seconds that `run` takes."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def text(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return "| " + " | ".join(padded) + " |"

    return "\n".join([text(lines[0]), text(["-" * w for w in widths]), *map(text, lines[1:])])


def results_table(
    results: Mapping[str, Result],
    reference: str,
    *,
    more_is_better: bool = True,
    form: Callable[[float], str] = "{:,.1f}".format,
) -> str:
    """Contender, median, spread, and how many times better `reference` is."""
    base = results[reference].median
    rows = []
    for name, result in results.items():
        if result.median is None:
            rows.append([name, f"not measured: {result.missing}", "", ""])
            continue
        spread = f"{form(min(result.figures))} to {form(max(result.figures))}"
        ratio = ""
        if base and result.median and name != reference:
            ratio = f"{base / result.median if more_is_better else result.median / base:.2f}"
        rows.append([name, form(result.median), spread, ratio])
    unit = next(iter(results.values())).unit
    return table(["", f"{unit} (median)", "range", f"{reference} is better by"], rows)


def results_json(results: Mapping[str, Result]) -> dict[str, Any]:
    return {name: {**asdict(result), "median": result.median} for name, result in results.items()}


def parser(description: str) -> argparse.ArgumentParser:
    """With the options that every benchmark has: --quick, --rounds and --json."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="small sizes, few rounds: to see that it runs")
    made.add_argument("--rounds", type=int, default=None, help="how often each contender runs")
    made.add_argument("--json", type=Path, default=None, metavar="FILE", help="write all figures there")
    return made


def save_json(target: Path | None, benchmark: str, machine: Mapping[str, Any], **content: Any) -> None:
    """Writes {"benchmark", "machine", ...content} to `target`, if there is one."""
    if target is not None:
        text = json.dumps({"benchmark": benchmark, "machine": machine, **content}, indent=2)
        target.write_text(text + "\n")


def addresses(count: int) -> list[str]:
    """Addresses of this host that nobody listens at."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def wait_for(what: str, condition: Callable[[], Any], *, pause: float, patience: float) -> Any:
    """What `condition` returns once that is true. Raises Unavailable after `patience` seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if answer := condition():
            return answer
        time.sleep(pause)
    raise Unavailable(f"waited {patience:g} s for {what}")


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
