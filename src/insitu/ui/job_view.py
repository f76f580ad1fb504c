"""What the page shows of one job: fragments that are pushed when they change."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from insitu.paths import JobPaths
from insitu.service import build_job_report, has_summaries, read_log
from insitu.ui.access import Role
from insitu.ui.artifacts import list_artifacts
from insitu.ui.numbers_view import read_numbers
from insitu.ui.rendering import render

FRAGMENTS = ("head", "actions", "curves", "tasks", "log", "history", "goodput", "data")
"""Names of the fragments, which are those of events and of templates."""
_LINES = 300
_ENDED = ("finished", "failed", "stopped")


def render_fragments(
    job: JobPaths,
    role: Role,
    log: dict[str, Any],
    numbers: dict[str, Any] | None = None,
    board: str | None = None,
) -> dict[str, str]:
    """Return each fragment of a job's page. `log` holds `task`, `attempt`, `search` and `before`, `numbers`
    what `read_numbers` has returned a moment ago, `board` the address of its TensorBoard. Reads files."""
    report = build_job_report(job, quick=True, ledger=True)
    values = {
        "job": report,
        "command": shlex.join(report["command"]),
        "role": role,
        "numbers": numbers or read_numbers(job, report["evaluations"]),
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


def count_changed(before: dict[str, str], after: dict[str, str]) -> Sequence[str]:
    """Return the names of the fragments that differ."""
    return [name for name in after if before.get(name) != after[name]]
