"""Commands about nodes: up, down, nodes, agent."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.base.wording import format_count
from insitu.cli.console import JsonOption, format_size, format_time, print_json, print_notice, print_table
from insitu.cli.data import remove_leftovers
from insitu.cli.down import down
from insitu.cli.drain import parse_duration
from insitu.cli.hosts import (
    check_network,
    refuse_options,
    require_hosts,
    up_head,
    up_hosts,
    up_ray,
)

# The part of `insitu nodes` about an etcd that insitu runs


def print_members(paths: Paths) -> None:
    """Say which members the etcd of this home's cluster has, and which don't answer. Raises InsituError."""
    from insitu.cluster import check_members

    members = check_members(paths)
    if members:
        answering = [address for address, why in members.items() if not why]
        shown = ", ".join(answering) or "none"
        print_notice(f"etcd: {len(answering)} of {len(members)} members answer: {shown}.")
    for address, why in members.items():
        if why:
            print_notice(f"The member of etcd at {address} doesn't: {why}. Its host's etcd/log may say why.")


_SSH = "ssh -T -o BatchMode=yes -o ConnectTimeout=10 {host}"

_UP_HELP = """
Bring up nodes: simulated ones on this machine, each with a store of its own, or an agent on each of several
hosts or of the nodes of a Ray cluster.

Simulated nodes: caches that exist stay where they are; import them again with --overwrite to spread them.
Stores are in the folder $INSITU_HOME, by default ~/.insitu. What is there is its owner's alone. With
--shared the members of a group may use its caches, make and drop some, and start jobs there; each one's jobs
stay private.

Hosts: --hosts names a file with a host a line: a name, an address or user@name, then options such as
name=NODE, interface=ib0, port=7071 or home=/data/insitu. The head runs on this machine, and each host is
reached by ssh, or by the command of --launcher. insitu must be installed there in the same version. Run
again, it starts what doesn't run. What a host had that is away for the time of --copy-lost-after is copied
again from backups to others.

A scheduler, such as Slurm, starts agents itself: with --head-only there is a head alone.

Ray: --engine ray starts an agent on each node of the Ray cluster that this machine is a node of, also on
nodes that join it later. An agent's $INSITU_HOME is that of `ray start` there.

With --metadata an etcd holds what the head knows, and no single machine matters: if the head is lost, the
agent of another host starts the next one. With --metadata etcd insitu runs it, on the first three hosts of
the file, where it must be installed; a URL names one of yours.

Without it, if the machine of the head is lost: copy the file `token` from a host's $INSITU_HOME into a new
$INSITU_HOME, and give --replace-head beside --hosts there. The agents follow the new head, and refuse the one
before if it comes back. Then `insitu repair` rebuilds the catalogue, and `insitu resume` has jobs continue.

Examples:

    insitu up --nodes 3
    insitu up --shared team
    insitu up --quota 200GB
    insitu up --hosts hosts.txt
    insitu up --hosts hosts.txt --interface eth1
    insitu up --hosts hosts.txt --head-only --tied-to $$
    insitu up --engine ray
    insitu up --hosts hosts.txt --replace-head
    insitu up --hosts hosts.txt --metadata etcd
    insitu up --hosts hosts.txt --metadata etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379
"""

_AGENT_HELP = """
Run the agent of this machine: it owns the store, serves its partitions to others, and answers for its node.

`insitu up --hosts` starts it on each host over ssh. Under a scheduler start it yourself, such as by srun. It
joins the head at --head, whose token it takes from the file `token` in the folder $INSITU_HOME, by default
~/.insitu. It ends with --stop, by SIGTERM, or when the head is taken down. With --tied it ends
with the process that has started it, too: no step of a scheduler leaves it behind. With --drain-on-term data
and tasks move to other nodes first: for machines that get SIGTERM some time before they go.

Examples:

    insitu agent --head 10.0.0.1:7070
    insitu agent --head head.example.com:7070 --interface ib0 --detach
    insitu agent --head 10.0.0.1:7070 --tied
    insitu agent --head 10.0.0.1:7070 --drain-on-term 100s
    insitu agent --stop
"""


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("up", help=_UP_HELP)(up)
    app.command("down")(down)
    app.command("nodes")(nodes)
    app.command("agent", help=_AGENT_HELP)(agent)


def up(
    nodes: Annotated[int | None, typer.Option(help="Number of simulated nodes.", show_default="1")] = None,
    shared: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Open the caches to the members of this group.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Close them to all others again.")] = False,
    quota: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Quota of each store, such as 200GB; or none.")
    ] = None,
    hosts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Start an agent on each host in this file.")
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Runs a command on {host}. The command comes last, or stands at {command}.",
            show_default="ssh {host}",
        ),
    ] = None,
    insitu: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Runs insitu on the hosts.", show_default="insitu"),
    ] = None,
    head_only: Annotated[
        bool,
        typer.Option(
            "--head-only", help="With --hosts: start the head alone, and print where these reach it."
        ),
    ] = False,
    tied_to: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="PID",
            help="With --hosts: the head ends with this process, as by `insitu down`.",
        ),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|ADDRESS",
            help="Address that the head listens on.",
            show_default="the one that routes to the hosts",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="The head's port.", show_default="chosen by the system"),
    ] = None,
    copy_lost_after: Annotated[
        str | None,
        typer.Option(
            metavar="TIME|off",
            help="Time after which data of a lost host is copied again.",
            show_default="10m",
        ),
    ] = None,
    replace_head: Annotated[
        bool,
        typer.Option("--replace-head", help="With --hosts: replace the head of these hosts, which is lost."),
    ] = False,
    metadata: Annotated[
        str | None,
        typer.Option(
            metavar="etcd|URL",
            help="With --hosts: an etcd holds the metadata, so that any host may become head.",
            show_default="a file in the head's home",
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="ray", help="Start an agent on each node of a Ray cluster.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The Ray cluster; auto: the one of this machine.",
            show_default="$RAY_ADDRESS, or auto",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    if as_json and head_only:
        raise InputError(
            "--json prints the nodes as `insitu nodes --json` does, and --head-only an address. Received: "
            "both. Leave one out"
        )
    if engine not in (None, "ray"):
        raise InputError(
            f"--engine names what starts the agents: ray. Received: {engine}. Leave it out for nodes of this "
            f"machine, or give --hosts"
        )
    local: dict[str, object] = {"--nodes": nodes, "--shared": shared, "--private": private or None}
    local |= {"--quota": quota}
    of_hosts: dict[str, object] = {"--launcher": launcher, "--insitu": insitu}
    head_alone = {"--head-only": head_only or None, "--tied-to": tied_to, "--metadata": metadata}
    of_head: dict[str, object] = {"--interface": interface, "--port": port}
    times = {"--copy-lost-after": copy_lost_after}
    replacing: dict[str, object] = {"--replace-head": replace_head or None}
    if hosts is not None:
        refuse_options("--hosts", {**local, "--engine": engine, "--address": address})
        if replace_head:
            refuse_options("--replace-head", {"--metadata": metadata})
        if head_only and metadata == "etcd":
            raise InputError(
                "insitu starts an etcd of its own by a launcher. Received: --metadata etcd with --head-only, "
                "which has none. Start etcd yourself, and give --metadata etcd://HOST:PORT,..."
            )
        place = (interface or "", port or 0, tied_to or 0, metadata or "")
        if head_only:
            refuse_options("--head-only", {**of_hosts, **replacing})
            up_head(hosts, *place, times)
            return
        up_hosts(hosts, launcher or _SSH, insitu or "insitu", *place, times, replaces_head=replace_head)
    elif engine is not None:
        refuse_options("--engine ray", {**local, **of_hosts, **head_alone, **replacing})
        up_ray(address or os.environ.get("RAY_ADDRESS") or "auto", interface or "", port or 0, times)
    else:
        of_head |= times
        require_hosts({**of_hosts, **head_alone, **replacing, **of_head}, {"--address": address})
        _up_nodes(nodes, shared, private, quota)
    if as_json:
        print_nodes_as_json()


def print_nodes_as_json() -> None:
    """Print the nodes as `insitu nodes --json` does."""
    from insitu.service import list_nodes

    print_json(list_nodes(Paths.default(), print_notice))


def _up_nodes(nodes: int | None, shared: str | None, private: bool, quota: str | None) -> None:
    from insitu.base.disk.access import close_home, share_home
    from insitu.cli.storage import parse_quota, report_quotas, report_second_paths
    from insitu.grid import Catalog, bring_up, find_second_paths, load_topology, set_quotas

    if shared is not None and private:
        raise InputError(f"--shared and --private exclude each other. Received: --shared {shared} --private")
    paths = Paths.default()
    if nodes is None:
        kept = private or shared is not None or quota is not None
        nodes = len(load_topology(paths).nodes) if kept else 1
    if (shared is not None or private) and (folders := find_second_paths(paths)):
        raise InputError(
            f"All partitions must be in the home before others get or lose access to it. Received: a second "
            f"path, {', '.join(map(str, folders.values()))}. Bring back what is there with `insitu repair`"
        )
    limit = None if quota is None else parse_quota(quota)
    topology = bring_up(paths, nodes)
    if shared is not None:
        share_home(paths, shared)
        print_notice(f"{paths.home} is shared with the group {shared}")
    if private:
        close_home(paths)
        print_notice(f"{paths.home} is private")
    print_notice(f"{format_count(len(topology.nodes), 'node')} up: {', '.join(topology.nodes)}")
    report_second_paths(paths)
    if quota is not None:
        set_quotas(paths, topology.nodes, quota=limit)
        report_quotas(paths, topology.nodes)
    names = [
        cache.name
        for cache in Catalog(paths).caches()
        if not set(topology.nodes) <= {owner for p in cache.partitions for owner in p.owners}
    ]
    if names:
        print_notice(
            f"Some nodes own nothing of {', '.join(names)}: import again with --overwrite to spread them."
        )


def agent(
    head: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The head's address; `insitu up` prints it.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="The node's name.", show_default="the store's, or the host's"),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|ADDRESS",
            help="Address that the agent listens on.",
            show_default="the one that routes to the head",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The agent's port.", show_default="chosen by the system")
    ] = 0,
    detach: Annotated[bool, typer.Option("--detach", help="Return once it has joined; it runs on.")] = False,
    tied: Annotated[
        bool, typer.Option("--tied", help="End with the process that has started this one.")
    ] = False,
    token_stdin: Annotated[
        bool, typer.Option("--token-stdin", help="Take the cluster's token from the standard input.")
    ] = False,
    drain_on_term: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Drain the node on SIGTERM, and end within this time."),
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the agents of this home on this host.")] = False,
    delete: Annotated[
        bool, typer.Option("--delete", help="With --stop: delete their stores, too, with all data.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --stop: print JSON, in the form of docs/reference/json.md.")
    ] = False,
    head_view: Annotated[
        bool, typer.Option("--head-view", help="Print which head the agents follow.", hidden=True)
    ] = False,
    member: Annotated[
        str | None, typer.Option("--member", help="Prepare or start a member of etcd.", hidden=True)
    ] = None,
    unless_led: Annotated[
        bool, typer.Option("--unless-led", help="With --stop: not while their head lives.", hidden=True)
    ] = False,
) -> None:
    from insitu.cluster import (
        AgentOptions,
        describe_views,
        do_about_member,
        identify_parent,
        read_token,
        run_agent,
        start_agent,
    )

    paths = Paths.default()
    if stop:
        _stop_agents(paths, delete, as_json, unless_led)
        return
    if member is not None:
        given = sys.stdin.read().splitlines() if token_stdin else []
        answer = do_about_member(paths, member, head or "", interface or "", given)
        sys.stdout.write(f"{json.dumps(answer)}\n")
        return
    if head_view:
        sys.stdout.write(f"{json.dumps(describe_views(paths, sys.stdin.readline().strip()))}\n")
        return
    if head is None or delete or as_json:
        alone = " and ".join(name for name, given in (("--delete", delete), ("--json", as_json)) if given)
        received = f"{alone} without --stop" if alone else "no --head"
        raise InputError(
            f"An agent needs a head to join, and --delete and --json go with --stop. Received: "
            f"{received}. Example: insitu agent --head 10.0.0.1:7070"
        )
    if tied and detach:
        raise InputError(
            "An agent ends with what has started it, or outlives it. Received: --tied and --detach. Leave "
            "one out"
        )
    token = sys.stdin.readline().strip() if token_stdin else read_token(paths)
    parent = identify_parent() if tied else None
    tied_to = () if parent is None else ((parent.pid, parent.start),)
    drain = 0.0 if drain_on_term is None else parse_duration("--drain-on-term", drain_on_term)
    options = AgentOptions(head, name or "", interface or "", port, tied_to, drain)
    if detach:
        sys.stdout.write(f"{json.dumps(start_agent(paths, options, token))}\n")
        return

    def report(joined: dict[str, Any]) -> None:
        sys.stdout.write(f"{json.dumps(joined)}\n")
        sys.stdout.flush()

    run_agent(paths, options, token, report)
    sys.stdout.flush()
    os._exit(0)  # a stream of Flight that nobody reads would keep the process


def _stop_agents(paths: Paths, delete: bool, as_json: bool, unless_led: bool) -> None:
    from insitu.cluster import check_unled, delete_store, stop_agents, stop_member, stop_report

    if unless_led:
        check_unled(paths)
    stopped = stop_agents(paths)
    stop_member(paths, delete=delete)
    answer = stop_report(paths, stopped)
    if delete:
        for node in answer["stores"]:
            delete_store(paths, node)
    if as_json:
        sys.stdout.write(f"{json.dumps(answer)}\n")  # one line: the commands of `insitu up --hosts` read it
        return
    ended = (
        f"{format_count(len(stopped), 'agent')} ended: {', '.join(stopped)}."
        if stopped
        else "No agent runs here."
    )
    kept = f"Stores {'deleted' if delete else 'that stay'}: {', '.join(answer['stores'])}."
    print_notice(f"{ended} {kept}" if answer["stores"] else ended)


def nodes(
    as_json: JsonOption = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Have all agents try to reach each other; exit with 1 if one can't."),
    ] = False,
) -> None:
    """List the nodes, with what they store, and remove what killed imports have left.

    Where there is a head, its agents come first, with their hosts. Stores are in the folder $INSITU_HOME, by
    default ~/.insitu.

    Examples:

    ```
    insitu nodes
    insitu nodes --check
    ```
    """
    if check:
        _check_nodes(Paths.default())
        if not as_json:
            return
    from insitu.cli.storage import print_nodes
    from insitu.grid import check_distinct, load_topology, read_store_id
    from insitu.service import list_nodes

    paths = Paths.default()
    remove_leftovers(paths)
    listed = list_nodes(paths, print_notice)
    if as_json:
        print_json(listed)
    elif any(each["host"] is not None for each in listed):
        _print_hosts(listed)
        print_members(paths)
    else:
        print_nodes(listed)
    served = {each["node"] for each in listed if each["host"] is not None}
    stores = {node: read_store_id(paths, node) for node in load_topology(paths).nodes if node not in served}
    check_distinct(paths, {node: store for node, store in stores.items() if store is not None})


def _check_nodes(paths: Paths) -> None:
    """Have all agents try to reach each other. Raises ClusterError if one can't."""
    from insitu.cluster import find_head_of_agents, read_head

    if read_head(paths) is None and not find_head_of_agents(paths):
        print_notice("All nodes are on this machine: no network is between them. --check is for hosts.")
        return
    check_network(paths)
    print_notice("All nodes reach each other.")


def _print_hosts(listed: list[dict[str, Any]]) -> None:
    """Print agents with their hosts, and local stores that hold something."""
    header = (
        *("NODE", "STATE", "SINCE", "HOST", "ADDRESS", "CORES", "GPUS", "MEMORY", "DISK FREE"),
        *("PRIMARIES", "BACKUPS", "ROWS", "SIZE"),
    )
    print_table(
        header,
        [
            (
                n["node"],
                n["state"] or "local",
                "-" if n["since"] is None else format_time(n["since"]),
                n["host"] or "-",
                n["address"] or "-",
                "-" if n["cores"] is None else str(n["cores"]),
                "-" if n["gpus"] is None else str(len(n["gpus"])),
                "-" if n["memory"] is None else format_size(n["memory"]),
                "-" if n["disk_free"] is None else format_size(n["disk_free"]),
                str(n["primaries"]),
                str(n["backups"]),
                f"{n['rows']:,}",
                format_size(n["bytes"]),
            )
            for n in listed
        ],
    )
    for n in listed:
        if n["state"] == "draining" and n["leave_by"] < time.time():
            print_notice(
                f"{n['node']} was to have left {format_time(n['leave_by'])}, and others still need what is "
                f"on it. The head's log says what."
            )
        if n["refused"]:
            print_notice(f"{n['node']} isn't let in: {n['refused']}")
        if n["unknown_versions"]:
            print_notice(
                f"{n['node']} holds {format_count(n['unknown_versions'], 'version')} that the catalogue "
                "doesn't know, such "
                f"as of a time before it was away. They stay there."
            )
