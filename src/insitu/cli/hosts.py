"""What `insitu up` and `insitu down` do about agents on hosts and on the nodes of a Ray cluster."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.base.wording import format_count
from insitu.cli.console import print_notice
from insitu.cli.drain import parse_duration

if TYPE_CHECKING:
    from insitu.cluster import DownReport, Outcome


def refuse_options(option: str, others: Mapping[str, object]) -> None:
    """Raise InputError if an option is given that doesn't go with `option`."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise InputError(
            f"{option} excludes what is about this machine alone, or other ways to start agents. Received: "
            f"{option} with {', '.join(given)}"
        )


def require_hosts(of_hosts: Mapping[str, object], of_ray: Mapping[str, object]) -> None:
    """Raise InputError if an option is given that needs --hosts or --engine."""
    for names, needed in ((of_hosts, "--hosts"), (of_ray, "--engine ray")):
        given = [name for name, value in names.items() if value is not None]
        if given:
            raise InputError(f"{', '.join(names)} go with {needed}. Received: {', '.join(given)} without it")


def up_hosts(
    file: Path,
    launcher: str,
    insitu: str,
    interface: str,
    port: int,
    tied_to: int,
    metadata: str,
    times: Mapping[str, str | None],
    *,
    replaces_head: bool,
) -> None:
    """Bring up the head and an agent on each host of a file. `times` as `parse_times` has them. Raises
    ClusterError where one fails."""
    from insitu.cluster import HostRequest, bring_up_hosts, parse_hosts, read_hosts_file, replace_head

    changed = parse_times(times)
    text = read_hosts_file(file)
    request = HostRequest(text, str(file), launcher, insitu, interface, port, tied_to, metadata)
    if metadata == "etcd" and len(parse_hosts(text, str(file))) < 3:
        print_notice("etcd has one member, on the first host, whose loss loses all: three need three hosts.")
    begin = replace_head if replaces_head else bring_up_hosts
    address, outcomes = begin(Paths.default(), request, _report_start)
    _change_head(changed)
    if replaces_head:
        _name_next_steps()
    _report_end(address, outcomes, "host")


def up_head(
    file: Path, interface: str, port: int, tied_to: int, metadata: str, times: Mapping[str, str | None]
) -> None:
    """Start the head alone, where the hosts of a file reach it. Prints its address.
    `times` as `parse_times` has them."""
    from insitu.cluster import HostRequest, bring_up_head, read_hosts_file

    changed = parse_times(times)
    request = HostRequest(read_hosts_file(file), str(file), "", "", interface, port, tied_to, metadata)
    address = bring_up_head(Paths.default(), request)
    _change_head(changed)
    sys.stdout.write(f"{address}\n")


def up_ray(ray: str, interface: str, port: int, times: Mapping[str, str | None]) -> None:
    """Bring up the head and an agent on each node of a Ray cluster. `times` as `parse_times` has them. Raises
    ClusterError where one fails."""
    from insitu.cluster import RayRequest, bring_up_ray

    changed = parse_times(times)
    address, outcomes = bring_up_ray(Paths.default(), RayRequest(ray, interface, port), _report_start)
    _change_head(changed)
    _report_end(address, outcomes, "node")


def parse_times(times: Mapping[str, str | None]) -> dict[str, float | None]:
    """Return what options with a time, or `off`, change in the head's record; None: it isn't given.

    Raises InputError for what is no time.
    """
    changed: dict[str, float | None] = {}
    for option, text in times.items():
        if text is not None:
            seconds = None if text == "off" else parse_duration(option, text)
            changed[option.removeprefix("--").replace("-", "_")] = seconds
    return changed


def _change_head(values: Mapping[str, float | None]) -> None:
    from insitu.cluster import change_head

    if values:
        change_head(Paths.default(), **values)


def _name_next_steps() -> None:
    """Print what is left to do after a head was replaced."""
    from insitu.cluster import list_copied_jobs

    print_notice("The catalogue was lost with the head before: `insitu repair` rebuilds it.")
    for job in list_copied_jobs(Paths.default()):
        print_notice(f"Hosts keep a copy of {job}: `insitu resume {job}` continues with it here.")


def _report_end(address: str, outcomes: Sequence[Outcome], kind: str) -> None:
    failed = [outcome.host for outcome in outcomes if outcome.answer is None]
    joined = len(outcomes) - len(failed)
    print_notice(f"{joined} of {format_count(len(outcomes), kind)} up. The head is at {address}.")
    if failed:
        raise ClusterError(
            f"Each {kind} must start its agent. Received: {', '.join(failed)} didn't. The others stay up. "
            f"Correct what is named above and run the same command again, or `insitu down`"
        )
    check_network(Paths.default())


def check_network(paths: Paths) -> None:
    """Print each pair of nodes that can't talk. Raises ClusterError if there is one."""
    from insitu.cluster import find_separated

    pairs = find_separated(paths)
    for source, target, why in pairs:
        print_notice(f"{source} can't reach {target}: {why}")
    if pairs:
        raise ClusterError(
            f"All nodes must reach each other. Received: {format_count(len(pairs), 'pair')} that can't "
            "talk, named above. "
            f"Open the ports of `insitu nodes` between them, or choose other addresses by interface= or "
            f"port= in the file of hosts"
        )


def _report_start(outcome: Outcome) -> None:
    answer = outcome.answer
    if answer is None:
        print_notice(f"{outcome.host}: failed: {outcome.problem}")
    elif "etcd" in answer:
        print_notice(f"{outcome.host}: a member of etcd serves at {answer['etcd']}")
    elif answer.get("already"):
        print_notice(f"{outcome.host}: {answer.get('node')} runs already")
    else:
        print_notice(f"{outcome.host}: {answer.get('node')} serves at {answer.get('address')}")


def down_hosts(paths: Paths, delete: bool, *, quiet: bool) -> DownReport | None:
    """End head and agents, and say so unless `quiet`. Returns None where there was nothing to end."""
    from insitu.cluster import read_head, take_down_cluster

    before = read_head(paths)
    report = take_down_cluster(paths, delete=delete, report=lambda outcome: None)
    if report.ended and not quiet:
        kept, deleted = ("", ". Their stores are deleted") if delete else (", whose stores stay", "")
        print_notice(
            f"{format_count(len(report.ended), 'agent')} ended{kept}: {', '.join(report.ended)}{deleted}"
        )
    found = report.ended or report.left or (before and (before.hosts or before.pid or before.ray))
    return report if found else None


def check_all_ended(report: DownReport) -> None:
    """Print where an agent may still run. Raises ClusterError if there is one."""
    for name, why in report.left.items():
        print_notice(f"{name}: {why}")
    if report.left:
        raise ClusterError(
            f"Agents on all hosts must end. Received: {', '.join(report.left)} can't be reached. Run `insitu "
            f"down` again once they are there"
        )
