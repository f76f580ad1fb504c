"""What the page shows of one job: fragments that are pushed when they change."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from insitu.grid import list_epochs
from insitu.paths import JobPaths
from insitu.service import audit_epochs, has_summaries, read_log
from insitu.ui.access import Role
from insitu.ui.artifacts import list_artifacts
from insitu.ui.rendering import render

FRAGMENTS = ("head", "actions", "curves", "tasks", "log", "history", "goodput", "data")
"""Names of the fragments, which are those of events and of templates."""
_LINES = 300
_EPOCHS = 8
"""Epochs whose audit is shown."""
_ENDED = ("finished", "failed", "stopped")


def render_fragments(
    job: JobPaths,
    report: dict[str, Any],
    numbers: dict[str, Any],
    role: Role,
    log: dict[str, Any],
    board: str | None = None,
) -> dict[str, str]:
    """Return each fragment of a job's page. `report` and `numbers` are what `build_job_report` and
    `read_numbers` have returned a moment ago. `log` holds `task`, `attempt`, `search` and `before`, `board`
    the address of its TensorBoard. Reads files."""
    epochs = list_epochs(job)
    values = {
        "job": report,
        "ledger": audit_epochs(job, epochs[-_EPOCHS:][0]) if epochs else [],
        "epochs": len(epochs),
        "command": shlex.join(report["command"]),
        "role": role,
        "numbers": numbers,
        "ended": report["state"] in _ENDED,
        "rows": sum(task["progress"]["rows"] for task in report["task_list"] if task["progress"]),
        "artifacts": list_artifacts(job),
        "page": read_log(
            job,
            log["task"] or None,
            attempt=log["attempt"],
            lines=_LINES,
            before=log["before"],
            search=log["search"],
        ),
        "log": log,
        "timeline": list_events(report),
        "board": board,
        "has_summaries": has_summaries(job),
    }
    return {name: render(f"_{name}.html", **values) for name in FRAGMENTS}


def list_events(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what happened to a job, in order: `{"at", "kind", "title", "text"}`. Failures are `bad`."""
    events: list[dict[str, Any]] = [
        {"at": report["created"], "kind": "plain", "title": "Job submitted", "text": ""}
    ]
    for attempt in report["attempts"]:
        events.append(
            {
                "at": attempt["started"],
                "kind": "plain",
                "title": f"Attempt {attempt['number']} started",
                "text": "",
            }
        )
        if attempt["ended"]:
            cause = attempt["cause"]
            events.append(
                {
                    "at": attempt["ended"],
                    "kind": "bad" if cause else "good",
                    "title": f"Attempt {attempt['number']} ended",
                    "text": cause["text"] if cause else "all tasks have ended well",
                }
            )
    for recovery in report["recoveries"]:
        took = (
            ""
            if recovery["seconds"] is None
            else f" The next step came {recovery['seconds']:.2f} s after it."
        )
        events.append(
            {
                "at": recovery["at"],
                "kind": "bad" if recovery["how"] in ("replaced", "adopted") else "plain",
                "title": f"{', '.join(recovery['tasks'])} {recovery['how']}",
                "text": f"{recovery['text']}.{took}",
            }
        )
    return sorted(events, key=lambda event: event["at"])


def count_changed(before: Mapping[str, str], after: Mapping[str, str]) -> Sequence[str]:
    """Return the names of the fragments that differ."""
    return [name for name in after if before.get(name) != after[name]]
