"""What Ray gives to a job, as its supervisor knows it. The process that asks Ray is a stand-in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from insitu.base.context import GPU_NUMBERS_ENV
from insitu.base.errors import ClusterError
from insitu.base.spec import JobSpec, NodeId, TaskId, TaskSpec
from insitu.cluster.engines import Command
from insitu.cluster.hosts_engine.hosts_engine import Reservations

A, B = NodeId("a"), NodeId("b")
ASK = """
import json, pathlib, sys
folder = pathlib.Path({folder!r})
with open(folder / "asked", "a") as file:
    file.write(sys.stdin.read() + "\\n")
print("a notice of Ray")
print((folder / "answer").read_text())
"""


def make_spec(gpus: int = 2, cores: int = 0) -> JobSpec:
    return JobSpec("job-1", "job", "-", ("x.py",), 1, 1, gpus_per_worker=gpus, cores_per_worker=cores)


class Desk:
    def __init__(self, folder: Path, spec: JobSpec) -> None:
        self._folder = folder
        command = (sys.executable, "-c", ASK.format(folder=str(folder)))
        self.gpus = Reservations(spec, "ray:6379", "c1", command)
        self.answer({"gpus": {}, "failed": {}})

    def answer(self, answer: Any) -> None:
        (self._folder / "answer").write_text(answer if isinstance(answer, str) else json.dumps(answer))

    @property
    def wanted(self) -> list[dict[str, dict[str, int]]]:
        file = self._folder / "asked"
        return [json.loads(line)["wanted"] for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def asked(self) -> list[dict[str, int]]:
        """The GPUs by node."""
        return [{node: share["gpus"] for node, share in each.items()} for each in self.wanted]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, make_spec())


def worker(index: int, node: NodeId = A) -> TaskSpec:
    return TaskSpec(TaskId("worker", index), node)


COMMAND = Command((sys.executable,), {})


def test_a_node_is_asked_for_once_and_again_when_it_needs_more(desk: Desk) -> None:
    desk.answer({"gpus": {"a": ["3", "1"], "b": ["0", "10", "2", "1"]}, "failed": {}})
    desk.gpus.require([worker(0), worker(1, B), worker(2, B), TaskSpec(TaskId("ps", 0), A)])
    assert desk.asked == [{"a": 2, "b": 4}]
    for task, numbers in ((worker(0), "1,3"), (worker(1, B), "0,1,2,10")):
        assert desk.gpus.equip(task, COMMAND).environment[GPU_NUMBERS_ENV] == numbers
    assert len(desk.asked) == 1
    # A task that is started on another node, as after the loss of its own.
    desk.answer({"gpus": {"a": ["0", "1", "2", "3"]}, "failed": {}})
    assert desk.gpus.equip(worker(1), COMMAND).environment[GPU_NUMBERS_ENV] == "0,1,2,3"
    assert desk.asked[1:] == [{"a": 4}]
    desk.gpus.equip(worker(1), COMMAND)
    desk.gpus.forget(A)
    desk.gpus.equip(worker(0), COMMAND)
    assert desk.asked[2:] == [{"a": 4}]


def test_processors_are_reserved_with_the_gpus_and_without_any(tmp_path: Path) -> None:
    both, alone = (tmp_path / name for name in ("both", "alone"))
    for folder in (both, alone):
        folder.mkdir()
    desk = Desk(both, make_spec(gpus=1, cores=3))
    desk.answer({"gpus": {"a": ["0", "1"]}, "failed": {}})
    desk.gpus.require([worker(0), worker(1)])
    assert desk.wanted == [{"a": {"gpus": 2, "cores": 6}}]
    desk = Desk(alone, make_spec(gpus=0, cores=3))
    desk.answer({"gpus": {"a": []}, "failed": {}})
    for _ in range(2):
        assert desk.gpus.equip(worker(0), COMMAND) == COMMAND
    assert desk.wanted == [{"a": {"gpus": 0, "cores": 3}}]


def test_tasks_that_need_nothing_and_clusters_without_ray_ask_for_nothing(desk: Desk, tmp_path: Path) -> None:
    assert desk.gpus.equip(TaskSpec(TaskId("ps", 0), A), COMMAND) == COMMAND
    idle = Desk(tmp_path, make_spec(gpus=0))
    idle.gpus.require([worker(0)])
    assert idle.gpus.equip(worker(0), COMMAND) == COMMAND
    elsewhere = Reservations(make_spec(), "", "c1", ("false",))
    elsewhere.require([worker(0)])
    assert elsewhere.equip(worker(0), COMMAND) == COMMAND
    assert desk.asked == idle.asked == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"gpus": {}, "failed": {"a": "2 more needed"}}, "Ray must have free what the job.*a: 2 more needed"),
        ({"error": "no raylet runs"}, "Nothing can be reserved with Ray: no raylet runs"),
        ("nonsense", r"ended with exit code 0 \(nothing\)"),
        ({"gpus": {"a": ["GPU-1", "GPU-2"]}, "failed": {}}, "by their numbers. Received: GPU-1, GPU-2 of a"),
    ],
)
def test_what_ray_does_not_give_is_refused(desk: Desk, answer: Any, message: str) -> None:
    desk.answer(answer)
    with pytest.raises(ClusterError, match=message):
        desk.gpus.equip(worker(0), COMMAND)
