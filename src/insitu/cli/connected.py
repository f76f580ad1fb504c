"""What the commands have for tables of other systems: the snapshot of a job, and their part of `describe`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.base.errors import InputError, JobSpecError
from insitu.base.paths import Paths
from insitu.base.wording import format_count, inflect
from insitu.cli.console import format_size, format_time, print_json, print_notice, print_table
from insitu.options import JobOptions

if TYPE_CHECKING:
    pass

_SHOWN_REFRESHES = 10

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", metavar="FILE", help="Of Ignite: a client's Spring XML; its servers have the cache."
    ),
]


def read_live_cache(options: JobOptions) -> JobOptions:
    """Return the options with the cache to train on. If they name a table of another system, it is read now,
    and the cache is the snapshot of that.

    Raises InputError and SourceError.
    """
    given = (options.tensor, options.fill, options.arrow, options.without, options.dtype, options.ragged)
    if not (any(given) or options.config or "://" in options.cache):
        return options  # as most jobs do, without loading what reads sources
    from insitu.grid.sources import find_connector, read_columns

    columns = read_columns(options)
    cache = find_address(options.cache, options.config)
    if find_connector(cache) is None:
        of_columns = " and ".join(columns.given) or ("--ragged" if options.ragged else "")
        if of_columns:
            raise InputError(
                f"{of_columns} is said of the columns of a table of another system. Received: {cache}. Leave "
                f"it out; `insitu import` takes it, too"
            )
        return replace(options, cache=cache)
    if not options.job_dir.exists():  # before all is read
        raise JobSpecError(f"JOB_DIR {options.job_dir} doesn't exist")
    from insitu.cli.import_progress import shown_progress
    from insitu.grid import read_snapshot

    paths = Paths.default()
    from insitu.service import find_agents

    remote = None if options.engine == "local" else find_agents(paths)
    with shown_progress(cache) as progress:
        found = read_snapshot(paths, cache, columns, options.ragged, progress.report, remote=remote)
    print_notice(
        f"Read {found.rows:,} rows: version {found.version} of {found.name}, "
        f"{format_origin(dict(found.origin or {}))}"
    )
    return replace(options, cache=found.name)


def find_address(name: str, config: Path | None) -> str:
    """Return `name`, or with a client's configuration the address of the table of that name.

    Raises InputError.
    """
    if config is None:
        return name
    from insitu.grid.sources import address_by_configuration

    if "://" in name:
        raise InputError(
            f"--config names the servers of a table. Received: it beside {name}, which names them, too. Give "
            f"the name of the table alone, or leave --config out"
        )
    return address_by_configuration(config, name)


def format_snapshot(job: dict[str, Any]) -> str:
    """Return what `describe JOB` says of the snapshot that a job trains on; empty for another cache."""
    if "snapshot" not in job:
        return ""
    origin = job["snapshot"]
    now = origin.get("now")
    if now is None:
        return format_origin(origin)
    if now["problem"] is not None:
        return f"{format_origin(origin)}; the topology of now can't be asked: {now['problem']}"
    if now["topology"] == origin["topology"][1]:
        return f"{format_origin(origin)}; the topology is as it was"
    return (
        f"{format_origin(origin)}; the topology version is now {_format_topology(now['topology'])}, "
        f"{format_count(now['moved'], 'partition')} {inflect(now['moved'], 'has', 'have')} another primary "
        "server. The job continues with its snapshot"
    )


def format_refreshes(job: dict[str, Any]) -> str:
    """Return what `describe JOB` says of the rows that were read again; empty where they aren't."""
    if "refresh" not in job:
        return ""
    every = "each epoch" if job["refresh"] == 1 else f"every {job['refresh']} epochs"
    done = []
    for each in job["refreshes"][-_SHOWN_REFRESHES:]:
        if each["problem"] is not None:
            done.append(f"epoch {each['epoch'] + 1} still version {each['version']}: {each['problem']}")
        else:
            digest = each["snapshot"].get("digest", "")
            done.append(
                f"from epoch {each['epoch'] + 1} version {each['version']}, {each['rows']:,} rows, "
                f"digest {digest}"
            )
    return "; ".join([every, *done])


def describe_table(address: str, as_json: bool, count_rows: bool) -> bool:
    """Print all about a table of another system; return False if `address` is the name of something else.
    `count_rows` reads it, for the rows of each partition.

    Raises InputError and SourceError.
    """
    from insitu.grid.sources import find_connector

    connector = find_connector(address)
    if connector is None:
        return False
    found = connector.describe(address, count_rows=count_rows)
    if as_json:
        print_json(found.report)
        return True
    for index, part in enumerate(found.parts):
        if index:
            typer.echo()
        for label, fact in part.facts:
            typer.echo(f"{label:10} {fact}")
        typer.echo()
        print_table(part.header, part.rows)
    return True


def _format_topology(version: list[int]) -> str:
    return ".".join(map(str, version))


def format_origin(origin: dict[str, Any]) -> str:
    """Return what `describe CACHE` says of where the rows come from."""
    local = ""  # versions that were read by an insitu before it counted them have no local bytes
    if "local_bytes" in origin:
        # A primary server that runs beside no node is another one.
        by = "primary servers on the nodes' hosts" if "nodes" in origin else "primary servers"
        local = f"{format_size(origin['local_bytes'])} from {by}, "
    read = f", {local}{format_size(origin['remote_bytes'])} from others" if "remote_bytes" in origin else ""
    versions = ""
    if "topology" in origin:
        first, last = map(_format_topology, origin["topology"])
        versions = f", topology version {first}" + (f" to {last}" if last != first else "")
    at = format_time(origin["read"][0])
    return f"{origin['address']}, read {at}{versions}, digest {origin['digest']}{read}"
