"""`insitu import` ends with its code however often it reads a wrong file, is interrupted, or has to wait."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from insitu.base.paths import Paths
from insitu.ui.started_commands import StartedCommands

RUNS = int(os.environ.get("TEST_RUNS", "400"))
"""Of each kind of end: a hang at exit was seen once in 30 to 100 runs."""
PATIENCE = 120
ROWS = 300_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * 3600)]  # of all runs of a test


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, str]]:
    """Return wrong files of 15 MB, each with a part of its error."""
    folder = tmp_path_factory.mktemp("wrong")
    rows = [f"{i},Zoë Ö{i},München,{i % 9000}.{i % 100:02d}" for i in range(ROWS)]
    early, late = [*rows[:1], rows[1] + ",", *rows[2:]], [*rows[:-9], rows[-9] + ",", *rows[-8:]]
    header = "number,name,city,income"
    (folder / "early.csv").write_text("\n".join([header, *early]))
    (folder / "late.csv").write_text("\n".join([header, *late]))
    (folder / "early.csv.gz").write_bytes(gzip.compress("\n".join([header, *early]).encode(), 1))
    lines = [json.dumps({"number": i, "name": f"Zoë {i}", "income": i / 7}) for i in range(ROWS)]
    (folder / "late.jsonl").write_text("\n".join([*lines[:-9], '{"number": ', *lines[-8:]]))
    whole = folder / "whole"
    pq.write_table(pa.table({"number": np.arange(ROWS * 4)}), whole)
    (folder / "cut.parquet").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    reasons = {
        "early.csv": "Row #3: Expected 4 columns, got 5",
        "late.csv": "Expected 4 columns, got 5",
        "early.csv.gz": "Expected 4 columns, got 5",
        "late.jsonl": "late.jsonl",
        "cut.parquet": "cut.parquet",
    }
    return [(folder / name, reason) for name, reason in reasons.items()]


@pytest.fixture(params=["quiet", "busy"])
def load(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep every processor busy, twice over, in one of the cases."""
    count = 2 * len(os.sched_getaffinity(0)) if request.param == "busy" else 0
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def start_import(source: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "insitu", "import", "--overwrite", "c", str(source)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1]


@pytest.mark.usefixtures("home", "load")
def test_a_wrong_file_ends_with_its_code_and_its_reason(wrong: list[tuple[Path, str]]) -> None:
    for number in range(RUNS // 2):
        source, reason = wrong[number % len(wrong)]
        with start_import(source) as process:
            output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2, (number, source, process.returncode, output)
        assert last_line(output).startswith("error: ") and reason in last_line(output), (number, output)


@pytest.mark.usefixtures("load")
def test_an_interrupted_import_ends_with_its_code(
    home: Path, wrong: list[tuple[Path, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, interrupted = random.Random(7), 0
    for number in range(RUNS // 8):
        own = home.with_name(f"home-{number}")  # without what the import before has left
        monkeypatch.setenv("INSITU_HOME", str(own))
        staging, before = Paths(own).home / "staging", time.monotonic()
        with start_import(wrong[1][0]) as process:  # it reads nearly all before it finds what is wrong
            while process.poll() is None and not any(staging.glob("*")):
                assert time.monotonic() - before < PATIENCE
                time.sleep(0.01)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(chance.uniform(0, 0.5))
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode in (2, 130), (number, process.returncode, output)
        interrupted += process.returncode == 130
        if process.returncode == 2:
            assert last_line(output).startswith("error: "), (number, output)
    assert interrupted, "no import was interrupted"


@pytest.mark.usefixtures("load")
def test_the_page_shows_the_reason_as_the_last_line(home: Path, wrong: list[tuple[Path, str]]) -> None:
    commands = StartedCommands(dict(os.environ))
    for number in range(RUNS // 8):
        source, reason = wrong[number % len(wrong)]
        ended = threading.Event()
        token = commands.start_import("c", [str(source)], ["--overwrite"], ended.set)["import"]
        assert ended.wait(PATIENCE), (number, source, commands.find_import(token))
        found = commands.find_import(token)
        assert found is not None and found["state"] == "failed", found
        assert reason in found["output"][-1], (number, found)
