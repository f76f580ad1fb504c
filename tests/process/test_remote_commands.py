"""Commands from a machine that has only a cluster's address and token: the head's files are elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from agent_hosts import LoopbackHosts, insitu, wait_until

from insitu.base.paths import Paths
from insitu.cluster.wire.records import read_head

SCRIPT = """
import os, sys, time
import insitu
rows = sum(int(batch.sum()) for batch in insitu.dataset("digits").batch(100))
print("ROWS", rows, os.environ.get("A_VARIABLE"), os.environ["KERAS_BACKEND"], sys.argv[1:], flush=True)
if "wait" in sys.argv:
    time.sleep(600)
sys.exit(7)
"""


class Elsewhere:
    """A folder and a home of their own, from which the head is asked."""

    def __init__(self, folder: Path, hosts: LoopbackHosts) -> None:
        self.hosts = hosts
        self.home, self.folder = folder / "elsewhere", folder / "work"
        (self.folder / "job").mkdir(parents=True)
        (self.folder / "job" / "train.py").write_text(SCRIPT)
        head = read_head(Paths(hosts.head))
        assert head is not None
        self.environment = {
            "INSITU_CLUSTER": head.address,
            "INSITU_TOKEN_FILE": str(Paths(hosts.head).token),
            "KERAS_BACKEND": "numpy",
        }

    def run(self, *arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command. Relative paths are of `folder`, which isn't that of the head's process."""
        with contextlib.chdir(self.folder):
            return insitu(self.home, *arguments, code=code, **self.environment, **environment)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[LoopbackHosts]:
    with contextlib.closing(LoopbackHosts(tmp_path, ("a", "b"))) as found:
        found.up()
        yield found


@pytest.fixture
def elsewhere(hosts: LoopbackHosts, tmp_path: Path) -> Elsewhere:
    return Elsewhere(tmp_path, hosts)


@pytest.mark.long
def test_data_and_a_job_are_sent_and_all_ends(elsewhere: Elsewhere) -> None:
    head = elsewhere.hosts.head
    for number in range(3):
        np.save(elsewhere.folder / f"part-{number}.npy", np.full(200_000, number, np.int64))
    options = ("--backups", "1", "--json")
    done = elsewhere.run("import", *options, "digits", "part-*.npy")
    (cache,) = json.loads(done.stdout)
    assert cache["rows"] == 600_000 and "Imported 600,000 rows" in done.stderr
    assert insitu(head, "caches", "--json").stdout == elsewhere.run("caches", "--json").stdout
    refused = elsewhere.run("import", "digits", "part-0.npy", code=2)
    at_home = insitu(head, "import", "digits", str(elsewhere.folder / "part-0.npy"), code=2)
    assert (refused.stdout, refused.stderr) == (at_home.stdout, at_home.stderr)
    assert not list(Paths(head).staging.iterdir())

    one = ("--workers", "1", "--max-restarts", "0", "--env", "A_VARIABLE")
    started = elsewhere.run("start", *one, "digits", "job", "train.py", "-x", code=7, A_VARIABLE="mine")
    rows = sum(range(3)) * 200_000
    assert f"[worker:0] ROWS {rows} mine numpy ['-x']\n" in started.stdout
    name = started.stderr.splitlines()[0]
    (listed,) = json.loads(elsewhere.run("ps", "--all", "--json").stdout)
    assert listed["job_id"] == name and listed["exit_code"] == 7
    for command, code in ((("logs", name), 0), (("attach", name), 7), (("stop", name), 3)):
        there, here = elsewhere.run(*command, code=code), insitu(head, *command, code=code)
        assert (there.stdout, there.stderr) == (here.stdout, here.stderr)
    assert "script 'other.py'" in elsewhere.run("start", "digits", "job", "other.py", code=2).stderr
    assert not list(Paths(head).staging.iterdir()) and not elsewhere.home.exists()

    assert "Give --yes" in elsewhere.run("delete", "digits", code=2).stderr
    assert "Deleted the cache digits" in elsewhere.run("delete", "--yes", "digits").stderr
    ended = elsewhere.run("down", "--force", "--json")
    assert json.loads(ended.stdout)["agents"] == ["a", "b"]
    assert not Paths(head).head.exists() and not Paths(head).token.exists()


@pytest.mark.long
def test_a_job_that_is_followed_goes_on_after_an_interrupt(elsewhere: Elsewhere) -> None:
    np.save(elsewhere.folder / "x.npy", np.arange(100))
    elsewhere.run("import", "digits", "x.npy")
    command = ("start", "--workers", "1", "digits", "job", "train.py", "wait")
    with subprocess.Popen(
        [sys.executable, "-m", "insitu", *command],
        cwd=elsewhere.folder,
        env={**os.environ, "INSITU_HOME": str(elsewhere.home), **elsewhere.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout is not None and started.stderr is not None
        assert "ROWS 4950" in started.stdout.readline()
        started.send_signal(signal.SIGINT)
        said = started.stderr.read()
        assert started.wait(60) == 130 and "Detached" in said
    (job,) = json.loads(elsewhere.run("ps", "--json").stdout)
    assert job["state"] == "running"
    elsewhere.run("stop", job["job_id"])


@pytest.mark.long
def test_the_host_of_an_agent_needs_neither_address_nor_token(elsewhere: Elsewhere) -> None:
    np.save(elsewhere.folder / "x.npy", np.arange(100))
    elsewhere.home, elsewhere.environment = elsewhere.hosts.homes["a"], {"KERAS_BACKEND": "numpy"}
    elsewhere.run("import", "digits", "x.npy")
    wait_until(lambda: json.loads(elsewhere.run("caches", "--json").stdout), "a copy of the catalogue")
    started = elsewhere.run(
        "start", "--workers", "1", "--max-restarts", "0", "digits", "job", "train.py", code=7
    )
    assert "ROWS 4950" in started.stdout
    assert not list(Paths(elsewhere.hosts.homes["a"]).jobs.glob("*/journal*"))
    assert list(Paths(elsewhere.hosts.head).jobs.glob("*/journal*"))
