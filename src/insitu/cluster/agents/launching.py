"""Runs a command on other hosts by the user's launcher, such as ssh.

A launcher is a template: the command for the host's shell stands at {command}, or is added as the last
argument. The cluster's token goes through the command's input, never as an argument.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from insitu.cluster.agents.detached import open_input
from insitu.cluster.agents.hosts_file import HostLine
from insitu.cluster.agents.launch_problems import describe_failure
from insitu.errors import InputError

SSH = "ssh -T -o BatchMode=yes -o ConnectTimeout=10 {host}"
START_SECONDS = 120.0
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command on a host has led to."""

    #: The host, as the user names it.
    host: str
    #: What the command printed as JSON; None where it failed.
    answer: dict[str, Any] | None
    #: Why it failed; empty where it didn't.
    problem: str = ""
    #: Whether it never ended, so that nobody knows what it has done.
    silent: bool = False


def check_launcher(launcher: str) -> list[str]:
    """Return the words of a launcher. Raises InputError for one that can't name the host."""
    try:
        words = shlex.split(launcher)
    except ValueError as error:
        raise InputError(f"--launcher must be a command. Received: {launcher!r} ({error})") from error
    if not any("{host}" in word for word in words):
        raise InputError(
            f"--launcher must say by {{host}} where it runs a command, such as {SSH!r}. Received: "
            f"{launcher!r}"
        )
    return words


def fill_launcher(launcher: str, host: str, command: str) -> list[str]:
    """Return the arguments that run `command` on `host`."""
    words = check_launcher(launcher)
    if not any("{command}" in word for word in words):
        words.append("{command}")
    return [word.replace("{host}", host).replace("{command}", command) for word in words]


def make_start_command(line: HostLine, insitu: str, head: str) -> str:
    """Return the command for the host's shell that starts its agent. `insitu` runs insitu there."""
    options = ["agent", "--detach", "--token-stdin", "--head", head]
    if line.name:
        options += ["--name", line.name]
    if line.interface:
        options += ["--interface", line.interface]
    if line.port:
        options += ["--port", str(line.port)]
    return f"{_set_home(line)}{insitu} {shlex.join(options)}"


def make_stop_command(line: HostLine, insitu: str) -> str:
    """Return the command for the host's shell that ends its agents."""
    return f"{_set_home(line)}{insitu} agent --stop"


def _set_home(line: HostLine) -> str:
    # By `env`, since not every login shell takes `NAME=VALUE COMMAND`, such as tcsh.
    return f"env INSITU_HOME={shlex.quote(line.home)} " if line.home else ""


def run_on_hosts(
    launcher: str,
    commands: Sequence[tuple[str, str]],
    given: str,
    report: Callable[[Outcome], None],
    *,
    seconds: float = START_SECONDS,
) -> list[Outcome]:
    """Run each (host, command), some at the same time. Call `report` with each outcome when it is there."""
    check_launcher(launcher)

    def run(each: tuple[str, str]) -> Outcome:
        return _run(launcher, *each, given, seconds)

    outcomes = []
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for outcome in threads.map(run, commands):
            report(outcome)
            outcomes.append(outcome)
    return outcomes


def _run(launcher: str, host: str, command: str, given: str, seconds: float) -> Outcome:
    arguments = fill_launcher(launcher, host, command)
    try:
        with open_input(given) as source:
            process = subprocess.Popen(
                arguments,
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
    except OSError as error:
        return Outcome(host, None, f"the launcher can't be run: {arguments[0]} ({error.strerror})")
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Outcome(host, None, f"the command said nothing for {seconds:g} s", True)
    answer = _find_answer(out)
    if answer is not None and "without_head" in answer:
        return Outcome(host, None, f"its agent runs without its head. {answer['without_head']}")
    if process.returncode == 0 and answer is not None:
        return Outcome(host, answer)
    return Outcome(host, None, describe_failure(host, process.returncode, out, err))


def _find_answer(out: bytes) -> dict[str, Any] | None:
    """Return the last line that is a JSON object: the host's shell may print something, too."""
    for line in reversed(out.splitlines()):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return None
