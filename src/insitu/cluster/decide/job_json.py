"""Turns a job's state, events and actions into JSON and back, as the journal and `describe --json` have them.

The stored names are a format: they stay when a name in the code changes, by the tables below. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from insitu.base.spec import TaskId
from insitu.cluster.decide.events import Action, Event
from insitu.cluster.decide.job_state import (
    Attempt,
    Bug,
    Cause,
    EpochStep,
    Failure,
    JobState,
    Recovery,
    TaskState,
)

_JOB_NAMES = {"target_workers": "wanted", "stop_cause": "stall", "lost_nodes": "lost"}
_TASK_NAMES = {
    "incarnation": "attempt",
    "signal_sent": "asked",
    "failures_in_a_row": "streak",
    "progress_at_death": "died_at",
    "stall_reason": "stalled",
}
"""Names of fields in the code, and as they are stored."""
_EVENT_FIELDS = {"incarnation": "attempt", "incarnations": "attempts"}
_EVENT_NAMES = {"PeersLostEvent": "PeersParted"}
_ACTION_NAMES = {"Log": "Say"}


def encode_job(state: JobState) -> dict[str, Any]:
    """Return `state` as a JSON object."""
    data: dict[str, Any] = _rename(simplify(asdict(state)), _JOB_NAMES)
    data["tasks"] = [_rename(task, _TASK_NAMES) for task in data["tasks"]]
    return data


def decode_job(data: Mapping[str, Any]) -> JobState:
    """Return the state that `encode_job` made `data` of."""
    data = _restore(data, _JOB_NAMES)
    return JobState(
        **{
            **data,
            "tasks": tuple(map(_decode_task, data["tasks"])),
            "holders": tuple(map(tuple, data.get("holders", ()))),
            "attempts": tuple(
                Attempt(**{**a, "cause": _decode_cause(a["cause"]), "progress": _decode_step(a["progress"])})
                for a in data["attempts"]
            ),
            "lost_nodes": tuple(data.get("lost_nodes", ())),
            "leaving_nodes": tuple(data.get("leaving_nodes", ())),
            "died": _decode_task_ids(data["died"]),
            "stop_cause": _decode_cause(data["stop_cause"]),
            "bug": _decode_bug(data.get("bug")),
            "failure_progress": _decode_step(data.get("failure_progress")),
            "recoveries": tuple(
                Recovery(**{**r, "tasks": _decode_task_ids(r["tasks"]), "steps": _decode_step(r["steps"])})
                for r in data.get("recoveries", ())
            ),
        }
    )


def encode_event(event: Event) -> dict[str, Any]:
    """Return `event` as a JSON object: `{"event": NAME, ...}`."""
    name = type(event).__name__
    stored = _EVENT_NAMES.get(name, name.removesuffix("Event"))
    return {"event": stored, **_rename(simplify(asdict(event)), _EVENT_FIELDS)}


def encode_action(action: Action) -> dict[str, Any]:
    """Return `action` as a JSON object: `{"action": NAME, ...}`."""
    name = type(action).__name__
    return {"action": _ACTION_NAMES.get(name, name), **simplify(asdict(action))}


def simplify(value: Any) -> Any:
    """Return `value`, an `asdict`, with tasks as text and tuples as lists."""
    if isinstance(value, dict):
        if value.keys() == {"role", "index"}:
            return f"{value['role']}:{value['index']}"
        return {k: simplify(v) for k, v in value.items()}
    return [simplify(v) for v in value] if isinstance(value, (list, tuple)) else value


def _rename(data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in data.items()}


def _restore(data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return _rename(data, {stored: name for name, stored in names.items()})


def _decode_task_ids(names: Sequence[str]) -> tuple[TaskId, ...]:
    return tuple(map(TaskId.parse, names))


def _decode_task(data: Mapping[str, Any]) -> TaskState:
    data = _restore(data, _TASK_NAMES)
    return TaskState(
        **{
            **data,
            "task": TaskId.parse(data["task"]),
            "failure": Failure(**data["failure"]) if data["failure"] else None,
            "shards": tuple(data.get("shards", ())),
            "progress_at_death": _decode_step(data.get("progress_at_death")),
        }
    )


def _decode_step(data: Sequence[int] | None) -> EpochStep | None:
    return (data[0], data[1]) if data else None


def _decode_bug(data: Mapping[str, Any] | None) -> Bug | None:
    return Bug(data["fingerprint"], (data["progress"][0], data["progress"][1]), data["at"]) if data else None


def _decode_cause(data: Mapping[str, Any] | None) -> Cause | None:
    return Cause(**{**data, "task": TaskId.parse(data["task"]) if data["task"] else None}) if data else None
