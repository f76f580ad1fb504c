"""The command that sends what a tracker didn't take: track."""

from __future__ import annotations

import typer

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.base.plugins import EXTENSIONS, load_plugin
from insitu.base.tracking import RUN_FILE, read_runs
from insitu.cli.console import JsonOption, print_json, print_notice
from insitu.cli.logs import JobArgument


def track(job_id: JobArgument, as_json: JsonOption = False) -> None:
    """Send the metrics of an ended job that its experiment tracker hasn't got, as it was unreachable.

    A job sends by itself while it runs. Each record is sent once, also if this is run again.

    Examples:

        insitu track digits-3fa9c1
    """
    from insitu.cluster import ENDED, find_job, read_status

    job = find_job(Paths.default(), job_id)
    phase = read_status(job).state.phase
    folders = [each.parent for each in sorted(job.tracking.glob(f"*/{RUN_FILE}"))]
    if phase not in ENDED:
        raise InputError(f"A job that runs sends its metrics itself. Received: {job.root.name}, {phase}")
    if not folders:
        raise InputError(
            f"Jobs are tracked that were started with --track, or whose script has insitu.track. Received: "
            f"{job.root.name} without either"
        )
    extension = load_plugin(EXTENSIONS, "tracking")
    failed = [each for each in folders if not extension.send_waiting(each, phase)]
    runs = read_runs(job.tracking)
    if as_json:
        print_json(runs)
    if failed:
        problems = "; ".join(f"{each['tracker']}: {each['problem']}" for each in runs if each["problem"])
        raise ClusterError(f"The tracker takes no records: {problems or 'it says nothing'}. Try again later")
    for each in runs if not as_json else ():
        print_notice(f"All is sent to {each['tracker']}: {each['link'] or each['run']}")


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(track)
