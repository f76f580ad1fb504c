"""What the commands have for caches of Apache Ignite: options of `import`, and their part of `describe`."""

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
    from insitu.grid.transfer import RemoteStores

_SHOWN_REFRESHES = 10

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", metavar="FILE", help="Of Ignite: a client's Spring XML; its servers have the cache."
    ),
]


def find_agents(paths: Paths) -> RemoteStores | None:
    """Return the stores that an import in this home writes to; None: those of this machine alone.

    Raises ClusterError where another machine has the head, and where no head answers.
    """
    from insitu.grid import is_home_of_agent

    if not (paths.head.exists() or is_home_of_agent(paths)):
        return None
    from insitu.cluster import find_owners

    return find_owners(paths)


def read_cache_of_ignite(options: JobOptions) -> JobOptions:
    """Return the options with the cache to train on. If they name a cache of Ignite, it is read now, and the
    cache is the snapshot of that.

    Raises InputError and SourceError.
    """
    from insitu.grid.ignite import is_ignite_address

    given = (options.tensor, options.fill, options.arrow, options.without)
    if not (any(given) or options.ragged or options.config or is_ignite_address(options.cache)):
        return options  # as most jobs do, without loading what reads Ignite
    from insitu.grid.ignite import parse_field_options

    fields = parse_field_options(*given)
    cache = find_address(options.cache, options.config)
    if not is_ignite_address(cache):
        of_columns = fields.given or ("--ragged" if options.ragged else "")
        if of_columns:
            raise InputError(
                f"{of_columns} is said of the columns of a cache of Ignite. Received: {cache}. Leave it out; "
                f"`insitu import` takes it, too"
            )
        return replace(options, cache=cache)
    if not options.job_dir.exists():  # before all is read
        raise JobSpecError(f"JOB_DIR {options.job_dir} doesn't exist")
    from insitu.cli.import_progress import shown_progress
    from insitu.grid import read_snapshot

    paths = Paths.default()
    remote = None if options.engine == "local" else find_agents(paths)
    with shown_progress(cache) as progress:
        found = read_snapshot(paths, cache, fields, options.ragged, progress.report, remote=remote)
    print_notice(
        f"Read {found.rows:,} rows: version {found.version} of {found.name}, "
        f"{format_origin(dict(found.origin or {}))}"
    )
    return replace(options, cache=found.name)


def find_address(name: str, config: Path | None) -> str:
    """Return `name`, or with a client's configuration the address of the cache of Ignite of that name.

    Raises InputError.
    """
    from insitu.grid.ignite import address_by_configuration, is_ignite_address

    if config is None:
        return name
    if is_ignite_address(name):
        raise InputError(
            f"--config names the servers of a cache of Ignite. Received: it beside {name}, which names them, "
            f"too. Give the name of the cache alone, or leave --config out"
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
        "server. The job goes on with its snapshot"
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


def describe_ignite_cache(address: str, as_json: bool, count_rows: bool) -> None:
    """Print all about a cache of Ignite. `count_rows` reads it, for the rows of each partition.

    Raises InputError and SourceError.
    """
    from insitu.grid.ignite import describe_ignite

    found = describe_ignite(address, count_rows=count_rows)
    if as_json:
        print_json(found)
        return
    typer.echo(f"cache      {found['address']}, {_format_copies(found)}")
    typer.echo(f"rows       {found['rows']:,}")
    typer.echo(f"size       about {format_size(found['bytes'])} on the way")
    typer.echo(
        f"topology   version {_format_topology(found['topology'])}, "
        f"{format_count(found['partitions'], 'partition')}"
    )
    for index, column in enumerate(found["columns"]):
        shape = "[" + ",".join(map(str, column["shape"])) + "]" if column["shape"] else ""
        dtype = "text" if column["dtype"] == "str" else column["dtype"]
        typer.echo(
            f"{'columns' if index == 0 else '':10} {column['name']}: {dtype}{shape} ({column['type']})"
        )
    for index, problem in enumerate(found["problems"]):
        typer.echo(f"{'problems' if index == 0 else '':10} {problem}")
    for index, name in enumerate(found["classes"]):
        typer.echo(f"{'classes' if index == 0 else '':10} {name}")
    typer.echo()
    print_table(
        ("NODE", "PRIMARIES", "SERVERS"),
        [(n["node"], str(n["primaries"]), ", ".join(n["servers"])) for n in found["nodes"]],
    )
    if count_rows:
        typer.echo(f"\nread       {found['rows_read']:,} rows, digest {found['digest']}\n")
        print_table(
            ("PARTITION", "ROWS", "DIGEST"),
            [
                ("all" if p["partition"] is None else str(p["partition"]), f"{p['rows']:,}", p["digest"])
                for p in found["partition_list"]
            ],
        )


def _format_copies(found: dict[str, Any]) -> str:
    if found["mode"] == "REPLICATED":
        return "replicated: each node has all rows"
    return f"{found['mode'].lower()}, {format_count(found['backups'], 'backup')}"


def _format_topology(version: list[int]) -> str:
    return ".".join(map(str, version))


def format_origin(origin: dict[str, Any]) -> str:
    """Return what `describe CACHE` says of where the rows come from."""
    first, last = origin["topology"]
    local = ""  # versions that were read by an insitu before it counted them have no local bytes
    if "local_bytes" in origin:
        # A primary server that runs beside no node is another one.
        by = "primary servers on the nodes' hosts" if "nodes" in origin else "primary servers"
        local = f"{format_size(origin['local_bytes'])} from {by}, "
    read = f"{local}{format_size(origin['remote_bytes'])} from others"
    versions = _format_topology(first) + (f" to {_format_topology(last)}" if last != first else "")
    return (
        f"{origin['address']}, read {format_time(origin['read'][0])}, topology version {versions}, "
        f"digest {origin['digest']}, {read}"
    )
