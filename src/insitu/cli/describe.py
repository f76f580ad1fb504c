"""The describe command: prints everything about one job, or about one cache."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from insitu.cli.console import (
    format_duration,
    format_position,
    format_time,
    print_json,
    print_notice,
    print_table,
)
from insitu.cli.jobs import complete_cache, complete_job, summarize_job
from insitu.errors import InputError, UnknownCache, UnknownJob
from insitu.evaluations import read_evaluations
from insitu.paths import Paths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from insitu.cluster import JobStatus
    from insitu.paths import JobPaths
    from insitu.spec import TaskSpec


_SHOWN_EVALUATIONS = 20
"""How many of the last evaluations are printed; --json has all."""


def complete_either(incomplete: str) -> list[str]:
    """Return, for the shell, caches and jobs that begin with what was typed."""
    return [*complete_cache(incomplete), *complete_job(incomplete)]


def describe(
    name: Annotated[
        str,
        typer.Argument(
            metavar="CACHE_OR_JOB",
            help="A cache's name, or a job's id or enough of its beginning.",
            autocompletion=complete_either,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (see docs/json.md).")] = False,
    ledger: Annotated[bool, typer.Option("--ledger", help="Of a job: audit the rows of each epoch.")] = False,
    events: Annotated[bool, typer.Option("--events", help="Of a job: everything that happened.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Of a cache: check every partition.")] = False,
) -> None:
    """Show all about a cache, or about a job. A name that both have means the cache.

    The address of a cache of Apache Ignite means that one; --verify reads it, for the rows of each partition.

    Examples:

    ```
    insitu describe digits/train --verify
    insitu describe digits-3fa9c1 --ledger
    insitu describe digits-3fa9c1 --json
    insitu describe ignite://grid-1/DIGITS
    ```
    """
    from insitu.cli.data import describe_cache
    from insitu.cli.ignite import describe_ignite_cache
    from insitu.grid.ignite import is_ignite_address

    if is_ignite_address(name):
        _refuse_options(f"{name} is a cache of Ignite", "a job", {"--ledger": ledger, "--events": events})
        describe_ignite_cache(name, as_json, verify)
        return
    job = find_cache_or_job(Paths.default(), name)
    if job is not None:
        _refuse_options(f"{name} is a job", "a cache", {"--verify": verify})
        describe_job(job, as_json=as_json, ledger=ledger, events=events)
        return
    _refuse_options(f"{name} is a cache", "a job", {"--ledger": ledger, "--events": events})
    describe_cache(name, as_json, verify)


def find_cache_or_job(paths: Paths, name: str) -> JobPaths | None:
    """Return None where `name` is that of a cache, else the job that it means. Raises UnknownJob."""
    from insitu.cluster import find_job
    from insitu.grid import Catalog

    if Catalog(paths).find(name) is not None:
        return None
    try:
        return find_job(paths, name)
    except UnknownJob as error:
        _raise_unknown(paths, name, error)


def _refuse_options(fact: str, other: str, options: dict[str, bool]) -> None:
    given = [option for option, value in options.items() if value]
    if given:
        raise InputError(
            f"{' and '.join(options)} can be asked of {other} only, and {fact}. Received: {' '.join(given)}. "
            f"Leave it out, or name {other}: `insitu {'caches' if other == 'a cache' else 'ps --all'}` lists "
            f"them"
        )


def _raise_unknown(paths: Paths, name: str, no_job: UnknownJob) -> NoReturn:
    """Raise the more helpful error: that no cache has the name, or why no job matches."""
    from insitu.grid import Catalog

    if no_job.matches:
        raise no_job
    try:
        Catalog(paths).get(name)
    except UnknownCache as no_cache:
        raise UnknownJob(f"{no_cache.message}. {no_job.message}") from None
    raise no_job


def describe_job(job: JobPaths, *, as_json: bool, ledger: bool, events: bool) -> None:
    """Print one job."""
    report = build_job_report(job, ledger=ledger, events=events)
    if as_json:
        print_json(report)
        return
    _print_job(report)
    if ledger:
        _print_ledger(report["ledger"], report["servers"])
    if events:
        for entry in report["events"]:
            fields = ", ".join(f"{k}={v}" for k, v in entry["event"].items() if k != "event" and v)
            typer.echo(f"{format_time(entry['at'])}  {entry['event']['event']}  {fields}".rstrip())


def build_job_report(job: JobPaths, *, ledger: bool, events: bool) -> dict[str, Any]:
    """Return what `describe JOB --json` prints (docs/json.md)."""
    from insitu.cluster import Journal, encode_job, read_placement, read_status

    status = read_status(job)
    placement, _ = read_placement(job)
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
        "engine": spec.engine,
        "threads": spec.threads,
        "settings": dict(spec.settings),
        "seed": spec.seed,
        "max_restarts": spec.max_restarts,
        "stall_timeout": spec.stall_timeout,
        "on_loss": spec.on_loss,
        "standby": spec.standby,
        "generation": state.generation,
        "task_list": _describe_tasks(job, stored["tasks"]),
        "stragglers": _measure_stragglers(job, status),
        "strategy": _read_strategy(job, placement.tasks),
        "servers": _read_servers(job, placement.tasks),
        "recoveries": list(map(_describe_recovery, stored["recoveries"])),
        "attempts": [
            {**attempt, "progress": _name_steps(attempt["progress"])} for attempt in stored["attempts"]
        ],
        "evaluations": [asdict(each) for each in read_evaluations(job.evaluations)],
        "checkpoints": sorted(e.name for e in os.scandir(job.checkpoints) if not e.name.startswith(".")),
    }
    if ledger:
        report["ledger"] = _audit_epochs(job)
    if events:
        report["events"] = [
            {"at": e.at, "event": e.event, "actions": e.actions} for e in Journal(job.journal).entries()[1:]
        ]
    return report


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
    from insitu.progress import read_progress
    from insitu.spec import TaskId

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
                    "step": progress.step,
                    "rows": progress.rows,
                    "place": progress.place,
                },
                "reads": _read_json(job.reads(task)),
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


def _audit_epochs(job: JobPaths) -> list[dict[str, Any]]:
    from insitu.cluster import read_placement
    from insitu.grid import audit, read_ledgers

    placement, cache = read_placement(job)
    return [
        {
            "epoch": epoch.epoch,
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
        for epoch in audit(cache, placement.shard_map, read_ledgers(job))
    ]


def _print_job(job: dict[str, Any]) -> None:
    ended = f", {format_duration(job['ended'] - job['created'])} after its start" if job["ended"] else ""
    code = f" with exit code {job['exit_code']}" if job["exit_code"] is not None else ""
    facts = {
        "Job": job["job_id"],
        "State": f"{job['state']}{code}{ended}",
        "Reason": job["reason"],
        "Started": f"{format_time(job['created'])} ({format_duration(time.time() - job['created'])} ago)",
        "Cache": _format_cache(job),
        "Command": " ".join(job["command"]),
        "Settings": f"{job['workers']} workers, {len(job['shards'])} shards, "
        f"{job['threads']} threads per replica, seed {job['seed']}, "
        f"stall timeout {job['stall_timeout']:g} s, engine {job['engine']}",
        "Environment": " ".join(f"{name}={value}" for name, value in job["settings"].items()),
        "Strategy": "{strategy}, gradients: {gradients}".format(**job["strategy"]) if job["strategy"] else "",
        "Recovery": f"{job['on_loss']} a lost worker, {_format_standby(job['standby'])}, "
        f"generation {job['generation']}",
        "Checkpoints": ", ".join(job["checkpoints"]) or "none",
        "Folder": job["folder"],
    }
    for name, fact in facts.items():
        if fact:
            typer.echo(f"{name + ':':<13}{fact}")
    typer.echo("")
    header = ("TASK", "NODE", "SHARDS", "STATE", "PROGRESS", "ROWS", "READ LOCALLY", "READ REMOTELY")
    print_table(header, (_format_task(task) for task in job["task_list"]))
    typer.echo("")
    print_table(
        ("ATTEMPT", "STARTED", "LASTED", "CAME TO", "ENDED BECAUSE"),
        (_format_attempt(attempt) for attempt in job["attempts"]),
    )
    _print_recoveries(job["recoveries"])
    _print_evaluations(job["evaluations"])
    _print_servers(job["servers"])
    for straggler in job["stragglers"]:
        behind = f", {straggler['steps']} steps behind" if straggler["steps"] else ""
        late = f"last in {straggler['share']:.0%} of the steps, by {1000 * straggler['seconds']:.1f} ms"
        typer.echo(f"\n{straggler['task']} is {late}{behind}: the others wait for it")


def _format_cache(job: dict[str, Any]) -> str:
    from insitu.spec import NO_CACHE

    if job["cache"] == NO_CACHE:
        return "none, the script brings its own data, of which no ledger is kept"
    return f"{job['cache']} version {job['cache_version']}"


def _print_servers(servers: list[dict[str, Any]]) -> None:
    """Print what parameter servers held at their last report, and how late gradients came to them."""
    if not servers:
        return
    typer.echo("")
    rows = []
    for server in servers:
        held = [
            (name, f"rows [{start:,}, {stop:,})", size) for name, start, stop, _, size in server["pieces"]
        ]
        held += [(n, f"{t['rows']:,} rows by key", t["bytes"]) for n, t in server["tables"].items()]
        rows += [(f"ps:{server['server']}", name, what, f"{size:,}") for name, what, size in held]
    print_table(("SERVER", "HOLDS", "OF IT", "BYTES"), rows)
    for server in servers:
        total = server["bytes"] + server["slot_bytes"] + sum(t["bytes"] for t in server["tables"].values())
        late = (
            f", {server['dropped']:,} dropped late with {server['dropped_rows']:,} rows"
            if server["dropped"]
            else ""
        )
        lost = f", {server['lost']:,} lost with a server" if server["lost"] else ""
        typer.echo(
            f"ps:{server['server']} ({server['mode']}): {total:,} bytes with the optimizer's, "
            f"{server['applied']:,} gradients applied{late}{lost}; staleness "
            f"{_format_staleness(server['staleness'])}"
        )


def _format_staleness(histogram: dict[str, Any]) -> str:
    """Return the counts by updates between a pull and its push: `0: 12, 1: 30, 2-3: 2`."""
    parts = []
    for digits, count in enumerate(histogram["counts"]):
        low, high = (1 << digits - 1, (1 << digits) - 1) if digits else (0, 0)
        if count:
            parts.append(f"{low if low == high else f'{low}-{high}'}: {count:,}")
    return ", ".join(parts) or "none yet"


def _format_standby(count: int | None) -> str:
    return "a process stands by if memory allows" if count is None else f"{count} processes stand by"


def _print_recoveries(recoveries: list[dict[str, Any]]) -> None:
    if not recoveries:
        return
    typer.echo("")
    print_table(
        ("MEMBERSHIP", "TASKS", "WHEN", "AT", "GENERATION", "NEXT STEP AFTER", "BECAUSE"),
        (
            (
                entry["how"],
                ", ".join(entry["tasks"]),
                format_time(entry["at"]),
                format_position(entry["steps"]),
                str(entry["generation"]),
                "-" if entry["seconds"] is None else f"{entry['seconds']:.2f} s",
                entry["text"],
            )
            for entry in recoveries
        ),
    )


def _print_evaluations(evaluations: list[dict[str, Any]]) -> None:
    if not evaluations:
        return
    typer.echo("")
    print_table(
        ("EVALUATION OF", "UPDATES", "WHEN", "TOOK", "SCORES"),
        (
            (
                each["checkpoint"],
                "-" if each["iterations"] is None else f"{each['iterations']:,}",
                format_time(each["at"]),
                f"{each['seconds']:.2f} s",
                ", ".join(f"{name} {value:.6g}" for name, value in each["metrics"].items()),
            )
            for each in evaluations[-_SHOWN_EVALUATIONS:]
        ),
    )


def _format_task(task: dict[str, Any]) -> tuple[str, ...]:
    progress, reads = task["progress"], task["reads"]
    running = "running" if task["member"] else "joining or leaving"
    ended = "ended" if task["code"] == 0 else f"ended ({task['code']})"
    return (
        task["task"],
        task["node"],
        ",".join(map(str, task["shards"])) or "-",
        running if task["alive"] else "-" if task["code"] is None else ended,
        format_position(progress),
        f"{progress['rows']:,}" if progress else "-",
        f"{reads['local_bytes']:,} B" if reads else "-",
        f"{reads['remote_bytes']:,} B" if reads else "-",
    )


def _format_attempt(attempt: dict[str, Any]) -> tuple[str, ...]:
    progress, cause = attempt["progress"], attempt["cause"]
    lasted = format_duration(attempt["ended"] - attempt["started"]) if attempt["ended"] else "under way"
    return (
        str(attempt["number"]),
        format_time(attempt["started"]),
        lasted,
        format_position(progress),
        cause["text"] if cause else "-",
    )


def _print_ledger(epochs: list[dict[str, Any]], servers: list[dict[str, Any]]) -> None:
    typer.echo("")
    if not epochs:
        print_notice(
            "No rows have been accounted for yet. There is no ledger of data that a script brings itself, "
            "nor of datasets with filter or take."
        )
        return
    left_out = any(e["left_out"] for e in epochs)
    print_table(
        ("EPOCH", "ROWS", "COUNTED", *(("LEFT OUT",) if left_out else ()), "LOST", "REPEATED", "VERDICT"),
        (
            (
                str(e["epoch"] + 1),
                f"{e['expected']:,}",
                f"{e['counted']:,}",
                *((f"{e['left_out']:,}",) if left_out else ()),
                f"{e['lost']:,}",
                f"{e['repeated']:,}",
                ("each row once" if e["complete"] else "under way") if e["clean"] else "DOESN'T ADD UP",
            )
            for e in epochs
        ),
    )
    if left_out:
        print_notice(
            "Rows left out were counted, but their gradients entered no update: they came too late for their "
            "step, or weren't finite."
        )
    # Each server decides the same of each gradient.
    if servers and servers[0]["dropped_rows"]:
        shards = ", ".join(f"{count:,} of shard {shard}" for shard, count in servers[0]["dropped_by_shard"])
        print_notice(
            f"Gradients of {servers[0]['dropped_rows']:,} rows came too late for their step: {shards}."
        )


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(describe)
