"""Homes of several "hosts" on the loopback interface, and the commands that bring their agents up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from insitu.base.paths import Paths
from insitu.cluster.job_hosts.home import find_running, stop_agents

INSITU = f"{sys.executable} -m insitu"
WAIT_SECONDS = 60.0


def wait_until(is_so: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> Any:
    """Return the first true result of `is_so`, which is asked again and again until a deadline."""
    deadline = time.monotonic() + seconds
    while True:
        found = is_so()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    """Return whether a process hasn't ended, whether or not its parent has noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def insitu(
    home: Path, *arguments: str, code: int | None = 0, given: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a home; its exit code must be `code`."""
    done = subprocess.run(
        [sys.executable, "-m", "insitu", *arguments],
        env={**os.environ, "INSITU_HOME": str(home), **environment},
        input=given,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert code is None or done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    return done


class LoopbackHosts:
    """A head's home and homes of agents, all on this machine."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.head = folder / "head"
        self.homes = {name: folder / name for name in names}
        #: Homes of heads that were replaced.
        self.former: list[Path] = []
        self.file = folder / "hosts.txt"
        self.file.write_text("".join(f"127.0.0.1 name={n} home={h}\n" for n, h in self.homes.items()))

    def up(self, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        launcher = ("--launcher", "env HOST={host} sh -c", "--insitu", INSITU)
        return insitu(self.head, "up", "--hosts", str(self.file), *launcher, *options, code=code)

    def nodes(self, home: Path | None = None) -> dict[str, dict[str, Any]]:
        listed = json.loads(insitu(home or self.head, "nodes", "--json").stdout)
        return {each["node"]: each for each in listed}

    def states(self) -> dict[str, str]:
        return {name: node["state"] for name, node in self.nodes().items() if node["state"]}

    def agent_pid(self, name: str) -> int:
        (record,) = find_running(Paths(self.homes[name])).values()
        return record.pid

    def move_head(self, home: Path, token_of: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Replace the head from another home, which has the token from that of an agent."""
        home.mkdir(exist_ok=True)
        shutil.copy(Paths(self.homes[token_of]).token, Paths(home).token)
        self.former, self.head = [*self.former, self.head], home
        return self.up("--replace-head", code=code)

    def close(self) -> None:
        """End whatever still runs."""
        for home in (self.head, *self.former):
            insitu(home, "down", code=None)
        for home in self.homes.values():
            stop_agents(Paths(home))
