"""Commands about data: import, caches; and the part of `describe` about caches."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.base.errors import ClusterError, GridError, InputError
from insitu.base.paths import Paths
from insitu.base.wording import format_count, list_first
from insitu.cli.caller import find_caller
from insitu.cli.command_group import take_options
from insitu.cli.connected import find_address, format_origin
from insitu.cli.console import (
    JsonOption,
    escape_controls,
    format_size,
    print_json,
    print_notice,
    print_table,
)
from insitu.cli.import_progress import shown_progress
from insitu.cli.remote import head_of_command, send_import
from insitu.options import ImportOptions
from insitu.service import build_cache_report, find_agents, summarize_cache

if TYPE_CHECKING:
    from insitu.base.spec import CacheSpec, NodeId
    from insitu.grid.transfer import RemoteStores


# Describes compressed columns, for `insitu describe`


def describe_sizes(cache: CacheSpec) -> list[str]:
    """Return what follows each column in the list of columns; nothing for caches that aren't compressed."""
    if cache.codec is None:
        return [""] * len(cache.columns)
    return [
        f", {format_size(raw)}"
        + (f" as {format_size(stored)} of {cache.codec}" if stored < raw else ", not compressed")
        for raw, stored in cache.column_bytes
    ]


_ASK_SECONDS = 5.0
"""Seconds in which agents say what they hold."""

_IMPORT_HELP = """
Read SOURCE files into a new version of CACHE, split into partitions over the nodes.

A SOURCE is a file, a folder or a glob: .npy, .npz, Parquet, CSV, Arrow IPC, TFRecord, JSON lines, images,
WebDataset or text, or what a --reader of Ray Data reads; a URL of these, such as s3://BUCKET/KEY; a folder of
Delta or Iceberg; a database, as sqlite://FILE with --sql; a cache of Apache Ignite, as
ignite://HOST[:PORT][,HOST...]/CACHE; or - for the standard input. The old version stands until the new one is
whole. Options may also follow SOURCE. Caches are in the folder $INSITU_HOME, by default ~/.insitu.

Examples:

    insitu import digits digits.npz
    insitu import quickdraw data/quickdraw --label-from-filename --split train=0.9,test=0.1
    insitu import clicks 'clicks/*.parquet' --key user --partitions 32 --backups 1 --overwrite
    insitu import mnist train.tfrecord --features image:uint8[28,28]=image_raw,label:int64
    insitu import sketches cat.ndjson dog.ndjson --render 28
    insitu import photos photos-*.npy --resume     # again after a kill: continues where it was
    insitu import photos today.npy --append        # the rows so far stay where they are
    insitu import clicks 's3://bucket/clicks/*.parquet'   # in a cluster its nodes read it
    insitu import photos photos/ --images 64x64x3 --label-from-folder   # photos/cat/1.jpg, photos/dog/2.png
    insitu import samples 'shards/*.tar' --images 64x64x3
    insitu import orders orders.csv --fill age=mean --where 'price > 0' --dtype zip=str
    insitu import orders sqlite://shop.db --sql 'select * from orders'
    insitu import log - --format ndjson < log.jsonl
    insitu import digits ignite://grid-1,grid-2/DIGITS --tensor image=uint8[28,28]
"""


_INSPECT_HELP = """
Show what is in SOURCE files, and what an import would make of it: format, rows, columns, values that are
missing, and the command that imports them. The beginning of each file is read, and nothing is written.

Examples:

    insitu inspect orders.csv
    insitu inspect 'clicks/*.parquet' --columns user,item
    insitu inspect people.csv --dtype zip=str --json
"""
_OF_READING = (
    *("format", "column", "columns", "without", "rename", "dtype", "fill", "drop_nulls", "where", "ragged"),
    *("tensor", "delimiter", "decimal", "header", "encoding", "quote", "comment", "null_values", "features"),
    *("render", "images", "skip_damaged", "label_from_folder", "as_json"),
)
"""The options of `import` that say how sources are read."""


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("import", help=_IMPORT_HELP)(take_options(ImportOptions, ARGUMENTS, import_command))
    app.command("inspect", help=_INSPECT_HELP)(
        take_options(
            ImportOptions,
            {"sources": ARGUMENTS["sources"]},
            inspect,
            only=_OF_READING,
            fixed={"cache": "CACHE"},
        )
    )
    app.command("caches")(caches)


ARGUMENTS = {
    "cache": Annotated[
        str, typer.Argument(metavar="CACHE", help="The cache's name, such as quickdraw/train.")
    ],
    "sources": Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Files, folders, globs or URLs.")
    ],
}
"""The arguments of `import`, by the fields of ImportOptions."""


def import_command(options: ImportOptions) -> None:
    from insitu.grid import check_names

    if (head := head_of_command()) is not None:
        raise typer.Exit(send_import(head, options))
    paths = Paths.default()
    if options.dry_run:
        _show_plan(paths, options)
        return
    caller = find_caller()
    if options.sources == ("-",):
        with _standard_input(options) as options:
            _import(paths, options)
    elif caller is not None and caller.has_files:
        check_names(paths, options)
        with caller.received(paths) as files:
            _import(paths, replace(options, sources=tuple(map(str, files))))
    else:
        _import(paths, options)


def inspect(options: ImportOptions) -> None:
    from insitu.grid import inspect_files

    found = inspect_files(options)
    if options.as_json:
        print_json(found.to_json())
        return
    about = "" if found.has_exact_rows else "about "
    files = format_count(found.files, "file")
    print_notice(f"{files} of format {found.format}, {format_size(found.bytes)}, {about}{found.rows:,} rows")
    for note in list_first(found.notes):
        print_notice(note)
    print_table(
        ("COLUMN", "TYPE", "BECOMES", "MISSING", "MIN", "MAX", "EXAMPLES"),
        [
            (
                *(each.name, each.type, each.becomes or "-", str(each.missing or "-")),
                *(each.minimum or "-", each.maximum or "-", ", ".join(each.examples) or "-"),
            )
            for each in found.columns
        ],
    )
    for problem in found.problems:
        print_notice(f"It can't be imported as it is: {problem}")
    print_notice(f"Import it by: {found.command}")


@contextlib.contextmanager
def _standard_input(options: ImportOptions) -> Iterator[ImportOptions]:
    """Yield the options with a file that has what comes on the standard input: it is read more than once."""
    if options.format is None:
        raise InputError(
            "- reads the standard input, of which --format names the format. Received: no --format"
        )
    with tempfile.NamedTemporaryFile(prefix="insitu-stdin-") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        try:
            yield replace(options, sources=(file.name,))
        except InputError as error:  # by the time that somebody reads its name, the file is gone
            error.message = error.message.replace(file.name, "-")
            raise


def _show_plan(paths: Paths, options: ImportOptions) -> None:
    from insitu.grid import plan_import

    notes: list[str] = []
    plan = plan_import(paths, options, note=notes.append, remote=find_agents(paths))
    shown: dict[str, Any] = {
        "caches": list(plan.rows.names),
        "rows": plan.sizes.rows,
        "bytes": plan.sizes.bytes,
        "is_exact": plan.sizes.is_known,
        "partitions": plan.rows.partitions,
        "backups": plan.backups,
        "nodes": list(plan.topology.nodes),
        "read_by_nodes": plan.is_read_by_nodes,
        "columns": [asdict(column) for column in plan.rows.columns],
        "notes": notes,
    }
    if options.as_json:
        print_json(shown)
        return
    about = "" if plan.sizes.is_known else "about "
    print_notice(
        f"{' and '.join(plan.rows.names)} would get {about}{plan.sizes.rows:,} rows ({about}"
        f"{format_size(plan.sizes.bytes)}) in {plan.rows.partitions} partitions on "
        f"{', '.join(plan.topology.nodes)}, with {format_count(plan.backups, 'backup')}. Nothing was "
        f"imported."
    )
    for note in list_first(notes):
        print_notice(note)
    kinds = ((each["name"], format_column(each)) for each in shown["columns"])
    print_table(("COLUMN", "TYPE"), [(name, text.removeprefix(f"{name}: ")) for name, text in kinds])


def _import(paths: Paths, options: ImportOptions) -> None:
    from insitu.grid import run_import

    started = time.monotonic()
    remote = find_agents(paths)
    notes: list[str] = []
    with _interruption_explained(paths, options.resume), shown_progress(options.cache) as progress:
        sources = tuple(find_address(source, options.config) for source in options.sources)
        published = run_import(
            paths,
            replace(options, sources=sources),
            progress=progress.report,
            note=notes.append,
            remote=remote,
        )
    seconds = max(1e-9, time.monotonic() - started)
    speed = format_size(round(progress.bytes_read / seconds))
    print_notice(f"Imported {progress.rows_read:,} rows in {seconds:.1f} s ({speed}/s)")
    for note in list_first(notes):
        print_notice(note)
    if remote is not None and remote.sent:
        sent = ", ".join(f"{format_size(size)} to {node}" for node, size in sorted(remote.sent.items()))
        print_notice(f"Sent {sent}")
    print_caches(list(map(summarize_cache, published)), options.as_json)


@contextlib.contextmanager
def _interruption_explained(paths: Paths, resume: bool = False) -> Iterator[None]:
    """Print what has become of an import that the user interrupts. With `resume` it can be continued."""
    from insitu.grid import Catalog

    def versions() -> dict[str, int]:
        with contextlib.suppress(OSError, GridError):  # which the import itself will report
            return {cache.name: cache.version for cache in Catalog(paths).caches()}
        return {}

    before = versions()
    try:
        yield
    except KeyboardInterrupt:
        changed = versions() != before
        print_notice(
            "\nInterrupted just after the import was complete: the new version stands."
            if changed
            else "\nInterrupted: nothing was imported, all caches are as they were before."
            + (" The same command continues where it was." if resume else "")
        )
        raise


def caches(as_json: JsonOption = False) -> None:
    """List the caches, and remove what killed imports have left.

    Examples:

    ```
    insitu caches
    insitu caches --json
    ```
    """
    from insitu.grid import Catalog

    paths = Paths.default()
    remove_leftovers(paths, ask_hosts=True)
    print_caches(list(map(summarize_cache, Catalog(paths).caches())), as_json)


def print_caches(found: list[dict[str, Any]], as_json: bool) -> None:
    """Print caches as `summarize_cache` of `insitu.service` returns them."""
    if as_json:
        print_json(found)
        return
    if not found:
        print_notice("There are no caches yet. Make one with `insitu import`.")
        return
    header = ("CACHE", "VERSION", "ROWS", "SIZE", "PARTITIONS", "BACKUPS", "COLUMNS")
    print_table(
        header,
        [
            (
                cache["name"],
                str(cache["version"]),
                f"{cache['rows']:,}",
                format_size(cache["bytes"]),
                str(cache["partitions"]),
                str(cache["backups"]),
                ", ".join(map(format_column, cache["columns"])),
            )
            for cache in found
        ],
    )


def describe_cache(name: str, as_json: bool, verify: bool) -> None:
    """Print all about a cache: schema, rows, bytes, partitions and their owners.

    `verify` reads every copy of every partition and compares it with its checksum. Raises UnknownCache;
    CorruptPartition after all has been printed.
    """
    from insitu.grid import Catalog, verify_copies

    paths = Paths.default()
    catalog = Catalog(paths)
    cache = catalog.get_named(name)
    jobs = catalog.pinned_by(cache.name, None if cache.name == name else cache.version)
    checks = verify_copies(paths, cache, find_remote(paths, cache)) if verify else []
    if as_json:
        print_json(build_cache_report(cache, jobs, checks if verify else None))
    else:
        _print_cache(cache, jobs)
        if verify and not any(problem for _, _, problem in checks):
            typer.echo(f"\nverified: {format_count(len(checks), 'file')}, all as they were written")
    problems = [problem for _, _, problem in checks if problem is not None]
    if problems:
        for problem in problems[:-1]:
            print_notice(str(problem))
        raise problems[-1]


def find_remote(paths: Paths, cache: CacheSpec) -> RemoteStores | None:
    """Return the agents, where partitions of a cache are on other hosts. Raises ClusterError."""
    from insitu.cluster import find_stores

    owners = {owner for info in cache.partitions for owner in info.owners}
    return None if all(paths.node(owner).exists() for owner in owners) else find_stores(paths)


def _print_cache(cache: CacheSpec, jobs: list[str]) -> None:
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(cache.created))
    typer.echo(f"cache      {cache.name}, version {cache.version}, made {made}")
    if cache.note:
        typer.echo(f"note       {escape_controls(cache.note)}")
    typer.echo(f"rows       {cache.rows:,}")
    typer.echo(f"size       {format_size(cache.bytes)}, each partition counted once")
    if cache.origin:
        typer.echo(f"read from  {format_origin(dict(cache.origin))}")
    typer.echo(
        f"placed by  {'column ' + cache.key if cache.key else 'row index'}, "
        f"{format_count(cache.backups, 'backup')}"
    )
    columns = summarize_cache(cache)["columns"]
    for index, (shown, sizes) in enumerate(zip(columns, describe_sizes(cache), strict=True)):
        typer.echo(f"{'columns' if index == 0 else '':10} {format_column(shown)}{sizes}")
    if cache.labels:
        typer.echo(f"labels     {', '.join(f'{i} {label}' for i, label in enumerate(cache.labels))}")
    if jobs:
        typer.echo(f"used by    {', '.join(jobs)}")
    typer.echo()
    rows = [
        (str(p.index), f"{p.rows:,}", format_size(p.bytes), p.owners[0], ", ".join(p.owners[1:]))
        for p in cache.partitions
    ]
    print_table(("PARTITION", "ROWS", "SIZE", "PRIMARY", "BACKUPS"), rows)


def format_column(column: Mapping[str, Any]) -> str:
    """Return such as `image: uint8[28,28]` for a column in the form of docs/reference/json.md."""
    shape = "[" + ",".join(map(str, column["shape"])) + "]" if column["shape"] else ""
    times = f" ({column['logical']})" if column.get("logical") else ""
    return f"{column['name']}: {'text' if column['dtype'] == 'str' else column['dtype']}{shape}{times}"


def remove_leftovers(paths: Paths, *, ask_hosts: bool = False) -> None:
    """Remove what imports that died have left, and say what is kept and what the catalogue lacks.

    `ask_hosts`: where a head has no catalogue, ask agents what they hold, too.
    """
    from insitu.grid import list_resumable, sweep

    with contextlib.suppress(OSError):  # such as a home that this user may only read
        removed = sweep(paths)
        if removed:
            print_notice(
                f"Removed {format_size(removed)} in {paths.staging} that an interrupted import had left."
            )
        for cache, size in list_resumable(paths).items():
            print_notice(
                f"An interrupted import into {cache} keeps {format_size(size)}. The same command with "
                f"--resume continues with it; an import into {cache} without --resume removes it."
            )

    hosts_hold = ask_hosts and paths.head.exists() and not paths.catalog.exists()
    _name_unknown_versions(paths, _list_versions_on_hosts(paths) if hosts_hold else ())


def _list_versions_on_hosts(paths: Paths) -> list[tuple[str, int]]:
    """Return what agents hold that are alive and answer."""
    from concurrent.futures import ThreadPoolExecutor

    from insitu.cluster import find_stores

    try:
        remote = find_stores(paths, _ASK_SECONDS)
    except ClusterError:
        return []
    if remote is None or not remote.nodes:
        return []
    with ThreadPoolExecutor(len(remote.nodes)) as threads:
        found = threads.map(lambda node: _list_versions(remote, node), remote.nodes)
        return [version for versions in found for version in versions]


def _list_versions(remote: RemoteStores, node: NodeId) -> list[tuple[str, int]]:
    with contextlib.suppress(GridError):
        return remote.list_versions(node)
    return []


def _name_unknown_versions(paths: Paths, on_hosts: Collection[tuple[str, int]]) -> None:
    """Print a notice if stores hold versions that the catalogue lacks."""
    from insitu.grid import find_unknown_versions

    with contextlib.suppress(OSError):
        unknown = sorted({*find_unknown_versions(paths), *on_hosts})
        if unknown:
            shown = ", ".join(f"{name} version {version}" for name, version in unknown[:5])
            print_notice(
                f"The stores hold {format_count(len(unknown), 'version')} that the catalogue doesn't know: "
                f"{shown}{', ...' if len(unknown) > 5 else ''}. `insitu repair --dry-run` says what can be "
                f"put back."
            )
