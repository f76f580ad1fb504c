"""`insitu --cluster HOST:PORT`: commands from a machine that has only a cluster's address and token.

The head runs them on its machine; what they say comes here.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from insitu.base.errors import InputError
from insitu.base.paths import JobPaths, Paths

Write = Callable[[str, bytes], None]
FollowTop = Callable[[list[str], Callable[[list[str], Write], int], Write], int]

CLUSTER_OPTION: dict[str, Any] = {
    "metavar": "HOST:PORT",
    "help": "Have the head at this address run the command; the token is in $INSITU_TOKEN_FILE.",
    "show_default": "$INSITU_CLUSTER",
}
_OF_THIS_MACHINE = ("agent", "devices")
"""What is about this machine alone, wherever the variable points to."""
_DIRECT = ("fs",)
"""What talks with the nodes itself, from wherever it is run."""
_OF_JOBS = ("describe", "ps", "top", "logs", "attach", "stop", "scale", "resume")
"""What is about jobs, or may be."""
_CONFIG = ("-c", "--config")
"""How the option of `describe` begins that names a file of this machine."""
ARGUMENTS = "insitu arguments"
"""Where the context has the command with its arguments, as they were given."""


def run_from_outside(cluster: str, follow_top: FollowTop) -> None:
    """Have the command run by the head, and exit, where the user or the home says so; or do nothing.

    `follow_top` shows the answers of `top` on a terminal.

    The user says so by --cluster or the environment. The home of an agent says so for jobs, which are on the
    head's machine.

    Raises InputError for a command that can't be asked from outside, ClusterError where no head answers.
    """
    arguments: list[str] = click.get_current_context().meta.get(ARGUMENTS, [])
    if not arguments or not {"--help", "-h"}.isdisjoint(arguments):
        return
    if not cluster and not os.environ.get("INSITU_CLUSTER"):
        address = _find_head(arguments)
        if address:
            _run(address, "", arguments, follow_top)
        return
    from insitu.cluster import CLUSTER_ENV, RELAYED, TOKEN_FILE_ENV

    address = cluster or os.environ[CLUSTER_ENV]
    if arguments[0] in _DIRECT or any(each.startswith("insitu://") for each in arguments):
        os.environ[CLUSTER_ENV] = address
        return
    if arguments[0] in _OF_THIS_MACHINE and not cluster:
        return
    if arguments[0] not in RELAYED:
        source = "--cluster" if cluster else CLUSTER_ENV
        advice = "leave --cluster out" if cluster else f"unset {CLUSTER_ENV}"
        raise InputError(
            f"From outside, a cluster can be asked for {', '.join(RELAYED)}. Received: {arguments[0]} with "
            f"{source} {address}. Run it on the machine of the head, or {advice} to run it on this one"
        )
    _run(address, os.environ.get(TOKEN_FILE_ENV, ""), arguments, follow_top)


def _find_head(arguments: list[str]) -> str:
    """Return the address of the head that has what this command is about; empty: it is on this machine.

    An agent's home has a copy of the catalogue, but no jobs, unless its user has started some there.
    """
    paths = Paths.default()
    if arguments[0] not in _OF_JOBS or paths.head.exists() or not paths.nodes.is_dir():
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


def _run(address: str, token_file: str, arguments: list[str], follow_top: FollowTop) -> None:
    from insitu.cluster import read_token, read_token_file, run_at_head

    given = _read_given(arguments) if arguments[0] == "resume" else {}
    token = read_token_file(Path(token_file)) if token_file else read_token(Paths.default())

    def ask(asked: list[str], write: Write) -> int:
        return run_at_head(address, token, asked, shutil.get_terminal_size().columns, write, given)

    if arguments[0] == "top" and sys.stdout.isatty() and {"--json", "--once"}.isdisjoint(arguments):
        code = follow_top(arguments, ask, _write)
    else:
        code = ask(arguments, _write)
    click.get_current_context().exit(code)


def _read_given(arguments: list[str]) -> dict[str, str | None]:
    """Return the variables of this shell that --env names: nothing else of it leaves this machine."""
    following = [name for option, name in itertools.pairwise(arguments) if option == "--env"]
    names = [*following, *(each.partition("=")[2] for each in arguments if each.startswith("--env="))]
    return {name: os.environ.get(name) for name in names}


def _write(stream: str, data: bytes) -> None:
    target = sys.stdout if stream == "out" else sys.stderr
    target.buffer.write(data)
    target.flush()
