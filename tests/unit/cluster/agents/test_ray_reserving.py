"""GPUs are reserved with Ray, all or none; Ray itself is a stand-in."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest

from insitu.cluster.agents import ray_reserving
from insitu.cluster.agents.ray_reserving import reserve
from insitu.errors import ClusterError


class FakeRay:
    """Two nodes of two GPUs, of which other work may have some."""

    def __init__(self) -> None:
        self.has_controller = True
        #: Reservation -> GPUs.
        self.held: dict[str, list[str]] = {}
        self.of_others = {"ray-a": 0, "ray-b": 0}

    def find_controller(self) -> Any:
        return SimpleNamespace(report=None) if self.has_controller else None

    def call(self, method: Any, *, seconds: float) -> Any:
        joined = [("ray-a", {"node": "a"}), ("ray-b", {"node": "b"}), ("ray-c", None)]
        return 1, [SimpleNamespace(id=name, joined=each) for name, each in joined]

    def list_reservations(self) -> list[str]:
        return sorted(self.held)

    def list_reserved_gpus(self, name: str, seconds: float) -> list[str]:
        return self.held[name]

    def count_gpus(self, node: str) -> tuple[float, float]:
        own = [gpus for name, gpus in self.held.items() if name.split("/")[1] == node[-1]]
        return 2 - self.of_others[node] - sum(map(len, own)), 2

    def start_reservation(
        self, name: str, node: str, job: str, job_node: str, count: int, seconds: float
    ) -> list[str] | None:
        free = int(self.count_gpus(node)[0])
        if free < count:
            return None
        self.held[name] = [str(2 - free + number) for number in range(count)]
        return self.held[name]

    def end_reservation(self, name: str) -> None:
        del self.held[name]


def ask(ray: FakeRay, job: str, **wanted: int) -> ray_reserving.Reserved:
    return reserve(ray, job, wanted)  # type: ignore[arg-type]


def test_a_job_gets_gpus_of_each_node_and_keeps_those_that_it_has() -> None:
    ray = FakeRay()
    assert ask(ray, "one", a=1, b=2).gpus == {"a": ["0"], "b": ["0", "1"]}
    assert len(ray.held) == 2
    # Such as after `insitu resume`, or where another task comes to the node.
    assert ask(ray, "one", b=2).gpus == {"b": ["0", "1"]} and len(ray.held) == 2
    assert ask(ray, "one", a=2).gpus == {"a": ["0", "1"]} and len(ray.held) == 3


def test_who_has_them_is_named_and_nothing_is_kept() -> None:
    ray = FakeRay()
    ask(ray, "one", a=1)
    before = dict(ray.held)
    ray.of_others["ray-b"] = 1
    found = ask(ray, "two", a=1, b=2)
    assert found.failed == {"b": "2 more needed, and Ray has 1 of 2 free (other work of Ray has 1)"}
    assert ray.held == before
    found = ask(ray, "two", a=2)
    assert found.failed == {"a": "2 more needed, and Ray has 1 of 2 free (job one has 1)"}
    assert "Ray has no such node" in ask(ray, "two", c=1).failed["c"]
    ray.has_controller = False
    with pytest.raises(ClusterError, match="needs insitu's controller there"):
        ask(ray, "two", a=1)


def test_what_can_not_be_asked_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = {"address": "ray://h:1", "cluster": "c", "job": "j", "gpus": {"a": 1}}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
    monkeypatch.setattr(ray_reserving, "die_with_parent", lambda *_: None)
    assert ray_reserving.main() == 0
    assert json.loads(capsys.readouterr().out)["error"]
