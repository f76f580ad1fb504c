"""`insitu --cluster HOST:PORT`: commands from a machine that has only a cluster's address and token.

The head runs them on its machine; what they say comes here. Files of this machine that `import` and `start`
name are sent there, and what the head's side reads of them is in `caller.py`.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from insitu.base.errors import InputError
from insitu.base.paths import JobPaths, Paths
from insitu.cli.console import shown_bytes
from insitu.options import ImportOptions, JobOptions, format_options

_READ_BYTES = 1 << 18
"""Bytes of a file that are read at once."""
CLUSTER_OPTION: dict[str, Any] = {
    "metavar": "HOST:PORT",
    "help": "Have the head at this address run the command; the token is in $INSITU_TOKEN_FILE.",
    "show_default": "$INSITU_CLUSTER",
}
_OF_THIS_MACHINE = ("agent", "devices", "doctor", "examples")
"""What is about this machine alone, wherever the variable points to."""
_OF_THE_HEAD = (
    *("describe", "ps", "top", "logs", "attach", "stop", "scale", "resume", "prune"),
    *("start", "import", "delete", "rebalance"),
)
"""What is about jobs, or changes caches: on the host of an agent it is for the head."""
_OF_A_MACHINE = ("metrics_port",)
"""Parameters of commands that are about the machine on which these run, besides files."""
_CONFIG = ("-c", "--config")
"""How the option of `describe` begins that names a file of this machine."""
_HEAD = "insitu head"
"""Where the context has the head that is to do what `start` or `import` says."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head that commands are for."""

    #: Its address, as host:port.
    address: str
    #: The file with the cluster's token; empty: that of the home.
    token_file: str

    def run(self, arguments: Sequence[str], given: Iterator[bytes]) -> int:
        """Run a command there, which reads what is `given`. Returns its exit code. Raises ClusterError."""
        from insitu.cluster import make_request, read_token, read_token_file, run_at_head

        token = read_token_file(Path(self.token_file)) if self.token_file else read_token(Paths.default())
        view = {"out": sys.stdout, "err": sys.stderr}
        terminals = [] if os.environ.get("NO_COLOR") else [n for n, each in view.items() if each.isatty()]
        request = make_request(arguments, shutil.get_terminal_size().columns, terminals)
        return run_at_head(self.address, token, request, _write, given)


def run_where_due(command: click.Command, arguments: list[str]) -> click.Command:
    """Return the command so that the head runs it if the user or the home says so.

    The user says so by --cluster or the environment. The home of an agent says so for what is about jobs, or
    changes caches. Options are checked here. `arguments`: the command's name, and what follows it.
    """
    here = command.callback

    def run(**given: Any) -> Any:
        context = click.get_current_context()
        head = _find_head(arguments, given, context.find_root().params.get("cluster") or "")
        if head is not None and arguments[0] in ("start", "import"):
            context.meta[_HEAD] = head
        elif head is not None:
            _check_parameters(command, given)
            # Nothing else of this shell leaves this machine.
            context.exit(head.run(arguments, pack({n: os.environ.get(n) for n in given.get("env") or ()})))
        return here(**given) if here is not None else None

    found = copy.copy(command)
    found.callback = run
    return found


def head_of_command() -> Head | None:
    """Return the head that is to do what the command says, or None if this machine is."""
    found: Head | None = click.get_current_context().meta.get(_HEAD)
    return found


def _find_head(arguments: list[str], given: Mapping[str, Any], cluster: str) -> Head | None:
    """Return the head that is to run a command; None: it runs on this machine.

    Raises InputError for a command that isn't run for others.
    """
    if not cluster and not os.environ.get("INSITU_CLUSTER"):
        address = "" if given.get("engine") == "local" else _find_head_of_home(arguments)
        return Head(address, "") if address else None
    from insitu.cluster import CLUSTER_ENV, RELAYED, TOKEN_FILE_ENV

    address = cluster or os.environ[CLUSTER_ENV]
    if arguments[0] in RELAYED:
        return Head(address, os.environ.get(TOKEN_FILE_ENV, ""))
    if arguments[0] == "fs" or any(each.startswith("insitu://") for each in arguments):
        os.environ[CLUSTER_ENV] = address  # it talks with the nodes itself, from wherever it is run
    elif cluster or arguments[0] not in _OF_THIS_MACHINE:
        source = "--cluster" if cluster else CLUSTER_ENV
        advice = "leave --cluster out" if cluster else f"unset {CLUSTER_ENV}"
        raise InputError(
            f"From elsewhere, a cluster can be asked for {', '.join(RELAYED)}, fs. Received: {arguments[0]} "
            f"with {source} {address}. Run it on the machine of the head, or {advice} to run it on this one"
        )
    return None


def _find_head_of_home(arguments: list[str]) -> str:
    """Return the address of the head that has what this command is about; empty: it is on this machine.

    An agent's home has a copy of the catalogue, but no jobs, unless its user has started some there.
    """
    paths = Paths.default()
    if arguments[0] not in _OF_THE_HEAD or paths.head.exists() or not paths.nodes.is_dir():
        return ""
    from insitu.cluster import find_head_of_agents, list_job_ids
    from insitu.grid import Catalog

    address = find_head_of_agents(paths)
    if not address or any(_has_begun(paths.job(job)) for job in list_job_ids(paths)):
        return ""
    if arguments[0] == "describe":
        caches = {cache.name for cache in Catalog(paths).stored()}
        if any(each in caches or "//" in each or each.startswith(_CONFIG) for each in arguments[1:]):
            return ""  # a cache, which the copy of the catalogue knows, or one of another system
    return address


def _has_begun(job: JobPaths) -> bool:
    try:
        return job.journal.exists()
    except PermissionError:  # of another user
        return True


def _check_parameters(command: click.Command, given: Mapping[str, Any]) -> None:
    """Raise InputError for what names a file or a port of the machine on which the command runs."""
    for each in command.params:
        if given.get(str(each.name)) and (isinstance(each.type, click.Path) or each.name in _OF_A_MACHINE):
            raise InputError(
                f"{each.opts[0]} is for the machine on which {command.name} runs, which is that of the head. "
                f"Received: {given[str(each.name)]}. Leave it out, or run the command there"
            )


def _write(stream: str, data: bytes) -> None:
    target = sys.stdout if stream == "out" else sys.stderr
    target.buffer.write(data)
    target.flush()


# Files of this machine


def send_import(head: Head, options: ImportOptions) -> int:
    """Have the head import, and send it the files of this machine. Returns the exit code.

    Raises InputError, SourceError for what can't be imported, as an import on this machine would.
    """
    from insitu.cli.connected import find_address
    from insitu.grid import find_source_files

    sources = tuple(find_address(source, options.config) for source in options.sources)
    options = replace(options, sources=sources, config=None)
    given = ["import", *format_options(options), "--", options.cache]
    is_read_there = options.read_on == "nodes" or options.reader
    files = [] if is_read_there else find_source_files(options)
    if not files:
        return head.run([*given, *sources], pack({}))
    if options.resume:
        raise InputError(
            f"--resume is for sources that nodes read: URLs, or paths with --read-on nodes. Received: "
            f"{', '.join(sources)}, which this machine sends. Leave it out"
        )
    sent = pack({}, [(file, Path(file)) for file in files], f"send {options.cache}")
    return head.run([*given, f"{len(files)} files"], sent)


def send_job(head: Head, options: JobOptions) -> int:
    """Have the head start a job, and send it JOB_DIR of this machine. Returns the exit code.

    Raises JobSpecError for a JOB_DIR that can't be used.
    """
    from insitu.cli.connected import find_address
    from insitu.cluster import find_inherited_settings, pack_code

    cache = find_address(options.cache, options.config)
    given = format_options(replace(options, cache=cache, config=None))
    names = dict.fromkeys(("KERAS_BACKEND", *options.env))
    variables = {name: os.environ.get(name) for name in names if name in (*os.environ, *options.env)}
    with tempfile.TemporaryDirectory(prefix="insitu-start-") as folder:
        archive = pack_code(options.job_dir, Path(folder), Paths.default().home)
        name = f"{options.job_dir.absolute().stem}.zip"
        variables |= find_inherited_settings(options.settings)
        sent = pack(variables, [(f"/{name}", archive)], f"send {name}")
        return head.run(["start", *given, "--", cache, name, *options.command], sent)


def pack(
    variables: Mapping[str, str | None], files: Sequence[tuple[str, Path]] = (), what: str = ""
) -> Iterator[bytes]:
    """Yield what a command reads of its caller, in parts: variables, and files with their names there.

    A line of JSON has the variables, and the name and size of each file; then the files follow. `what` is
    shown with the bytes sent so far. Raises InputError for a file that can't be read.
    """
    try:
        sizes = [path.stat().st_size for _, path in files]
        listed = [[name, size] for (name, _), size in zip(files, sizes, strict=True)]
        head = json.dumps({"variables": variables, "files": listed}).encode() + b"\n"
        with shown_bytes(what if files else "") as show:
            yield from _regroup(itertools.chain((head,), _read(files, sizes, show)))
    except OSError as error:
        raise InputError(
            f"A file that is sent must be readable. Received: {error.filename} ({error.strerror})"
        ) from error


def _read(
    files: Sequence[tuple[str, Path]], sizes: Sequence[int], show: Callable[[int, int], None]
) -> Iterator[bytes]:
    done = 0
    for (_, path), size in zip(files, sizes, strict=True):
        with path.open("rb") as file:
            left = size
            while left:
                data = file.read(min(left, _READ_BYTES))
                if not data:
                    raise InputError(f"A file must not change while it is sent. Received: {path}, cut short")
                yield data
                left -= len(data)
                done += len(data)
                show(done, sum(sizes))


def _regroup(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in parts as the head takes them."""
    from insitu.cluster import PART_BYTES

    part = b""
    for piece in pieces:
        part += piece
        while len(part) >= PART_BYTES:
            yield part[:PART_BYTES]
            part = part[PART_BYTES:]
    if part:
        yield part
