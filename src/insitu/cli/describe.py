"""The describe command: prints everything about one job, or about one cache."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from insitu.base.errors import InputError, UnknownCache, UnknownJob
from insitu.base.paths import Paths
from insitu.base.spec import split_version
from insitu.base.wording import format_count
from insitu.cli.completion import complete_cache, complete_job
from insitu.cli.connected import ConfigOption, describe_table, find_address, format_refreshes, format_snapshot
from insitu.cli.console import (
    JsonOption,
    format_duration,
    format_position,
    format_size,
    format_time,
    print_json,
    print_notice,
    print_table,
)
from insitu.cli.rates import print_rates
from insitu.service import build_job_report, format_staleness

if TYPE_CHECKING:
    from insitu.base.paths import JobPaths


# Prints the ledger of a job: which rows of each epoch have entered the model


def print_ledger(epochs: list[dict[str, Any]], servers: list[dict[str, Any]]) -> None:
    """Print the audit of each epoch, and what parameter servers left out."""
    typer.echo("")
    if not epochs:
        print_notice(
            "No rows have been accounted for yet. There is no ledger of data that a script brings itself, "
            "nor of datasets with filter or take."
        )
        return
    left_out = any(e["left_out"] for e in epochs)
    versions = len({e["version"] for e in epochs}) > 1
    print_table(
        (
            "EPOCH",
            *(("VERSION",) if versions else ()),
            "ROWS",
            "COUNTED",
            *(("LEFT OUT",) if left_out else ()),
            "LOST",
            "REPEATED",
            "VERDICT",
        ),
        (
            (
                str(e["epoch"] + 1),
                *((str(e["version"]),) if versions else ()),
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


# Prints the use of each second of a job


_LEAST = 0.0005
"""Share of the time that an activity needs to be listed."""


def print_goodput(account: Mapping[str, Any]) -> None:
    """Print the account of a job, as `Goodput.to_json` returns it."""
    typer.echo("")
    wall = account["wall"]
    if not wall or not account["tasks"]:
        print_notice("No task has run yet, so there is no time to account for.")
        return
    typer.echo(
        f"Goodput: {account['goodput']:.1%} of {format_duration(wall)} ({wall:,.1f} s) went into gradients "
        "and updates of the model."
    )
    typer.echo("")
    own = {task["task"]: task["seconds"] for task in (*account["tasks"], *account["other_tasks"])}
    names = dict.fromkeys(name for seconds in (account["seconds"], *own.values()) for name in seconds)
    shown = [
        n for n in names if max(s.get(n, 0.0) for s in (account["seconds"], *own.values())) >= _LEAST * wall
    ]
    print_table(
        ("ACTIVITY", "SHARE", "MEAN", *own),
        (
            (
                name,
                f"{account['seconds'].get(name, 0.0) / wall:.1%}",
                f"{account['seconds'].get(name, 0.0):,.2f} s",
                *(f"{seconds.get(name, 0.0):,.2f} s" for seconds in own.values()),
            )
            for name in shown
        ),
    )
    for number, loss in enumerate(account["losses"], 1):
        typer.echo(f"\n{number}. {loss['activity']}: {loss['text']}.\n   {loss['advice']}.")


_SHOWN_OUTPUTS = 20
"""How many files that the job has written are printed; --json has more."""
_SHOWN_EVALUATIONS = 20
"""How many of the last evaluations are printed; --json has all."""


def complete_either(incomplete: str) -> list[str]:
    """Return, for the shell, caches and jobs that begin with what was typed."""
    return [*complete_cache(incomplete), *complete_job(incomplete)]


def describe(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A cache's name, or a job's id or enough of its beginning.",
            autocompletion=complete_either,
        ),
    ],
    as_json: JsonOption = False,
    ledger: Annotated[bool, typer.Option("--ledger", help="Of a job: audit the rows of each epoch.")] = False,
    events: Annotated[bool, typer.Option("--events", help="Of a job: everything that happened.")] = False,
    goodput: Annotated[
        bool, typer.Option("--goodput", help="Of a job: where each second went, and what to do about it.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Of a cache: check every partition.")] = False,
    config: ConfigOption = None,
) -> None:
    """Show all about a cache, or about a job. A name that both have means the cache.

    The address of a cache of Apache Ignite means that one; --verify reads it, for the rows of each partition.

    Examples:

    ```
    insitu describe digits/train --verify
    insitu describe digits/train@3
    insitu describe digits-3fa9c1 --ledger
    insitu describe digits-3fa9c1 --goodput
    insitu describe digits-3fa9c1 --json
    insitu describe ignite://grid-1/DIGITS
    ```
    """
    from insitu.cli.data import describe_cache

    of_jobs = {"--ledger": ledger, "--events": events, "--goodput": goodput}
    name = find_address(name, config)
    if "://" in name:
        _refuse_options(f"{name} is a table of another system", "a job", of_jobs)
        if describe_table(name, as_json, verify):
            return
    job = find_cache_or_job(Paths.default(), name)
    if job is not None:
        _refuse_options(f"{name} is a job", "a cache", {"--verify": verify})
        describe_job(job, as_json=as_json, ledger=ledger, events=events, goodput=goodput)
        return
    _refuse_options(f"{name} is a cache", "a job", of_jobs)
    describe_cache(name, as_json, verify)


def find_cache_or_job(paths: Paths, name: str) -> JobPaths | None:
    """Return None where `name` is that of a cache, else the job that it means. Raises UnknownJob."""
    from insitu.cluster import find_job
    from insitu.grid import Catalog

    if Catalog(paths).find(split_version(name)[0]) is not None:
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


def describe_job(job: JobPaths, *, as_json: bool, ledger: bool, events: bool, goodput: bool = False) -> None:
    """Print one job."""
    report = build_job_report(job, ledger=ledger, events=events, goodput=goodput)
    if as_json:
        print_json(report)
    else:
        print_job_report(report)


def print_job_report(report: dict[str, Any]) -> None:
    """Print what `build_job_report` of `insitu.service` returns."""
    _print_job(report)
    if "ledger" in report:
        print_ledger(report["ledger"], report["servers"])
    if "goodput" in report:
        print_goodput(report["goodput"])
    if "events" in report:
        for entry in report["events"]:
            fields = ", ".join(f"{k}={v}" for k, v in entry["event"].items() if k != "event" and v)
            typer.echo(f"{format_time(entry['at'])}  {entry['event']['event']}  {fields}".rstrip())


def _print_job(job: dict[str, Any]) -> None:
    ended = f", {format_duration(job['ended'] - job['created'])} after its start" if job["ended"] else ""
    code = f" with exit code {job['exit_code']}" if job["exit_code"] is not None else ""
    facts = {
        "Job": job["job_id"],
        "State": f"{job['state']}{code}{ended}",
        "Reason": job["reason"],
        "Started": f"{format_time(job['created'])} ({format_duration(time.time() - job['created'])} ago)",
        "Cache": _format_cache(job),
        "Snapshot": format_snapshot(job),
        "Refreshed": format_refreshes(job),
        "Command": " ".join(job["command"]),
        "Settings": f"{format_count(job['workers'], 'worker')}, {format_count(len(job['shards']), 'shard')}, "
        f"{format_count(job['threads'], 'thread')} per replica, seed {job['seed']}, "
        f"stall timeout {job['stall_timeout']:g} s, engine {job['engine']}",
        "Environment": " ".join(f"{name}={value}" for name, value in job["settings"].items()),
        "Strategy": "{strategy}, gradients: {gradients}".format(**job["strategy"]) if job["strategy"] else "",
        "Recovery": f"{job['on_loss']} a lost worker, {_format_standby(job['standby'])}, "
        f"generation {job['generation']}",
        "Checkpoints": ", ".join(job["checkpoints"]) or "none",
        "Tracked": ", ".join(map(_format_tracked, job["tracking"])),
        "Folder": job["folder"],
    }
    for name, fact in facts.items():
        if fact:
            typer.echo(f"{name + ':':<13}{fact}")
    typer.echo("")
    header = ("TASK", "NODE", "SHARDS", "STATE", "PROGRESS", "ROWS", "READ LOCALLY", "READ REMOTELY")
    print_table(header, (_format_task(task) for task in job["task_list"]))
    print_rates(job["task_list"])
    typer.echo("")
    print_table(
        ("ATTEMPT", "STARTED", "LASTED", "CAME TO", "ENDED BECAUSE"),
        (_format_attempt(attempt) for attempt in job["attempts"]),
    )
    _print_outputs(job["outputs"])
    _print_recoveries(job["recoveries"])
    _print_evaluations(job["evaluations"])
    _print_servers(job["servers"])
    for straggler in job["stragglers"]:
        behind = f", {straggler['steps']} steps behind" if straggler["steps"] else ""
        late = f"last in {straggler['share']:.0%} of the steps, by {1000 * straggler['seconds']:.1f} ms"
        typer.echo(f"\n{straggler['task']} is {late}{behind}: the others wait for it")


def _format_tracked(run: dict[str, Any]) -> str:
    waiting = f"; {format_count(run['waiting'], 'record')} not sent" if run["waiting"] else ""
    problem = f" ({run['problem']})" if run["problem"] else ""
    return f"{run['tracker']} {run['link'] or run['run']}{waiting}{problem}"


def _format_cache(job: dict[str, Any]) -> str:
    from insitu.base.spec import NO_CACHE

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
        late = f", {server['dropped']:,} dropped late with {server['dropped_rows']:,} rows"
        late = late if server["dropped"] else ""
        lost = f", {server['lost']:,} lost with a server" if server["lost"] else ""
        typer.echo(
            f"ps:{server['server']} ({server['mode']}): {total:,} bytes with the optimizer's, "
            f"{server['applied']:,} gradients applied{late}{lost}; staleness "
            f"{format_staleness(server['staleness'])}"
        )


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


def _print_outputs(outputs: list[dict[str, Any]]) -> None:
    """Print what the job has written, as paths in its folder."""
    if not outputs:
        return
    typer.echo("")
    rows = (
        (
            each["path"],
            each["kind"],
            "-" if each["bytes"] is None else format_size(each["bytes"]),
            format_time(each["changed"]),
        )
        for each in outputs[:_SHOWN_OUTPUTS]
    )
    print_table(("WRITTEN", "KIND", "SIZE", "AT"), rows)
    if len(outputs) > _SHOWN_OUTPUTS:
        typer.echo(f"and {len(outputs) - _SHOWN_OUTPUTS} more, which --json has")


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


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(describe)
