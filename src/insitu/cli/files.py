"""The commands of `insitu fs`: files in the memory of the cluster's nodes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from insitu.base.errors import GridError, InputError, StorageFull
from insitu.base.paths import Paths
from insitu.base.wording import format_count
from insitu.cli.command_group import VersionedGroup
from insitu.cli.completion import complete_node
from insitu.cli.console import (
    JsonOption,
    escape_controls,
    format_size,
    format_time,
    print_json,
    print_notice,
    print_table,
)
from insitu.cli.storage import parse_size

if TYPE_CHECKING:
    from insitu.cluster import InsituFileSystem

SCHEME = "insitu://"
_CHUNK = 4 << 20
_OF_REQUEST = (
    *(errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EINVAL),
    *(errno.EACCES, errno.EPERM),
)
CopiesOption = Annotated[
    int, typer.Option("--copies", min=1, max=16, metavar="K", help="Number of nodes that keep a copy.")
]
UrlArgument = Annotated[str, typer.Argument(metavar="insitu://VOLUME/PATH", help="Path of a file or folder.")]

app = typer.Typer(
    name="fs",
    cls=VersionedGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Use the files that are in the memory of the cluster's nodes, `insitu://VOLUME/PATH`.",
)


@contextlib.contextmanager
def _failures_explained() -> Iterator[None]:
    """Turn errors of files into those of the command line."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        message = f"{where}{error.strerror or error}"
        if error.errno in _OF_REQUEST:
            advice = ". `insitu fs ls` shows what is there" if where.startswith(SCHEME) else ""
            raise InputError(f"{message}{advice}") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"{message}. Nothing half-written stays. Remove some with `insitu fs rm`, or allow more with "
                f"`insitu quota NODE SIZE`"
            ) from error
        raise GridError(message) from error


def _open(copies: int = 2) -> InsituFileSystem:
    from insitu.cluster import InsituFileSystem

    return InsituFileSystem(copies=copies)


def _check_url(url: str) -> str:
    if not url.startswith(SCHEME):
        raise InputError(f"A file of the cluster is {SCHEME}VOLUME/PATH. Received: {url}")
    return url


def ls(
    url: Annotated[
        str, typer.Argument(metavar="[insitu://VOLUME/PATH]", help="A folder or a file.")
    ] = SCHEME,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="All files below it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List a folder, or all volumes.

    Examples:

    ```
    insitu fs ls
    insitu fs ls insitu://models
    insitu fs ls -r insitu://models --json
    ```
    """
    with _failures_explained():
        system = _open()
        if recursive:
            listed = list(system.find(_check_url(url), detail=True).values())
            if not listed:
                system.info(url)  # raises if nothing is there
        else:
            listed = system.ls(_check_url(url), detail=True)
    rows = [_describe(each) for each in listed]
    if as_json:
        print_json(rows)
    elif rows:
        print_table(
            ("SIZE", "COPIES", "CHANGED", "NAME"),
            [
                (
                    format_size(row["bytes"]) if row["type"] == "file" else "-",
                    str(row["copies"] or "-"),
                    format_time(row["changed"]) if row["changed"] else "-",
                    row["url"] + ("" if row["type"] == "file" else "/"),
                )
                for row in rows
            ],
        )


def _describe(info: dict[str, Any]) -> dict[str, Any]:
    return {
        "url": f"{SCHEME}{info['name']}",
        "type": info["type"],
        "bytes": info["size"],
        "copies": info.get("copies"),
        "changed": info.get("mtime"),
    }


def stat(url: UrlArgument, as_json: JsonOption = False) -> None:
    """Show what a path is: bytes, copies, version, when it was changed, and which nodes hold how many blocks.

    A file can be read while each of its blocks is on a node that is alive.

    Examples:

    ```
    insitu fs stat insitu://models/digits.keras
    ```
    """
    with _failures_explained():
        system = _open()
        info = system.info(_check_url(url))
        row = {**_describe(info), "version": info.get("version"), "blocks": info.get("blocks")}
        row["nodes"] = system.count_blocks(url) if info["type"] == "file" else {}
    if as_json:
        print_json(row)
        return
    for name, value in row.items():
        if name == "nodes":
            value = ", ".join(f"{node} ({count})" for node, count in value.items()) or "-"
        elif name == "changed":
            value = format_time(value) if value else "-"
        typer.echo(f"{name + ':':10}{escape_controls(str(value if value is not None else '-'))}")


def cat(
    urls: Annotated[list[str], typer.Argument(metavar="insitu://VOLUME/PATH...", help="The files.")],
) -> None:
    """Write the content of files to stdout.

    Examples:

    ```
    insitu fs cat insitu://runs/notes.txt
    insitu fs cat insitu://models/digits.keras > digits.keras
    ```
    """
    with _failures_explained():
        system = _open()
        for url in urls:
            with system.open(_check_url(url), "rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer, _CHUNK)
        sys.stdout.buffer.flush()


def cp(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A path, insitu://..., or - for stdin.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A path, insitu://..., or a folder.")],
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Include everything in a folder.")
    ] = False,
    copies: CopiesOption = 2,
) -> None:
    """Copy a file, or with -r a folder, between this machine and the cluster, or within the cluster.

    Each file appears as a whole, and replaces one of its name. It is on K nodes, and survives the loss of
    all but one of them.

    Examples:

    ```
    insitu fs cp model.keras insitu://models/digits.keras
    insitu fs cp --copies 3 model.keras insitu://models/
    insitu fs cp -r insitu://runs/7 ./run-7
    echo done | insitu fs cp - insitu://runs/7/state
    ```
    """
    if not source.startswith(SCHEME) and not target.startswith(SCHEME):
        raise InputError(f"One of both is {SCHEME}VOLUME/PATH. Received: {source} and {target}. Use cp")
    with _failures_explained():
        system = _open(copies)
        count = size = 0
        for one, other in _list_copies(system, source, target, recursive):
            size += _copy(system, one, other)
            count += 1
    print_notice(f"Copied {format_count(count, 'file')}, {format_size(size)}")


def _is_folder(system: InsituFileSystem, place: str) -> bool:
    return bool(system.isdir(place)) if place.startswith(SCHEME) else os.path.isdir(place)


def _list_copies(
    system: InsituFileSystem, source: str, target: str, recursive: bool
) -> Iterator[tuple[str, str]]:
    """Yield source and target of each file. Raises InputError, OSError."""
    for place in (source, target):
        if place.startswith(SCHEME) and not place.removeprefix(SCHEME).strip("/"):
            raise InputError(f"Files are in volumes. Received: {place} alone. Name one: {SCHEME}VOLUME/PATH")
    name = source.rstrip("/").rpartition("/")[2]
    volume_only = target.startswith(SCHEME) and "/" not in target.removeprefix(SCHEME).rstrip("/")
    if target.endswith("/") or volume_only or _is_folder(system, target):
        if source == "-" or not name:
            raise InputError(f"What comes from stdin needs a name. Received: {target}, which is a folder")
        target = f"{target.rstrip('/')}/{name}"
    if source == "-" or not _is_folder(system, source):
        yield source, target
        return
    if not recursive:
        raise InputError(f"A folder is copied with -r. Received: {source}. Give -r, or name a file in it")
    if source.startswith(SCHEME):
        root = source.removeprefix(SCHEME).strip("/")
        for found in system.find(source):
            yield f"{SCHEME}{found}", f"{target}/{found[len(root) + 1 :]}"
        return
    for parent, folders, names in os.walk(source):
        folders.sort()
        for each in sorted(names):
            path = Path(parent, each)
            yield str(path), f"{target}/{path.relative_to(source).as_posix()}"


def _copy(system: InsituFileSystem, source: str, target: str) -> int:
    """Copy one file, which appears as a whole. Return its bytes."""
    with contextlib.ExitStack() as stack:
        if source == "-":
            read: BinaryIO = sys.stdin.buffer
        elif source.startswith(SCHEME):
            read = stack.enter_context(system.open(source, "rb"))
        else:
            read = stack.enter_context(open(source, "rb"))
        size = 0
        with _open_target(system, target) as written:
            while data := read.read(_CHUNK):
                size += len(data)
                written.write(data)
    return size


@contextlib.contextmanager
def _open_target(system: InsituFileSystem, target: str) -> Iterator[Any]:
    if target.startswith(SCHEME):
        with system.open(target, "wb") as file:
            yield file
        return
    final = Path(target)
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    try:
        with open(partial, "xb") as file:
            yield file
        partial.replace(final)
    finally:
        partial.unlink(missing_ok=True)


def mv(source: UrlArgument, target: UrlArgument) -> None:
    """Move a file or a folder of the cluster, as a whole within a volume.

    Examples:

    ```
    insitu fs mv insitu://models/new.keras insitu://models/digits.keras
    ```
    """
    with _failures_explained():
        _open().mv(_check_url(source), _check_url(target))


def rm(
    urls: Annotated[list[str], typer.Argument(metavar="insitu://VOLUME/PATH...", help="Paths to remove.")],
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Include everything in folders.")
    ] = False,
) -> None:
    """Remove files, or with -r folders and volumes.

    Examples:

    ```
    insitu fs rm insitu://runs/7/notes.txt
    insitu fs rm -r insitu://runs
    ```
    """
    with _failures_explained():
        system = _open()
        for url in urls:
            try:
                system.rm(_check_url(url), recursive=recursive)
            except IsADirectoryError as error:
                raise InputError(f"A folder is removed with -r. Received: {url}, which is one") from error


def du(
    url: Annotated[str, typer.Argument(metavar="[insitu://VOLUME/PATH]", help="A folder.")] = SCHEME,
    as_json: JsonOption = False,
) -> None:
    """Show how many bytes files have, of each volume or of what is in a folder; and what each node holds.

    Examples:

    ```
    insitu fs du
    insitu fs du insitu://runs
    ```
    """
    with _failures_explained():
        system = _open()
        rows = []
        for found in system.ls(_check_url(url), detail=True):
            files = list(system.find(found["name"], detail=True).values())
            rows.append(
                {
                    "url": f"{SCHEME}{found['name']}",
                    "files": len(files),
                    "bytes": sum(each["size"] for each in files),
                    "bytes_with_copies": sum(each["size"] * each["copies"] for each in files),
                }
            )
        nodes = [{"node": node, **usage} for node, usage in system.client.measure_nodes().items()]
    if as_json:
        print_json({"paths": rows, "nodes": nodes})
        return
    sizes = ("bytes", "bytes_with_copies")
    print_table(
        ("FILES", "SIZE", "WITH COPIES", "NAME"),
        [(str(row["files"]), *(format_size(row[each]) for each in sizes), row["url"]) for row in rows],
    )
    typer.echo()
    print_table(
        ("NODE", "IN MEMORY", "OF", "ON DISK"),
        [(n["node"], *(format_size(n[each]) for each in ("memory", "limit", "disk"))) for n in nodes],
    )


def repair(
    volume: Annotated[str, typer.Argument(metavar="insitu://VOLUME", help="The volume.")],
    as_json: JsonOption = False,
) -> None:
    """Make copies that are missing, and name files that are lost.

    Agents do that by themselves soon after a node is lost. The stores of one machine have no agents. Exits
    with 1 where a file is lost, or a copy can't be made now.

    Examples:

    ```
    insitu fs repair insitu://models
    ```
    """
    from dataclasses import asdict

    with _failures_explained():
        report = _open().repair(_check_url(volume if "://" in volume else f"{SCHEME}{volume}"))
    if as_json:
        print_json(asdict(report))
    else:
        print_notice(
            f"Copied {format_count(report.copied, 'block')}, {format_size(report.bytes)}; removed "
            f"{report.removed}{f'; {report.failed} copies failed' if report.failed else ''}"
        )
        for path in report.lost:
            print_notice(f"lost: {path}")
    if report.lost or report.failed:
        raise typer.Exit(1)


def publish(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Such as $INSITU_HOME/unpublished/JOB/worker-0.")
    ],
) -> None:
    """Publish what a task has written while the head was away, and couldn't publish before it ended.

    Give the command on the host of the task. A file that was written again since stays as it is.

    Examples:

    ```
    insitu fs publish ~/.insitu/unpublished/1a2b3c/worker-0
    ```
    """
    from insitu.cluster import publish_waiting

    with _failures_explained():
        refused = publish_waiting(Paths.default(), folder)
    if refused:
        raise typer.Exit(1)


def memory(
    node: Annotated[
        str | None,
        typer.Argument(metavar="[NODE]", help="A node of this machine.", autocompletion=complete_node),
    ] = None,
    size: Annotated[
        str | None, typer.Argument(metavar="[SIZE]", help="Such as 2GB; or default, a share of the host's.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how much memory files may use on nodes of this machine, or set it for one.

    What has no room there goes to the disk of the store. Give the command on the machine of the node.

    Examples:

    ```
    insitu fs memory
    insitu fs memory node-0 2GB
    ```
    """
    from insitu.base.spec import NodeId
    from insitu.grid import list_local_nodes, set_file_memory
    from insitu.grid.shared_files import read_memory_limit

    paths = Paths.default()
    nodes = list_local_nodes(paths)
    if node is not None and node not in nodes:
        raise InputError(f"NODE is one of {', '.join(nodes)}. Received: {node}")
    chosen = nodes if node is None else (NodeId(node),)
    if size is not None:
        set_file_memory(paths, chosen[0], None if size == "default" else parse_size(size))
    limits = {each: read_memory_limit(paths, each) for each in chosen}
    if as_json:
        print_json([{"node": each, "limit": limit} for each, limit in limits.items()])
    else:
        print_table(("NODE", "MEMORY"), [(each, format_size(limit)) for each, limit in limits.items()])


def register(parent: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (ls, cat, cp, mv, rm, du, stat, repair, publish, memory):
        app.command()(command)
    parent.add_typer(app)
