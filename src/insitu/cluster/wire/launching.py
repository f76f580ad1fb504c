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

from insitu.base.errors import InputError
from insitu.cluster.wire.detached import open_input
from insitu.cluster.wire.hosts_file import HostLine

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


def make_view_command(line: HostLine, insitu: str) -> str:
    """Return the command for the host's shell that says which head its agents follow."""
    return f"{_set_home(line)}{insitu} agent --head-view --token-stdin"


def make_stop_command(line: HostLine, insitu: str) -> str:
    """Return the command for the host's shell that ends its agents."""
    return f"{_set_home(line)}{insitu} agent --stop"


def make_member_command(line: HostLine, insitu: str, what: str, head: str) -> str:
    """Return the command for the host's shell that does something about its member of etcd: "prepare" one, at
    the address on the way to `head`, or "start" or "stop" it."""
    options = ["agent", "--member", what]
    if head:
        options += ["--head", head]
    if what == "start":
        options.append("--token-stdin")
    if line.interface:
        options += ["--interface", line.interface]
    return f"{_set_home(line)}{insitu} {shlex.join(options)}"


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


# Says why a command on a host has failed, and what to do about it. Pure


_SHOWN_LINES = 3
_OF_SSH = 255
_NOT_FOUND = 127

_REMEDIES = (
    (
        ("Host key verification failed", "REMOTE HOST IDENTIFICATION HAS CHANGED"),
        "Its key isn't in ~/.ssh/known_hosts, or another one is. Compare it, and accept it once by `ssh "
        "{host}`",
    ),
    (
        ("Permission denied (", "Too many authentication failures"),
        "`ssh {host} true` must work without a question. Give it your key by `ssh-copy-id {host}`, or name "
        "the user as USER@HOST in the file of hosts",
    ),
    (
        ("Could not resolve hostname",),
        "Correct its name in the file of hosts. Names of ~/.ssh/config are known, too",
    ),
    (
        ("Connection refused", "Connection timed out", "No route to host", "Network is unreachable"),
        "Check that it is on, and that its server of ssh listens there. Another port goes into ~/.ssh/config "
        "or into --launcher",
    ),
    (
        ("Connection reset by", "Connection closed by"),
        "Look at the log of its server of ssh. It may take fewer connections at a time (MaxStartups); then "
        "run the same command again",
    ),
)
"""What ssh says, and what helps."""
_NO_INSITU = (
    "Install insitu there, or give its path by --insitu, such as --insitu /opt/venv/bin/insitu. A shell that "
    "ssh starts may have another PATH than one of a terminal"
)
_NO_ANSWER = (
    "`ssh {host} true` must run that command alone. Look at the account's shell and its ~/.bashrc there"
)


def describe_failure(host: str, code: int, out: bytes, err: bytes) -> str:
    """Return why the command on `host` failed, from its exit code and what it and the launcher have said."""
    said = _lines(err)
    errors = [number for number, line in enumerate(said) if line.startswith("error: ")]
    if errors:  # insitu ran there, and says what to do
        return " ".join(said[errors[-1] :]).removeprefix("error: ")
    printed = [line for line in _lines(out) if not line.startswith("{")]
    parts = said[-_SHOWN_LINES:]
    if printed and code not in (_OF_SSH, _NOT_FOUND):
        parts = [*parts, *printed[-_SHOWN_LINES:]]
    remedy = _find_remedy(code, " ".join(said)).replace("{host}", host)
    if code not in (_OF_SSH, _NOT_FOUND) or not parts:
        parts = [f"the command ended with code {code}{':' if parts else ''}", *parts]
    why = " ".join(parts)
    return f"{why.rstrip('.')}. {remedy}" if remedy else why


def _lines(text: bytes) -> list[str]:
    return [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]


def _find_remedy(code: int, said: str) -> str:
    if code == _OF_SSH:
        return next((help for signs, help in _REMEDIES if any(sign in said for sign in signs)), "")
    if code == _NOT_FOUND:
        return _NO_INSITU
    return _NO_ANSWER if code == 0 else ""
