"""The quick start of README.md and the pages of docs/tutorial run as written, and print what they say."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from job_runs import Insitu, insitu_at, wait_for

ROOT = Path(__file__).parents[2]
FIRST_HOUR, IMAGES, THREE_HOSTS = (
    (ROOT / "docs" / "tutorial" / name).read_text()
    for name in ("first-hour.md", "images.md", "three-hosts.md")
)
QUICK_START = (ROOT / "README.md").read_text().partition("## Quick start")[2].partition("\n## ")[0]
CHANGES = (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", r"127\.0\.0\.1:\d+")
"""Times and addresses differ in each run."""

pytestmark = pytest.mark.timeout(900)


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


def run(insitu: Insitu, command: str, fails: bool = False) -> str:
    """Run a line of a page in a shell, and return what it prints."""
    insitu.folder.mkdir(exist_ok=True)
    environment = {**insitu.environment, "NO_COLOR": "1", "COLUMNS": "110"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], env=environment, cwd=insitu.folder, capture_output=True, text=True
    )
    assert (done.returncode != 0) is fails, f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def run_and_compare(insitu: Insitu, command: str, lines: list[str]) -> str:
    """Run a line of a page, which prints all that the page shows. Lines that show an error end it."""
    printed = run(insitu, command, fails=any(line.startswith("error: ") for line in lines))
    there = {mask(line) for line in printed.splitlines()}
    assert {mask(line) for line in lines if line} <= there, printed
    return printed


def mask(line: str) -> str:
    """Return a line without what differs in each run."""
    for change in CHANGES:
        line = re.sub(change, "-", line)
    return line.rstrip()


def write_files(insitu: Insitu, page: str) -> None:
    """Write the files that a page gives, each in a block with its name."""
    insitu.folder.mkdir(exist_ok=True)
    for name, text in re.findall(r"^```\w+ (\w+\.\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        (insitu.folder / name).write_text(text)


def find_newest_job(insitu: Insitu) -> str:
    """Return the id of the job that began last."""
    return str(max(insitu.json("ps", "--all"), key=lambda job: job["created"])["job_id"])


@contextmanager
def served(insitu: Insitu, job: str) -> Iterator[str]:
    """Serve a job's model, and yield the address of its predictions."""
    command = insitu.command("serve", job, "--port", "0")
    with subprocess.Popen(
        command, env=insitu.environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stderr is not None
        try:
            addresses = (re.search(r"http://\S+:predict", line) for line in server.stderr)
            yield next(found[0] for found in addresses if found)
        finally:
            server.send_signal(signal.SIGINT)


def ask(address: str, question: str) -> list[list[float]]:
    """Return a server's answers to the request of a page."""
    request = urllib.request.Request(address, question.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return list(json.load(answer)["predictions"])


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
def test_the_first_hour_runs_as_written(home: Insitu) -> None:
    write_files(home, FIRST_HOUR)
    job = ""
    for command, lines in commands_in(FIRST_HOUR):
        if command.startswith(("export ", "insitu serve")):
            continue
        if command.startswith("curl"):
            with served(home, job) as address:
                rich, poor = ask(address, command.partition("-d '")[2].rstrip("'"))
            assert rich[0] > rich[1] and poor[0] < poor[1]  # classes are high and low
            continue
        printed = run_and_compare(home, command.replace("people-3f9a1c", job), lines)
        if command.startswith("insitu start"):
            job = find_newest_job(home)
        if command.startswith("insitu chaos"):
            assert (
                len(re.findall(r"^(?:the job|results|the ledger|nothing) .* yes", printed, re.MULTILINE)) == 4
            )


@pytest.mark.slow
def test_the_page_on_images_runs_as_written(home: Insitu) -> None:
    write_files(home, IMAGES)
    for command, lines in commands_in(IMAGES):
        if command.startswith(("export ", "pip ", "insitu serve")):
            continue
        if command == "python ask.py":
            script = home.folder / "ask.py"
            with served(home, find_newest_job(home)) as address:
                script.write_text(re.sub(r"http://\S+:predict", address, script.read_text()))
                run_and_compare(home, command, lines)
            continue
        printed = run_and_compare(home, command, lines)
        if command.startswith("insitu start"):
            assert read_accuracy(printed) > 0.9


@pytest.mark.slow
def test_the_page_on_three_hosts_runs_as_written(home: Insitu) -> None:
    write_files(home, FIRST_HOUR)
    write_files(home, THREE_HOSTS)
    workers = re.findall(r"^worker:\d +\w .*$", THREE_HOSTS, re.MULTILINE)
    assert len(workers) == 3
    try:
        for command, lines in commands_in(THREE_HOSTS):
            if command.startswith("export "):
                continue
            if command == "insitu nodes":
                assert wait_for(
                    "the drain", lambda: re.search(r"^c +drained ", run(home, "insitu nodes"), re.M)
                )
                continue
            if command.startswith("insitu describe people-"):
                command, lines = f"insitu describe {find_newest_job(home)}", workers
            printed = run_and_compare(home, command, lines)
            if command.startswith("insitu start"):
                assert read_accuracy(printed) > 0.85
    finally:
        run(home, "insitu down --force")
