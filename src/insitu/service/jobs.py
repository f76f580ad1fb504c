"""Jobs as `insitu ps --json` and `insitu describe JOB --json` have them (docs/reference/json.md)."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from insitu.base.evaluations import read_evaluations
from insitu.base.tracking import read_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from insitu.base.paths import JobPaths, Paths
    from insitu.base.spec import CacheSpec, TaskSpec
    from insitu.cluster import BrokenJob, JobStatus, Rates


_ASKING_SECONDS = 2.0
"""How long `describe JOB` waits for a server of another system."""


def summarize_job(job: JobStatus | BrokenJob) -> dict[str, Any]:
    """Return one job as `ps --json` and `describe --json` have it (docs/reference/json.md)."""
    from insitu.cluster import BrokenJob

    if isinstance(job, BrokenJob):
        return {"job_id": job.job_id, "state": "unreadable", "reason": job.reason}
    spec, state = job.spec, job.state
    return {
        "job_id": spec.job_id,
        "state": state.phase,
        "cache": spec.cache,
        "command": list(spec.command),
        "tasks": {
            role: sum(1 for t in state.tasks if t.task.role == role)
            for role in ("chief", "worker", "ps", "evaluator")
        },
        "attempt": len(state.attempts),
        "progress": {"epoch": job.steps[0], "step": job.steps[1]} if job.steps else None,
        "created": spec.created,
        "ended": job.ended,
        "exit_code": state.exit_code,
        "reason": state.reason,
    }


_OPTIONS = (
    *("engine", "threads", "seed", "max_restarts", "stall_timeout"),
    *("on_loss", "on_rebalance", "standby"),
    *("gpus_per_worker", "memory_per_worker", "cores_per_worker"),
)
"""Fields of a job's specification that the report has as they are."""


def build_job_report(
    job: JobPaths,
    *,
    ledger: bool = False,
    events: bool = False,
    goodput: bool = False,
    quick: bool = False,
) -> dict[str, Any]:
    """Return what `describe JOB --json` prints (docs/reference/json.md). `quick`: without what has to be
    waited for, which are stragglers and the present topology of another system."""
    from insitu.cluster import Journal, encode_job, measure_goodput, read_placement, read_status

    status = read_status(job)
    placement, cache = read_placement(job)
    spec, state, stored = status.spec, status.state, encode_job(status.state)
    report = summarize_job(status) | {
        "kind": "job",
        "folder": str(job.root),
        "name": spec.name,
        "cache_version": placement.shard_map.version,
        "workers": spec.workers,
        "shards": [
            {"shard": index, "home": home, "partitions": list(partitions)}
            for index, (home, partitions) in enumerate(
                zip(placement.home_nodes, placement.shard_map.shards, strict=True)
            )
        ],
        "settings": dict(spec.settings),
        **{name: getattr(spec, name) for name in _OPTIONS},
        "generation": state.generation,
        "task_list": _describe_tasks(job, stored["tasks"]),
        "stragglers": [] if quick else _measure_stragglers(job, status),
        "strategy": _read_strategy(job, placement.tasks),
        "servers": _read_servers(job, placement.tasks),
        "recoveries": list(map(_describe_recovery, stored["recoveries"])),
        "attempts": [
            {**attempt, "progress": _name_steps(attempt["progress"])} for attempt in stored["attempts"]
        ],
        "evaluations": [asdict(each) for each in read_evaluations(job.evaluations)],
        "checkpoints": sorted(
            e.name for e in os.scandir(job.checkpoints) if e.is_dir() and not e.name.startswith(".")
        ),
        "outputs": _describe_outputs(job),
        "tracking": read_runs(job.tracking),
    }
    if ledger:
        report["ledger"] = audit_epochs(job)
    report |= report_snapshot(cache, status.running and not quick)
    if spec.refresh:
        report |= {"refresh": spec.refresh, "refreshes": report_refreshes(job)}
    if goodput:
        report["goodput"] = measure_goodput(job, status).to_json()
    if events:
        report["events"] = [
            {"at": e.at, "event": e.event, "actions": e.actions} for e in Journal(job.journal).entries()[1:]
        ]
    return report


def _describe_outputs(job: JobPaths) -> list[dict[str, Any]]:
    from insitu.cluster import list_outputs

    return [asdict(each) for each in list_outputs(job)]


def _describe_recovery(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: entry[name] for name in ("how", "tasks", "text", "at", "generation")},
        "steps": _name_steps(entry["steps"]),
        "seconds": entry["ended"] and entry["ended"] - entry["at"],
    }


def _name_steps(progress: list[int] | None) -> dict[str, int] | None:
    return {"epoch": progress[0], "step": progress[1]} if progress else None


def _measure_stragglers(job: JobPaths, status: JobStatus) -> list[dict[str, Any]]:
    """Return the tasks that the others of a running job wait for, measured for a moment."""
    from insitu.cluster import watch_stragglers

    if not status.running or status.state.phase != "running":
        return []
    return [
        {
            "task": str(straggler.task),
            "share": straggler.share,
            "seconds": straggler.seconds,
            "steps": straggler.steps,
        }
        for straggler in watch_stragglers(job, [t.task for t in status.state.alive])
    ]


def _describe_tasks(job: JobPaths, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from insitu.base.progress import read_progress
    from insitu.base.spec import TaskId
    from insitu.cluster import read_rates

    tasks = []
    for state in states:
        task = TaskId.parse(state["task"])
        progress = read_progress(job.progress(task))
        tasks.append(
            {
                "task": state["task"],
                "node": state["node"],
                "shards": state["shards"],
                "attempt": state["attempt"],
                "pid": state["pid"] if state["alive"] else None,
                "member": state["member"] and not state["released"],
                "alive": state["alive"],
                "code": state["code"],
                "progress": progress
                and {
                    "epoch": progress.epoch,
                    "step": progress.shown_step,
                    "rows": progress.rows,
                    "place": progress.place,
                },
                "reads": _read_json(job.reads(task)),
                "rates": summarize_rates(read_rates(job, task)),
            }
        )
    return tasks


def _read_servers(job: JobPaths, tasks: Sequence[TaskSpec]) -> list[dict[str, Any]]:
    """Return the last report of each parameter server, by index. A server that took over reports both."""
    newest: dict[int, dict[str, Any]] = {}
    for task in tasks:
        report = _read_json(job.server_account(task.task)) if task.task.role == "ps" else None
        for server in (report or {}).get("servers", []):
            known = newest.get(server["server"])
            if known is None or known["applied"] <= server["applied"]:
                newest[server["server"]] = server
    return [newest[index] for index in sorted(newest)]


def _read_strategy(job: JobPaths, tasks: Sequence[TaskSpec]) -> dict[str, str] | None:
    """Return what a task has published of its strategy: its name, and how gradients travel."""
    choices = (_read_json(job.strategy(task.task)) for task in tasks)
    return next((choice for choice in choices if choice is not None), None)


def _read_json(path: Any) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def summarize_rates(rates: Rates | None) -> dict[str, Any] | None:
    """Return the rates of a task as JSON has them (docs/reference/json.md)."""
    if rates is None:
        return None
    return {
        "at": rates.at,
        "rows_per_second": rates.rows_per_second,
        "step_seconds": rates.step_seconds,
        "split": dict(rates.split),
        "cpu": rates.cpu,
        "memory": rates.memory,
        "gpus": [dict(gpu) for gpu in rates.gpus],
    }


def audit_epochs(job: JobPaths, first: int = 0) -> list[dict[str, Any]]:
    """Return the audit of each epoch from `first` on, as `describe --ledger --json` prints it."""
    from insitu.cluster import read_placement
    from insitu.grid import audit, find_version, read_ledgers, read_refreshes

    placement, cache = read_placement(job)
    refreshes = read_refreshes(job)
    version_at = partial(find_version, refreshes, cache)
    return [
        {
            "epoch": epoch.epoch,
            "version": epoch.version,
            "complete": epoch.complete,
            "clean": epoch.clean,
            "expected": epoch.expected,
            "counted": epoch.counted,
            "lost": epoch.lost,
            "repeated": epoch.repeated,
            "left_out": epoch.left_out,
            "partitions": [
                {
                    "partition": p.partition,
                    "expected": p.expected,
                    "counted": p.counted,
                    "left_out": p.left_out,
                    "clean": p.clean,
                }
                for p in epoch.partitions
            ],
        }
        for epoch in audit(cache, placement.shard_map, read_ledgers(job, first), version_at)
    ]


def report_refreshes(job: JobPaths) -> list[dict[str, Any]]:
    """Return what `describe JOB --json` says of the rows that were read from another system again."""
    from insitu.grid import read_refreshes

    return [
        {
            "epoch": each.epoch,
            "version": each.cache.version,
            "rows": each.cache.rows,
            "problem": each.problem,
            "snapshot": dict(each.cache.origin or {}),
        }
        for each in read_refreshes(job)
    ]


def report_snapshot(cache: CacheSpec, running: bool) -> dict[str, Any]:
    """Return what `describe JOB --json` says of the snapshot that a job trains on, if it does."""
    if cache.origin is None:
        return {}
    origin = dict(cache.origin)
    if not (running and "servers" in origin):
        return {"snapshot": origin}
    from insitu.grid.sources import describe_moves

    return {"snapshot": origin | {"now": describe_moves(origin, _ASKING_SECONDS)}}


# Lists many jobs quickly, in a process that lists them again and again


_Mark = tuple[int, int, int]
"""(time of the last change, size, inode) of a journal."""


@dataclass(frozen=True, slots=True)
class _Ended:
    #: The path of its journal.
    journal: str
    #: The journal as it was when it was read.
    mark: _Mark
    #: State of the job.
    summary: dict[str, Any]


class JobIndex:
    """The jobs of a home. An ended job is read again when its journal changes. Safe for several threads."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        #: By job id, jobs that have ended.
        self._ended: dict[str, _Ended] = {}

    def list(self) -> list[dict[str, Any]]:
        """Return all jobs as `insitu ps --all --json` lists them, the newest first."""
        from insitu.cluster import list_job_ids

        with self._lock:
            ids = list_job_ids(self._paths)
            found = [self._find_ended(job_id) or self._summarize(self._paths.job(job_id)) for job_id in ids]
            self._ended = {job_id: self._ended[job_id] for job_id in ids if job_id in self._ended}
        return sorted(found, key=lambda job: job.get("created") or 0.0, reverse=True)

    def _find_ended(self, job_id: str) -> dict[str, Any] | None:
        """Return a job that had ended when it was read, and whose journal is as it was then."""
        known = self._ended.get(job_id)
        return known.summary if known is not None and known.mark == _read_mark(known.journal) else None

    def _summarize(self, job: JobPaths) -> dict[str, Any]:
        from insitu.base.errors import ClusterError
        from insitu.cluster import BrokenJob, read_status

        name, journal = job.root.name, str(job.journal)
        mark = _read_mark(journal)
        try:
            status = read_status(job)
        except PermissionError as error:
            return summarize_job(BrokenJob(name, f"a job of another user: {error}"))
        except (ClusterError, OSError) as error:
            return summarize_job(BrokenJob(name, str(error)))
        summary = summarize_job(status)
        if mark is not None and not status.running:
            self._ended[name] = _Ended(journal, mark, summary)
        return summary


def _read_mark(journal: str) -> _Mark | None:
    try:
        found = os.stat(journal)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
