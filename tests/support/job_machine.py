"""A job's decisions fed by hand, for the tests of `insitu.cluster.decide`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from insitu.base.spec import ROLES, NodeId, TaskId, TaskSpec
from insitu.cluster.decide.events import (
    Action,
    Event,
    Launch,
    Log,
    Publish,
    Signal,
    SubmittedEvent,
    TaskExitedEvent,
    TickEvent,
)
from insitu.cluster.decide.job import advance, new_job
from insitu.cluster.decide.job_json import decode_job, encode_job
from insitu.cluster.decide.job_state import Failure, JobState, OnLoss, validate

CHIEF, W0, W1, W2, PS, EVALUATOR = (
    TaskId.parse(t) for t in ("chief", "worker:0", "worker:1", "worker:2", "ps", "evaluator")
)
NODE = NodeId("node-0")
BUG = Failure("ValueError", "no", "f00d")
PEER_LOST = Failure("PeerLost", "worker:1 has gone", "beef", peer_lost=True)


class JobRun:
    """A job's life, fed by hand; every state is validated and survives JSON."""

    def __init__(
        self, *tasks: TaskId, max_restarts: int = 3, on_loss: OnLoss = "replace", mirrored: bool = False
    ) -> None:
        workers = sorted(t for t in tasks if t.role == "worker")
        specs = [TaskSpec(t, NODE, (workers.index(t),) if t in workers else ()) for t in sort_by_role(tasks)]
        holders = ((NODE,),) * len(workers)
        self.state: JobState = new_job(specs, max_restarts, on_loss, holders, mirrored=mirrored)
        self.now = 100.0

    def feed(self, event: Event, after: float = 0.0) -> list[Action]:
        self.now += after
        self.state, actions = advance(self.state, event, self.now)
        validate(self.state)
        assert decode_job(json.loads(json.dumps(encode_job(self.state)))) == self.state
        return actions

    def exits(
        self, task: TaskId, code: int = 0, failure: Failure | None = None, **more: object
    ) -> list[Action]:
        return self.feed(TaskExitedEvent(task, code, failure, **more))  # type: ignore[arg-type]

    def tick(self) -> list[Action]:
        assert self.state.due is not None
        self.now = max(self.now, self.state.due)
        return self.feed(TickEvent())


def sort_by_role(tasks: Iterable[TaskId]) -> list[TaskId]:
    return sorted(tasks, key=lambda t: (ROLES.index(t.role), t.index))


def running(*tasks: TaskId, **options: Any) -> JobRun:
    run = JobRun(*tasks, **options)
    assert run.feed(SubmittedEvent()) == [Publish(1), Launch(tuple(sort_by_role(tasks)))]
    return run


def signals(actions: list[Action]) -> list[tuple[str, str]]:
    return [(str(a.task), a.name) for a in actions if isinstance(a, Signal)]


def logged(actions: list[Action]) -> str:
    return "\n".join(a.text for a in actions if isinstance(a, Log))
