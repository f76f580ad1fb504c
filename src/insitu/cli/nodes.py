"""Commands about nodes: up, down, nodes, agent."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.cli.console import format_size, format_time, print_json, print_notice, print_table
from insitu.cli.data import JsonOption, remove_leftovers
from insitu.errors import ClusterError, InputError, JobEnded
from insitu.paths import Paths

if TYPE_CHECKING:
    from insitu.cluster import Outcome
    from insitu.spec import CacheSpec

_SSH = "ssh -T -o BatchMode=yes -o ConnectTimeout=10 {host}"
_AGENT_FIELDS = (
    "host",
    "address",
    "state",
    "since",
    "cores",
    "gpus",
    "memory",
    "memory_available",
    "disk",
    "disk_free",
    "unknown_versions",
    "versions",
    "processor",
    "clock_skew",
)

_UP_HELP = """
Brings up nodes: simulated ones on this machine, each with a store of its own, or an agent on each of several
hosts.

Simulated nodes: caches that exist stay where they are; import them again with --overwrite to spread them.
Stores lie in the folder $INSITU_HOME, by default ~/.insitu. What lies there is its owner's alone. With
--shared the members of a group may use its caches, make and drop some, and start jobs there; each one's jobs
stay private.

Hosts: --hosts names a file with a host a line: a name, an address or user@name, then options such as
name=NODE, interface=ib0, port=7071 or home=/data/insitu. The head runs on this machine, and each host is
reached by ssh, or by the command of --launcher. insitu must be installed there in the same version. Run
again, it starts what doesn't run.

Examples:

    insitu up --nodes 3
    insitu up --shared team
    insitu up --quota 200GB --tier /slow
    insitu up --hosts hosts.txt
    insitu up --hosts hosts.txt --interface eth1
"""

_AGENT_HELP = """
Runs the agent of this machine: it owns the store, serves its partitions to others, and answers for its node.

`insitu up --hosts` starts it on each host over ssh. Under a scheduler start it yourself, such as by srun. It
joins the head at --head, whose token it takes from the file `token` in the folder $INSITU_HOME, by default
~/.insitu. It ends with --stop, by SIGTERM, or when the head is taken down.

Examples:

    insitu agent --head 10.0.0.1:7070
    insitu agent --head head.example.com:7070 --interface ib0 --detach
    insitu agent --stop
"""


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("up", help=_UP_HELP)(up)
    app.command("down")(down)
    app.command("nodes")(nodes)
    app.command("agent", help=_AGENT_HELP)(agent)


def up(
    nodes: Annotated[int | None, typer.Option(help="How many simulated nodes.", show_default="1")] = None,
    shared: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Open the caches to the members of this group.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Close them to all others again.")] = False,
    quota: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What each store may hold, such as 200GB; or none.")
    ] = None,
    tier: Annotated[
        str | None, typer.Option(metavar="PATH", help="A second path for cold partitions; or none.")
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
    interface: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|ADDRESS",
            help="Where the head listens.",
            show_default="the one that routes to the hosts",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="The head's port.", show_default="chosen by the system"),
    ] = None,
) -> None:
    if hosts is not None:
        given = {
            "--nodes": nodes is not None,
            "--shared": shared is not None,
            "--private": private,
            "--quota": quota is not None,
            "--tier": tier is not None,
        }
        if any(given.values()):
            raise InputError(
                f"--hosts excludes what is about this machine alone. Received: --hosts with "
                f"{', '.join(name for name, there in given.items() if there)}"
            )
        _up_hosts(hosts, launcher or _SSH, insitu or "insitu", interface or "", port or 0)
        return
    options = {"--launcher": launcher, "--insitu": insitu, "--interface": interface, "--port": port}
    if any(value is not None for value in options.values()):
        raise InputError(
            f"{', '.join(options)} go with --hosts. Received: "
            f"{', '.join(name for name, value in options.items() if value is not None)} without it"
        )
    _up_nodes(nodes, shared, private, quota, tier)


def _up_nodes(
    nodes: int | None, shared: str | None, private: bool, quota: str | None, tier: str | None
) -> None:
    from insitu.access import close_home, share_home
    from insitu.cli.storage import parse_store_settings, report_quotas, report_tiers
    from insitu.grid import Catalog, apply_tier_modes, bring_up, load_topology, set_up_stores

    if shared is not None and private:
        raise InputError(f"--shared and --private exclude each other. Received: --shared {shared} --private")
    paths = Paths.default()
    if nodes is None:
        kept = private or any(option is not None for option in (shared, quota, tier))
        nodes = len(load_topology(paths).nodes) if kept else 1
    settings = parse_store_settings(quota, tier)
    topology = bring_up(paths, nodes)
    set_up_stores(paths, topology.nodes, **settings)
    if shared is not None:
        share_home(paths, shared)
        print_notice(f"{paths.home} is shared with the group {shared}")
    if private:
        close_home(paths)
        print_notice(f"{paths.home} is private")
    if shared is not None or private:
        apply_tier_modes(paths)
    print_notice(f"{len(topology.nodes)} node(s) up: {', '.join(topology.nodes)}")
    report_tiers(paths, topology.nodes, given=tier is not None)
    if quota is not None:
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


def _up_hosts(file: Path, launcher: str, insitu: str, interface: str, port: int) -> None:
    from insitu.cluster import HostRequest, bring_up_hosts, read_hosts_file

    request = HostRequest(read_hosts_file(file), str(file), launcher, insitu, interface, port)
    address, outcomes = bring_up_hosts(Paths.default(), request, _report_start)
    failed = [outcome.host for outcome in outcomes if outcome.answer is None]
    joined = len(outcomes) - len(failed)
    print_notice(f"{joined} of {len(outcomes)} host(s) up. The head is at {address}.")
    if failed:
        raise ClusterError(
            f"Each host must start its agent. Received: {', '.join(failed)} didn't. The others stay up. "
            f"Correct what is named above and run the same command again, or `insitu down`"
        )
    _check_network(Paths.default())


def _check_network(paths: Paths) -> None:
    """Print each pair of nodes that can't talk. Raises ClusterError where there is one."""
    from insitu.cluster import find_separated

    pairs = find_separated(paths)
    for source, target, why in pairs:
        print_notice(f"{source} can't reach {target}: {why}")
    if pairs:
        raise ClusterError(
            f"All nodes must reach each other. Received: {len(pairs)} pair(s) that can't talk, named above. "
            f"Open the ports of `insitu nodes` between them, or choose other addresses by interface= or "
            f"port= in the file of hosts"
        )


def _report_start(outcome: Outcome) -> None:
    answer = outcome.answer
    if answer is None:
        print_notice(f"{outcome.host}: failed: {outcome.problem}")
    elif answer.get("already"):
        print_notice(f"{outcome.host}: {answer.get('node')} runs already")
    else:
        print_notice(f"{outcome.host}: {answer.get('node')} serves at {answer.get('address')}")


def down(
    force: Annotated[
        bool,
        typer.Option("--force", "--yes", help="Delete caches, too, and stop running jobs first."),
    ] = False,
) -> None:
    """Take the nodes down and delete their stores, with all caches in them.

    Where agents run on hosts, these and the head are ended first, and their stores stay: the next `insitu up
    --hosts` finds them. With --force these are deleted, too.

    Example: insitu down --force
    """
    from insitu.cluster import read_head
    from insitu.grid import take_down

    paths = Paths.default()
    if read_head(paths) is not None:
        if force:
            _stop_jobs(paths, force=True)
        if _down_hosts(paths, force) and not force:
            return
    _stop_jobs(paths, force=force)
    topology = take_down(paths, force=force)
    print_notice(f"{len(topology.nodes)} node(s) down: {', '.join(topology.nodes)}")


def _down_hosts(paths: Paths, delete: bool) -> bool:
    """End head and agents. Returns whether there were any. Raises ClusterError, which names what is left."""
    from insitu.cluster import read_head, take_down_hosts

    before = read_head(paths)
    report = take_down_hosts(paths, delete=delete, report=lambda outcome: None)
    if report.ended:
        kept = "" if delete else ", whose stores stay"
        print_notice(f"{len(report.ended)} agent(s) ended{kept}: {', '.join(report.ended)}")
    for name, why in report.left.items():
        print_notice(f"{name}: {why}")
    if report.left:
        raise ClusterError(
            f"Agents on all hosts must end. Received: {', '.join(report.left)} can't be reached. Run `insitu "
            f"down` again once they are there"
        )
    return bool(report.ended or (before and (before.hosts or before.pid)))


def _stop_jobs(paths: Paths, *, force: bool) -> None:
    """Stop the running jobs, whose data would go. Raises InputError, which names them, without `force`."""
    from insitu.cli.jobs import stop_and_wait
    from insitu.cluster import is_running, list_job_ids

    running = [job for job in list_job_ids(paths) if is_running(paths.job(job))]
    if running and not force:
        raise InputError(
            f"The stores are in use by {len(running)} running job(s): {', '.join(running)}. Stop them with "
            f"`insitu stop JOB_ID`; `insitu down --force` stops them and deletes all caches"
        )
    for job in running:
        print_notice(f"Stopping {job}, whose data goes.")
        with contextlib.suppress(JobEnded):
            stop_and_wait(paths.job(job))


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
            help="Where the agent serves.",
            show_default="the one that routes to the head",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The agent's port.", show_default="chosen by the system")
    ] = 0,
    detach: Annotated[bool, typer.Option("--detach", help="Return once it has joined; it runs on.")] = False,
    token_stdin: Annotated[
        bool, typer.Option("--token-stdin", help="Take the cluster's token from the standard input.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the agents of this home on this host.")] = False,
    delete: Annotated[
        bool, typer.Option("--delete", help="With --stop: delete their stores, too, with all data.")
    ] = False,
) -> None:
    from insitu.cluster import AgentOptions, read_token, run_agent, start_agent

    paths = Paths.default()
    if stop:
        _stop_agents(paths, delete)
        return
    if head is None or delete:
        raise InputError(
            f"An agent needs a head to join, and --delete goes with --stop. Received: "
            f"{'--delete without --stop' if delete else 'no --head'}. Example: insitu agent --head "
            f"10.0.0.1:7070"
        )
    token = sys.stdin.readline().strip() if token_stdin else read_token(paths)
    options = AgentOptions(head, name or "", interface or "", port)
    if detach:
        sys.stdout.write(f"{json.dumps(start_agent(paths, options, token))}\n")
        return

    def report(joined: dict[str, Any]) -> None:
        sys.stdout.write(f"{json.dumps(joined)}\n")
        sys.stdout.flush()

    run_agent(paths, options, token, report)
    sys.stdout.flush()
    os._exit(0)  # a stream of Flight that nobody reads would keep the process


def _stop_agents(paths: Paths, delete: bool) -> None:
    from insitu.cluster import delete_store, stop_agents, stop_report

    stopped = stop_agents(paths)
    answer = stop_report(paths, stopped)
    if delete:
        for node in answer["stores"]:
            delete_store(paths, node)
    sys.stdout.write(f"{json.dumps(answer)}\n")


def nodes(
    as_json: JsonOption = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Have all agents try to reach each other; exit with 1 if one can't."),
    ] = False,
) -> None:
    """List the nodes, with what they store. Removes what imports that were killed have left.

    Where there is a head, its agents come first, with their hosts. Stores lie in the folder $INSITU_HOME, by
    default ~/.insitu.

    Example: insitu nodes
    """
    if check:
        _check_network(Paths.default())
        print_notice("All nodes reach each other.")
        return
    from insitu.cli.storage import print_nodes
    from insitu.grid import Catalog, check_distinct, load_topology, measure_store, read_store_id

    paths = Paths.default()
    remove_leftovers(paths)
    agents = _list_agents(paths)
    served = {each["node"] for each in agents}
    local = [node for node in load_topology(paths).nodes if node not in served]
    stores = {node: read_store_id(paths, node) for node in local}
    stored = Catalog(paths).stored()
    listed = [{**each, **_count_copies(paths, stored, each["node"])} for each in agents]
    for node, store_id in stores.items():
        copies = _count_copies(paths, stored, node)
        if agents and not copies["primaries"] + copies["backups"]:
            continue
        room = measure_store(paths, node)
        found = {"node": node, **copies, "store": str(paths.node(node)), "store_id": store_id}
        found |= {"quota": room.quota, "used": room.used, "slow_bytes": room.slow}
        found["slow"] = None if room.tier is None else str(room.tier)
        listed.append({**found, **dict.fromkeys(_AGENT_FIELDS)})
    if as_json:
        print_json([_in_order(each) for each in listed])
    elif agents:
        _print_hosts(listed)
    else:
        print_nodes(listed)
    check_distinct(paths, {node: store for node, store in stores.items() if store is not None})


def _list_agents(paths: Paths) -> list[dict[str, Any]]:
    """Return the agents of the cluster that this home belongs to, as `--json` prints them."""
    from insitu.grid import list_nodes_with_stores

    stores = list_nodes_with_stores(paths)
    if not paths.head.exists() and not any(paths.agent(node).exists() for node in stores):
        return []
    from insitu.cluster import read_nodes

    members, notice = read_nodes(paths)
    if notice:
        print_notice(notice)
    listed = []
    for member in sorted(members, key=lambda each: each.facts.node):
        facts, load = member.facts, member.load
        host, port = facts.address, facts.port
        listed.append(
            {
                "node": facts.node,
                "store": facts.folder,
                "store_id": facts.store,
                "host": facts.host,
                "address": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
                "state": "unknown" if notice and member.state != "left" else member.state,
                "since": member.since,
                "cores": facts.cores,
                "gpus": list(facts.gpus),
                "memory": facts.memory,
                "memory_available": load.memory_available,
                "disk": facts.disk,
                "disk_free": load.disk_free,
                "unknown_versions": load.unknown_versions,
                "versions": dict(facts.versions),
                "processor": facts.processor,
                "clock_skew": round(member.clock_skew, 3),
            }
        )
    return listed


def _in_order(entry: dict[str, Any]) -> dict[str, Any]:
    first = ("node", "primaries", "backups", "rows", "bytes", "store", "store_id")
    room = ("quota", "used", "slow", "slow_bytes")
    return {name: entry.get(name) for name in (*first, *room, *_AGENT_FIELDS)}


def _count_copies(paths: Paths, stored: Sequence[CacheSpec], node: str) -> dict[str, int]:
    from insitu.cli.storage import measure_copies

    owned = [p for cache in stored for p in cache.partitions if node in p.owners]
    return {
        "primaries": sum(p.owners[0] == node for p in owned),
        "backups": sum(p.owners[0] != node for p in owned),
        "rows": sum(p.rows for p in owned if p.owners[0] == node),
        "bytes": measure_copies(paths, stored, node),
    }


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
        if n["unknown_versions"]:
            print_notice(
                f"{n['node']} holds {n['unknown_versions']} version(s) that the catalogue doesn't know, such "
                f"as of a time before it was away. They stay there."
            )
