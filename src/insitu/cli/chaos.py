"""The chaos command: runs a job with faults and compares how it ends."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.base.errors import JobEnded
from insitu.base.paths import Paths
from insitu.cli.console import print_notice, table_lines
from insitu.options import JobOptions

if TYPE_CHECKING:
    from insitu.base.paths import JobPaths
    from insitu.cluster import InjectedFault

CHAOS_ENV = "INSITU_CHAOS"
CHAOS_HELP = """
Run a job twice, without and with faults, and compare how they end: a development tool.

The script prints what must be equal in lines that begin with `RESULT `, such as a hash of its weights. Faults
are drawn from --seed, or given one by one: KIND [TASK] [EPOCH.STEP], both counted from 0. KINDs: `kill`
(SIGKILL), `stop` (SIGSTOP for good: found by the stall timeout), `delay` (SIGSTOP for half a second), `drop`
(its TCP connections end), `half-open` (nothing reaches it by them any more), `disk` (full for half a second,
for the task or for all and the controller), `scale` (a worker fewer; from one, all again), `controller`
(SIGKILL), `checkpoint` (a bit of the newest one is flipped), `node` (its store is deleted and its tasks are
killed; the cache needs backups). `drop` and `half-open` need the right to trace the task. Drawn faults come
up to 6 steps after the recovery from the last one, or at once, during that recovery; a KIND that --kinds
names twice is drawn twice as often. A fault that can't be injected is reported as such. Exits with 1 unless
the job finished, the results are equal, the ledger is clean and nothing is left over.

In the run with faults INSITU_CHAOS names a file that exists until the last fault has been injected: a script
may slow its steps down meanwhile, so that more of them are hit.

Examples:

    insitu chaos --workers 2 --faults 20 --seed 3 digits/train ./my_job train.py
    insitu chaos --workers 3 --fault "kill worker:1 2.5" --fault "controller 3.0" digits ./my_job train.py
"""


def chaos(
    cache: Annotated[str, typer.Argument(metavar="CACHE", help="The cache to train on.")],
    job_dir: Annotated[Path, typer.Argument(metavar="JOB_DIR", help="Folder or .zip with the script.")],
    command: Annotated[
        list[str], typer.Argument(metavar="JOB_CMD [JOB_ARGS]", help="Command to run in JOB_DIR.")
    ],
    workers: Annotated[int, typer.Option(help="Worker tasks.")] = 2,
    shards: Annotated[int | None, typer.Option(help="Shards.", show_default="--workers")] = None,
    threads: Annotated[int, typer.Option(help="Backend threads per replica.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the faults and of the training.")] = 0,
    faults: Annotated[int, typer.Option(help="Number of faults to draw.")] = 20,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="FAULT", help="A fault, instead of drawing.")
    ] = None,
    kinds: Annotated[str | None, typer.Option(metavar="KIND,KIND", help="Kinds to draw from.")] = None,
    on_loss: Annotated[
        str, typer.Option(metavar="replace|adopt|restart", help="As in `insitu start`.")
    ] = "replace",
    standby: Annotated[
        int | None, typer.Option(help="As in `insitu start`.", show_default="1 if memory allows")
    ] = None,
    stall_timeout: Annotated[float, typer.Option(metavar="SEC", help="As in `insitu start`.")] = 30.0,
    run_timeout: Annotated[
        float, typer.Option("--patience", metavar="SEC", help="Time limit of each run.")
    ] = 600.0,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Markdown file that a section on this run is added to."),
    ] = None,
) -> None:
    from insitu.cluster import FaultInjector, plan_faults, stop_job, submit, wait_until_ended

    paths = Paths.default()
    planned = plan_faults(fault or [], seed, faults, workers, kinds)
    options = JobOptions(
        cache=cache,
        job_dir=job_dir,
        command=tuple(command),
        workers=workers,
        shards=shards,
        threads=threads,
        seed=seed,
        on_loss=on_loss,  # type: ignore[arg-type]
        standby=standby,
        stall_timeout=stall_timeout,
        max_restarts=10 * len(planned) + 10,
    )
    reference = job = paths.job(submit(paths, options))
    try:
        print_notice(f"without faults: {reference.root.name}")
        wait_until_ended(reference, run_timeout)
        with tempfile.NamedTemporaryFile(prefix="insitu-chaos-") as marker:
            os.environ[CHAOS_ENV] = marker.name
            job = paths.job(submit(paths, options))
            print_notice(f"with faults:    {job.root.name}")
            done = FaultInjector(paths, job, run_timeout).run(planned, _report_injection)
        code = wait_until_ended(job, run_timeout)
    finally:
        # The second request kills at once: nothing is left running after an interrupt or a timeout.
        for _ in range(2):
            with contextlib.suppress(JobEnded):
                stop_job(job)
    verdict, good = _judge(paths, reference, job, done, code, len(planned))
    typer.echo(verdict)
    if report is not None:
        with report.open("a") as file:
            file.write(_format_section(options, done, verdict))
    raise typer.Exit(0 if good else 1)


def _report_injection(injected: InjectedFault) -> None:
    where = f"epoch {injected.at[0]} step {injected.at[1]}" if injected.at else "before training"
    print_notice(
        f"{'injected' if injected.done else 'NOT injected'}: {injected.fault} at {where}: {injected.note}"
    )


def _judge(
    paths: Paths, reference: JobPaths, job: JobPaths, done: list[InjectedFault], code: int, planned: int
) -> tuple[str, bool]:
    """Return the verdict as text, and whether all of it is as it must be."""
    from insitu.cluster import find_leftovers, read_results
    from insitu.service import build_job_report

    description: dict[str, Any] = build_job_report(job, ledger=True, events=False)
    lost = sum(e["lost"] for e in description["ledger"])
    repeated = sum(e["repeated"] for e in description["ledger"])
    left = find_leftovers(paths, job)
    expected, found = read_results(reference), read_results(job)
    checks = {
        "the job finished": (code == 0, f"exit code {code}"),
        "results equal those without faults": (
            bool(expected) and found == expected,
            "; ".join(found) if expected else "no line began with `RESULT `: have the script print one",
        ),
        "the ledger is clean": (
            all(e["clean"] for e in description["ledger"]),
            f"{lost} rows lost, {repeated} repeated",
        ),
        "nothing is left over": (not left, ", ".join(left)),
    }
    injected = sum(i.done for i in done)
    lines = [f"{injected} of {planned} faults injected, {description['attempt'] - 1} restarts of all tasks"]
    lines += _summarize_recoveries(description)
    rows = [(name, "yes" if ok else "NO", note) for name, (ok, note) in checks.items()]
    lines += table_lines(("WHAT MUST HOLD", "HOLDS", ""), rows)
    return "\n".join(lines), all(ok for ok, _ in checks.values())


def _summarize_recoveries(description: dict[str, Any]) -> list[str]:
    waits = sorted(r["seconds"] for r in description["recoveries"] if r["seconds"] is not None)
    if not waits:
        return []
    return [
        f"recoveries: {len(waits)}, next step of all after {waits[0]:.2f} s at best, "
        f"{waits[len(waits) // 2]:.2f} s in the middle, {waits[-1]:.2f} s at worst"
    ]


def _format_section(options: JobOptions, done: list[InjectedFault], verdict: str) -> str:
    """Return the section of a report on one run."""
    counts = Counter(i.fault.kind for i in done if i.done)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"
    setting = f"{options.workers} workers, on loss {options.on_loss}"
    title = f"`{' '.join(options.command)}`: {setting}, stall timeout {options.stall_timeout:g} s"
    return f"\n### {title}\n\nInjected: {kinds}.\n\n```text\n{verdict}\n```\n"


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command(help=CHAOS_HELP, context_settings={"allow_interspersed_args": False})(chaos)
