"""GPUs and processors are reserved with Ray, all or none; Ray itself is a stand-in."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest

from insitu.base.errors import ClusterError
from insitu.cluster.ray import ray_reserving
from insitu.cluster.ray.ray_cluster import Given, Share
from insitu.cluster.ray.ray_reserving import reserve


class FakeRay:
    """Two nodes of two GPUs and four processors, of which other work may have some."""

    def __init__(self) -> None:
        self.has_controller = True
        self.held: dict[str, Given] = {}
        #: GPUs that other work has.
        self.of_others = {"ray-a": 0, "ray-b": 0}
        #: Nodes that start no process in time.
        self.slow: set[str] = set()

    def find_controller(self) -> Any:
        return SimpleNamespace(report=None) if self.has_controller else None

    def call(self, method: Any, *, seconds: float) -> Any:
        joined = [("ray-a", {"node": "a"}), ("ray-b", {"node": "b"}), ("ray-c", None)]
        return 1, [SimpleNamespace(id=name, joined=each) for name, each in joined]

    def list_reservations(self) -> list[str]:
        return sorted(self.held)

    def read_reservation(self, name: str, seconds: float) -> Given:
        return self.held[name]

    def count_free(self, node: str, resource: str) -> tuple[float, float]:
        own = [given for name, given in self.held.items() if name.split("/")[1] == node[-1]]
        if resource == "CPU":
            return 4 - 0.001 - sum(given.cores for given in own), 4
        return 2 - self.of_others[node] - sum(len(given.gpus) for given in own), 2

    def start_reservation(
        self, name: str, node: str, job: str, job_node: str, share: Share, seconds: float
    ) -> Given | None:
        if node in self.slow:
            raise ClusterError("Ray gave nothing")
        free = int(self.count_free(node, "GPU")[0])
        if free < share.gpus or self.count_free(node, "CPU")[0] < share.cores - 0.001:
            return None
        numbers = tuple(str(2 - free + number) for number in range(share.gpus))
        self.held[name] = Given(numbers, share.cores)
        return self.held[name]

    def end_reservation(self, name: str) -> None:
        del self.held[name]


def ask(ray: FakeRay, job: str, **gpus: int) -> ray_reserving.Reserved:
    return ask_for(ray, job, **{node: Share(count) for node, count in gpus.items()})


def ask_for(ray: FakeRay, job: str, **wanted: Share) -> ray_reserving.Reserved:
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
    assert found.failed == {"b": "2 more GPUs needed, and Ray has 1 of 2 free (other work of Ray has 1)"}
    assert ray.held == before
    found = ask(ray, "two", a=2)
    assert found.failed == {"a": "2 more GPUs needed, and Ray has 1 of 2 free (job one has 1)"}
    assert "Ray has no such node" in ask(ray, "two", c=1).failed["c"]
    ray.has_controller = False
    with pytest.raises(ClusterError, match="needs insitu's controller there"):
        ask(ray, "two", a=1)


def test_processors_are_given_to_the_last_one_and_who_has_them_is_named() -> None:
    ray = FakeRay()
    assert ask_for(ray, "one", a=Share(1, 3)).gpus == {"a": ["0"]}
    assert ask_for(ray, "one", a=Share(1, 4)).gpus == {"a": ["0"]}  # another task comes to the node
    assert [given.cores for given in ray.held.values()] in ([3, 1], [1, 3])
    before = dict(ray.held)
    found = ask_for(ray, "two", a=Share(2, 1), b=Share(0, 4))
    assert found.failed == {
        "a": "2 more GPUs needed, and Ray has 1 of 2 free (job one has 1), and "
        "1 more processor needed, and Ray has 0 of 4 free (job one has 4)"
    }
    assert ray.held == before
    assert ask_for(ray, "two", b=Share(0, 4)).gpus == {"b": []}


def test_a_slow_node_is_not_said_to_be_taken() -> None:
    ray = FakeRay()
    ray.slow.add("ray-b")
    assert ask(ray, "one", a=1, b=1).failed == {"b": "Ray gave nothing"}
    assert ray.held == {}


def test_what_can_not_be_asked_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = {"address": "ray://h:1", "cluster": "c", "job": "j", "wanted": {"a": {"gpus": 1, "cores": 0}}}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
    monkeypatch.setattr(ray_reserving, "die_with_parent", lambda *_: None)
    assert ray_reserving.main() == 0
    assert json.loads(capsys.readouterr().out)["error"]
