"""`insitu drain`: has a node leave the cluster with nothing lost."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cli.completion import complete_node
from insitu.cli.console import JsonOption, print_json, print_notice

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_HELP = """
Have a node leave the cluster, such as before its machine is taken away.

Nothing new goes there, tasks of running jobs move to other nodes at once, and its partitions are copied to
others.

`insitu nodes` shows it as draining, then as drained: nothing that others need is on it. Then end its agent by
`insitu agent --stop` there, or keep the node by --cancel. Where tasks can't move while the others continue,
their job starts again elsewhere from its last checkpoint, 30 s before the deadline. On the host of an agent
NODE may be left out.

A node that is lost and won't come back can be drained, too: others get copies of its data.

Examples:

    insitu drain node-2
    insitu drain node-2 --deadline 90s
    insitu drain node-2 --cancel --json
"""


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("drain", help=_HELP)(drain)


def parse_duration(option: str, text: str) -> float:
    """Return the seconds that a text such as 90s, 2m or 1h names. Raises InputError."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhd]?)", text.strip())
    if found is None or not float(found[1]):
        raise InputError(f"{option} is a time such as 90s, 2m or 1h. Received: {text}")
    return float(found[1]) * _UNITS[found[2] or "s"]


def drain(
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="The node's name.", autocompletion=complete_node)
    ] = None,
    deadline: Annotated[str, typer.Option(metavar="TIME", help="Deadline for the drain.")] = "10m",
    cancel: Annotated[bool, typer.Option("--cancel", help="Keep the node after all.")] = False,
    as_json: JsonOption = False,
) -> None:
    from insitu.cluster import cancel_draining, drain_node, find_own_node

    paths = Paths.default()
    seconds = parse_duration("--deadline", deadline)
    found = NodeId(node) if node is not None else find_own_node(paths)
    lost = False
    if cancel:
        cancel_draining(paths, found)
        said = f"{found} stays. What has moved comes back by `insitu rebalance CACHE`."
    elif lost := drain_node(paths, found, seconds) == "lost":
        said = f"{found} is lost. It has left once others have copies of all that it had: see `insitu nodes`."
    else:
        said = f"{found} is to leave within {seconds:g} s. `insitu nodes` shows when it is drained."
    if as_json:
        print_json({"node": found, "seconds": None if cancel else seconds, "lost": lost})
    else:
        print_notice(said)
