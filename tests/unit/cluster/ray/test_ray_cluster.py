"""What is said where Ray isn't there, or doesn't take this machine in. test_hosts_ray.py has a real one."""

from __future__ import annotations

import builtins
import socket
import sys
from typing import Any

import pytest

from insitu.base.errors import ClusterError, InputError
from insitu.cluster.ray import ray_cluster
from insitu.cluster.ray.ray_cluster import (
    _describe_failure,
    connect_to_ray,
    describe_death,
    find_gcs_obstacle,
)


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return real(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InputError, match=r"pip install 'insitu\[ray\]'"), connect_to_ray("auto", "n"):
        pass


class NoRay:
    """In the place of Ray, where it isn't reached."""

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize(
    ("address", "kind", "message"),
    [
        ("ray://10.0.0.1:10001", InputError, "which is of Ray's client"),
        ("nonsense", InputError, "nonsense"),
        ("127.0.0.1:{closed}", ClusterError, "A Ray cluster must run at --address. Received: 127.0.0.1"),
    ],
)
def test_addresses_that_cannot_be_are_refused_before_ray_is_asked(
    monkeypatch: pytest.MonkeyPatch, address: str, kind: type[Exception], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", NoRay())
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    with pytest.raises(kind, match=message), connect_to_ray(address.format(closed=closed), "n"):
        pass


def test_a_machine_that_is_no_node_of_ray_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", NoRay())
    monkeypatch.setattr(ray_cluster, "runs_raylet", lambda: False)
    with pytest.raises(ClusterError, match="no raylet runs on this machine"), connect_to_ray("auto", "n"):
        pass


def test_a_cluster_that_has_ended_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert find_gcs_obstacle(address) is None
    assert isinstance(find_gcs_obstacle(address), ConnectionRefusedError)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("Could not find any running Ray instance."), "ray start --head"),
        (RuntimeError("Version mismatch: The cluster was started with:\n Ray: 2.1"), "same versions of Ray"),
        (RuntimeError("This node has an IP address of 10.0.0.9"), "a node of the Ray cluster"),
    ],
)
def test_what_ray_says_is_put_into_a_line(error: Exception, message: str) -> None:
    said = _describe_failure("auto", error)
    assert message in said and "\n" not in said and "Received: " in said


def test_the_cause_of_an_actors_end_is_its_last_line() -> None:
    text = "The actor died because of an error\n  File x\nModuleNotFoundError: No module named 'insitu'\n"
    assert describe_death(RuntimeError(text)) == (
        "Ray's Python there can't load this version of insitu (ModuleNotFoundError: No module named 'insitu')"
    )
    assert describe_death(RuntimeError("The node has died")) == "The node has died"
    assert describe_death(ValueError()) == "ValueError"
