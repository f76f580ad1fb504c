"""The stored form of a job's state, events and actions."""

from __future__ import annotations

import json
from dataclasses import replace

from job_machine import BUG, W0, W1, JobRun, running

from insitu.cluster.decide import events
from insitu.cluster.decide.events import Log, PeersLostEvent, Publish, TaskExitedEvent
from insitu.cluster.decide.job_json import decode_job, encode_action, encode_event, encode_job
from insitu.cluster.decide.job_state import Cause


def replaced() -> JobRun:
    run = running(W0, W1)
    run.exits(W1, 1, BUG, elastic=(W0,), progress=(1, 5))
    return run


def test_a_state_survives_the_way_through_json() -> None:
    state = replace(
        replaced().state, stop_cause=Cause("why", 1, W0), lost_nodes=("node-1",), evaluator_failures=2
    )
    assert decode_job(json.loads(json.dumps(encode_job(state)))) == state


def test_stored_names_are_those_of_the_format() -> None:
    data = encode_job(replaced().state)
    assert {"wanted", "stall", "lost", "tasks", "attempts", "recoveries"} <= data.keys()
    (_, task) = data["tasks"]
    assert (task["task"], task["attempt"], task["asked"], task["streak"]) == ("worker:1", 2, "", 0)
    assert (task["died_at"], task["stalled"]) == ([1, 5], "")


def test_a_state_without_newer_fields_is_read_with_their_defaults() -> None:
    data = encode_job(replaced().state)
    for name in ("evaluator_failures", "recoveries", "lost", "holders"):
        del data[name]
    assert decode_job(data).evaluator_failures == 0


def test_events_and_actions_are_stored_under_their_names() -> None:
    assert encode_event(TaskExitedEvent(W1, -9, incarnation=2))["attempt"] == 2
    assert encode_event(PeersLostEvent((W0,))) == {
        "event": "PeersParted",
        "tasks": ["worker:0"],
        "progress": None,
        "elastic": [],
    }
    assert encode_event(events.TickEvent()) == {"event": "Tick"}
    assert encode_action(Log("text")) == {"action": "Say", "text": "text"}
    assert encode_action(Publish(2)) == {"action": "Publish", "generation": 2}
