"""Commands that show what a job does while it trains: top and tensorboard."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.base.errors import ClusterError, InputError
from insitu.base.net.ports import format_address
from insitu.base.paths import Paths
from insitu.cli.completion import complete_job
from insitu.cli.console import format_position, print_json, print_notice, table_lines
from insitu.cli.rates import RATES_HEADER, format_milliseconds, format_rates
from insitu.service import has_summaries, make_tensorboard_command, summarize_rates

if TYPE_CHECKING:
    from insitu.base.measure.task_samples import Sample
    from insitu.base.paths import JobPaths

_LOOPBACK = "127.0.0.1"


def top(
    job_id: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="The job's id, or enough of its beginning. Only --metrics-port goes without: then all jobs.",
            autocompletion=complete_job,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the table once and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON once, in the form of docs/reference/json.md.")
    ] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 1.0,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            min=0,
            max=65535,
            help="Serve numbers of running jobs on this port for Prometheus, until Ctrl-C; 0: any port.",
        ),
    ] = None,
    metrics_host: Annotated[
        str,
        typer.Option("--metrics-host", help="The address to serve them on. Anyone who reaches it can read."),
    ] = _LOOPBACK,
) -> None:
    """Show how fast the tasks of a job train, what a step is spent on, and what they use, until the job ends.

    Each task measures itself. Rates are those of the last ten seconds of training. A step is split into what
    the task did in it (docs/reference/numbers.md). If the output is no terminal, the table is printed once.

    Examples:

    ```
    insitu top digits-3fa9c1
    insitu top digits-3fa9c1 --json
    insitu top --metrics-port 9100
    ```
    """
    from insitu.cluster import find_job

    paths = Paths.default()
    job = find_job(paths, job_id) if job_id is not None else None
    if metrics_port is not None:
        if once or as_json:
            raise InputError(
                "--metrics-port serves until Ctrl-C. Received: --once or --json with it. Leave them out"
            )
        _serve_metrics(paths, job, metrics_host, metrics_port)
        return
    if job is None:
        raise InputError("top shows one job. Received: none. Name it: `insitu ps` lists those that run")
    if as_json:
        print_json(build_top(job))
    elif once or not sys.stdout.isatty():
        typer.echo("\n".join(format_top(build_top(job))))
    else:
        _follow(job, every)


def build_top(job: JobPaths) -> dict[str, Any]:
    """Return what `top --json` prints (docs/reference/json.md)."""
    from insitu.base.measure.task_samples import read_last_samples
    from insitu.base.progress import read_progress
    from insitu.cluster import find_newest, read_rates, read_status, summarize_metrics

    status = read_status(job)
    tasks: list[dict[str, Any]] = []
    samples: list[Sample] = []
    for state in status.state.tasks:
        own = read_last_samples(job.samples(state.task))
        samples += own
        # Only samples of a task on another host are here, not its record.
        reported = read_progress(job.progress(state.task)) or (own[-1] if own else None)
        tasks.append(
            {
                "task": str(state.task),
                "node": state.node,
                "alive": state.alive and status.running,
                "place": reported.place if reported else None,
                "epoch": reported.epoch if reported else None,
                "step": reported.step if reported else None,
                "rates": summarize_rates(read_rates(job, state.task)),
            }
        )
    newest = find_newest(samples)
    alive = [t["rates"] for t in tasks if t["rates"] and (t["alive"] or not status.running)]
    rows = [r["rows_per_second"] for r in alive if r["rows_per_second"] is not None]
    steps = [r["step_seconds"] for r in alive if r["step_seconds"] is not None]
    return {
        "job_id": status.spec.job_id,
        "state": status.state.phase,
        "at": time.time(),
        "position": {"epoch": status.steps[0], "step": status.steps[1]} if status.steps else None,
        "updates": newest.updates if newest else None,
        "metrics": summarize_metrics(newest.metrics) if newest else {},
        "rows_per_second": sum(rows) if rows else None,
        "step_seconds": max(steps) if steps else None,
        "tasks": tasks,
    }


def format_top(shown: Mapping[str, Any]) -> list[str]:
    """Return the lines that `top` prints."""
    facts = [shown["job_id"], shown["state"]]
    if shown["position"]:
        facts.append(format_position(shown["position"]))
    if shown["updates"] is not None:
        facts.append(f"update {shown['updates']:,}")
    facts += [f"{name} = {'-' if v is None else f'{v:.4g}'}" for name, v in shown["metrics"].items()]
    if shown["rows_per_second"] is not None:
        facts.append(f"{shown['rows_per_second']:,.0f} examples/s")
    if shown["step_seconds"] is not None:
        facts.append(f"{format_milliseconds(shown['step_seconds'])}/step")
    rows = [
        (*format_rates(task), task["node"] or "-", task["place"] or "-" if task["alive"] else "ended")
        for task in shown["tasks"]
    ]
    return [", ".join(facts), "", *table_lines((*RATES_HEADER, "NODE", "NOW"), rows)]


def _follow(job: JobPaths, every: float) -> None:
    from rich.live import Live
    from rich.text import Text

    from insitu.cluster import is_running

    def show() -> Text:
        return Text("\n".join(format_top(build_top(job))), no_wrap=True, overflow="crop")

    with Live(show(), auto_refresh=False) as live:
        while is_running(job):
            time.sleep(every)
            live.update(show(), refresh=True)


def _serve_metrics(paths: Paths, job: JobPaths | None, host: str, port: int) -> None:
    from insitu.cli.metrics import serve_metrics

    def find_jobs() -> list[JobPaths]:
        from insitu.cluster import BrokenJob, list_jobs

        if job is not None:
            return [job]
        return [paths.job(j.spec.job_id) for j in list_jobs(paths) if not isinstance(j, BrokenJob)]

    server = serve_metrics(find_jobs, host, port)
    print_notice(f"Serving http://{format_address(host, server.port)}/metrics. Ctrl-C ends it.")
    server.wait()


def tensorboard(
    job_id: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="The job's id, or enough of its beginning; or a folder, as insitu://VOLUME/PATH.",
            autocompletion=complete_job,
        ),
    ],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0: any free one.")] = 6006,
    host: Annotated[
        str, typer.Option("--host", help="The address. Anyone who reaches it can read.")
    ] = _LOOPBACK,
) -> None:
    """Start TensorBoard on what the tasks of a job have written: by callbacks, and the evaluator.

    Event files in the memory of the cluster, `insitu.TensorBoard("insitu://...")`, are read from any machine.

    Needs `pip install insitu[tensorboard]`. Runs until Ctrl-C, also beside the training. Ends with 1 where a
    job has ended without event files.

    Examples:

    ```
    insitu tensorboard digits-3fa9c1
    insitu tensorboard digits-3fa9c1 --port 0
    insitu tensorboard insitu://runs
    ```
    """
    import os

    from insitu.cluster import find_job, is_running

    job = job_id if job_id.startswith("insitu://") else find_job(Paths.default(), job_id)
    command = make_tensorboard_command(job, host, port)
    if not isinstance(job, str) and not has_summaries(job):
        advice = "Pass keras.callbacks.TensorBoard or insitu.TensorBoard to fit"
        if not is_running(job):
            raise ClusterError(
                f"TensorBoard shows what tasks have written for it. Received: {job.root.name}, which has "
                f"ended and has written nothing. {advice}, and start the job again"
            )
        print_notice(f"{job.root.name} has written nothing for TensorBoard yet. {advice}.")
    sys.stdout.flush()
    os.execv(sys.executable, command)


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(top)
    app.command()(tensorboard)
