"""The quick start of README.md and docs/tutorial/first-hour.md run as written, and print what they say."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_runs import Insitu, insitu_at

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial" / "first-hour.md").read_text()
QUICK_START = (ROOT / "README.md").read_text().partition("## Quick start")[2].partition("\n## ")[0]
JOB = "people-3f9a1c"
"""The job's id in the tutorial. Each run has another one."""

pytestmark = pytest.mark.timeout(600)


def commands_in(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a text's consoles, with the lines that it prints there."""
    for block in re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for command in re.split(r"^\$ ", block.replace("\\\n", ""), flags=re.MULTILINE)[1:]:
            line, *printed = command.strip().splitlines()
            yield line, printed


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Insitu]:
    with insitu_at(tmp_path) as insitu:
        yield insitu


def run(insitu: Insitu, command: str) -> str:
    """Run a line of a page in a shell, and return what it prints."""
    insitu.folder.mkdir(exist_ok=True)
    environment = {**insitu.environment, "NO_COLOR": "1", "COLUMNS": "110"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], env=environment, cwd=insitu.folder, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def ask(insitu: Insitu, job: str, question: str) -> list[list[float]]:
    """Serve a job's model, and return its answers to the request of a page."""
    command = insitu.command("serve", job, "--port", "0")
    with subprocess.Popen(
        command, env=insitu.environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stderr is not None
        try:
            addresses = (re.search(r"http://\S+:predict", line) for line in server.stderr)
            address = next(found[0] for found in addresses if found)
            request = urllib.request.Request(address, question.encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                return list(json.load(answer)["predictions"])
        finally:
            server.send_signal(signal.SIGINT)


def read_accuracy(text: str) -> float:
    """Return the accuracy on held-out rows that a text shows."""
    found = re.search(r"held-out rows: accuracy ([\d.]+)", text)
    assert found, text
    return float(found[1])


@pytest.mark.long
def test_the_quick_start_runs_as_written(home: Insitu) -> None:
    for command, _ in commands_in(QUICK_START):
        if not command.startswith("source "):
            printed = run(home, command)
            if command.startswith("insitu start"):
                there, here = (read_accuracy(text) for text in (QUICK_START, printed))
                assert abs(there - here) < 0.05


@pytest.mark.slow
def test_the_tutorial_runs_as_written(home: Insitu) -> None:
    home.folder.mkdir(exist_ok=True)
    script = re.search(r"^```python people.py\n(.*?)^```", TUTORIAL, re.DOTALL | re.MULTILINE)
    assert script
    (home.folder / "people.py").write_text(script[1])
    job = ""
    for command, lines in commands_in(TUTORIAL):
        if command.startswith(("export ", "insitu serve")):
            continue
        if command.startswith("curl"):
            rich, poor = ask(home, job, command.partition("-d '")[2].rstrip("'"))
            assert rich[0] > rich[1] and poor[0] < poor[1]  # classes are high and low
            continue
        printed = run(home, command.replace(JOB, job))
        assert set(lines) <= {line.rstrip() for line in printed.splitlines()}, printed
        if command.startswith("insitu start"):
            (found,) = home.json("ps", "--all")
            job = found["job_id"]
        if command.startswith("insitu chaos"):
            assert (
                len(re.findall(r"^(?:the job|results|the ledger|nothing) .* yes", printed, re.MULTILINE)) == 4
            )
