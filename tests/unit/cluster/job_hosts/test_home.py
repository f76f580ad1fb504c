"""Which store an agent owns, and which head it follows."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.base.process.processes import identify_process
from insitu.base.spec import NodeId
from insitu.cluster.job_hosts import home as homes
from insitu.cluster.wire import records
from insitu.grid import Catalog, CatalogWatch, import_cache, install_catalog_copy

NODE = NodeId("a")
HEAD = {"cluster": "c" * 32, "epoch": 3, "instance": "i"}


@pytest.fixture
def paths(home: Path) -> Paths:
    paths = Paths(home)
    paths.node(NODE).mkdir(parents=True)
    home.chmod(0o700)
    return paths


def accepted(paths: Paths, **changes: Any) -> None:
    values = {
        "cluster": "c" * 32,
        "head": "h:1",
        "epoch": 3,
        "instance": "i",
        "host": "x",
        "pid": 1,
        "start": 1,
    }
    records.write_agent(paths, NODE, records.AgentRecord(**{**values, **changes}))


def test_a_store_keeps_its_name(paths: Paths) -> None:
    assert homes.choose_node(paths, "") == "a" and homes.choose_node(paths, "b") == "b"
    paths.node("b").mkdir()
    with pytest.raises(
        InputError, match=r"An agent owns one store\. Received: .* with a, b\. Name one by --name"
    ):
        homes.choose_node(paths, "")


def test_a_new_store_has_the_name_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.example.com")
    assert homes.choose_node(Paths(tmp_path), "") == "node7.example.com"
    monkeypatch.setattr(socket, "gethostname", lambda: "-odd name")
    with pytest.raises(InputError, match="Give another one by --name"):
        homes.choose_node(Paths(tmp_path), "")


def test_a_head_is_followed_again_and_a_later_one_too(paths: Paths) -> None:
    homes.check_home(paths, NODE, HEAD, "h:1")
    accepted(paths)
    homes.check_home(paths, NODE, HEAD, "h:1")
    homes.check_home(paths, NODE, {**HEAD, "epoch": 4, "instance": "j"}, "h:2")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({**HEAD, "epoch": 2, "instance": "j"}, r"Received: epoch 2 of the head at h:2, after epoch 3"),
        ({**HEAD, "instance": "j"}, "One home is a copy of the other"),
        ({**HEAD, "cluster": "d" * 32}, r"of cluster dddddddd, and a, which belongs to cluster cccccccc"),
        ({"epoch": 3}, "must name cluster and epoch"),
    ],
)
def test_of_two_heads_one_is_followed(paths: Paths, head: dict[str, Any], message: str) -> None:
    accepted(paths)
    with pytest.raises((ClusterError, InputError), match=message):
        homes.check_home(paths, NODE, head, "h:2")
    paths.agent(NODE).unlink()  # as the message of another cluster advises
    if "cluster" in head:
        homes.check_home(paths, NODE, head, "h:2")


def test_the_home_of_a_head_follows_no_other(paths: Paths) -> None:
    own = records.change_head(paths)
    with pytest.raises(InputError, match="The home of a head takes part in its own cluster"):
        homes.check_home(paths, NODE, HEAD, "h:1")
    homes.check_home(paths, NODE, {**HEAD, "cluster": own.cluster}, "h:1")


def test_a_catalogue_of_its_own_is_not_overwritten(paths: Paths, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(10))
    import_cache(paths, "digits", [str(tmp_path / "x.npy")])
    with pytest.raises(InputError, match="which has a catalogue of its own with digits"):
        homes.check_home(paths, NODE, HEAD, "h:1")
    watch = CatalogWatch(paths)
    watch.poll()
    install_catalog_copy(paths, watch.data or b"")
    homes.check_home(paths, NODE, HEAD, "h:1")
    assert [cache.name for cache in Catalog(paths).caches()] == ["digits"]


def test_a_deleted_store_takes_the_rest_along_unless_it_is_the_heads(paths: Paths) -> None:
    records.write_token(paths, "t" * 32)
    paths.node("b").mkdir()
    homes.delete_store(paths, NODE)
    assert not paths.node(NODE).exists() and paths.token.exists()
    homes.delete_store(paths, NodeId("b"))
    assert not paths.token.exists() and list(paths.nodes.iterdir()) == []
    records.make_token(paths)
    records.change_head(paths)
    homes.delete_store(paths, NodeId("b"))
    assert paths.token.exists()


def test_nothing_runs_where_no_lock_is_held(paths: Paths) -> None:
    accepted(paths)
    assert homes.find_running(paths) == {} and homes.stop_agents(paths) == []


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of the same user."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@contextlib.contextmanager
def holding(lock: Path) -> Iterator[int]:
    """Yield the number of a process that holds a lock, as an agent does."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        records.take_process_lock(lock)
        os.write(writer, b"x")
        while True:
            signal.pause()
    try:
        assert os.read(reader, 1) == b"x"
        yield child
    finally:
        os.close(reader)
        os.close(writer)
        with contextlib.suppress(ChildProcessError):  # a test has waited for it
            if os.waitpid(child, os.WNOHANG) == (0, 0):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def test_no_process_is_ended_by_what_others_write_into_a_store(
    paths: Paths, bystander: subprocess.Popen[bytes]
) -> None:
    """A member of a shared home put the number of another process of the victim into agent.json."""
    identity = identify_process(bystander.pid)
    assert identity is not None
    accepted(paths, host=socket.gethostname(), pid=identity.pid, start=identity.start)
    with holding(paths.agent_lock(NODE)) as agent:
        assert homes.stop_agents(paths) == [NODE]
        assert bystander.poll() is None
        assert os.WIFSIGNALED(os.waitpid(agent, 0)[1])


def test_the_lock_of_another_process_that_is_put_into_a_store_ends_nothing(paths: Paths) -> None:
    """As a member can: the lock of another agent, which runs, is renamed."""
    with holding(paths.home / "other.lock") as other:
        (paths.home / "other.lock").rename(paths.agent_lock(NODE))
        with pytest.raises(InputError, match="somebody has put it there"):
            homes.stop_agents(paths)
        assert os.waitpid(other, os.WNOHANG) == (0, 0)
