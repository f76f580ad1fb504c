"""Replaces the head of a cluster whose machine is lost, from another home with the cluster's token.

Each host that can be reached says which head its agents follow. If no such head answers, this home gets the
identity of the cluster, in the next number: agents that accept it refuse the previous head. Catalogue and
names of files were lost with that, so the new head begins with none, and `insitu repair` rebuilds them.
"""

from __future__ import annotations

import hmac
import time
from dataclasses import asdict
from typing import Any

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.cluster.decide import AgentView, choose_next_epoch, find_obstacle_to_replacing
from insitu.cluster.nodes.hosts import HostRequest, Report, bring_up_hosts, check_head_home
from insitu.cluster.wire import (
    Outcome,
    answers_as_head,
    change_head,
    check_record_owner,
    list_agents,
    make_view_command,
    parse_hosts,
    read_head,
    read_token,
    run_on_hosts,
)
from insitu.metadata import read_settings


def replace_head(paths: Paths, request: HostRequest, report: Report) -> tuple[str, list[Outcome]]:
    """Make this home that of the head of the cluster of these hosts, start it, and have the agents follow it.

    Returns its address, and what came of each host. Raises as `bring_up_hosts`, and InputError if the
    previous head answers, this home has a head or not the cluster's token, or hosts have agents of other
    clusters.
    """
    lines = parse_hosts(request.text, request.name)
    check_record_owner(paths)
    if read_head(paths) is not None:
        raise InputError(
            f"--replace-head is for another home than that of a head. Received: {paths.home}, which is a "
            f"head's. Leave --replace-head out: `insitu up --hosts` starts that head again"
        )
    check_head_home(paths)
    token = read_token(paths)
    commands = [(line.host, make_view_command(line, request.insitu)) for line in lines]
    outcomes = run_on_hosts(request.launcher, commands, f"{token}\n", lambda outcome: None)
    views = [view for outcome in outcomes for view in _parse_views(outcome)]
    views += [AgentView(v.cluster, v.head, v.epoch, True) for v in views if answers_as_head(v.head, token)]
    if why := find_obstacle_to_replacing(views):
        for outcome in outcomes:
            if outcome.answer is None:
                report(outcome)
        raise InputError(f"A head is replaced that is lost, with its agents' token. Received: {why}")
    newest = max(views, key=lambda view: view.epoch)
    epoch, replaces = choose_next_epoch(views), {"head": newest.head, "at": time.time()}
    change_head(paths, cluster=newest.cluster, epoch=epoch, replaces=replaces)
    return bring_up_hosts(paths, request, report)


def describe_views(paths: Paths, token: str) -> dict[str, Any]:
    """Return what this host knows about the heads of its agents, for `replace_head` elsewhere. Raises
    InputError for another token than that of this home."""
    if not hmac.compare_digest(read_token(paths).encode(), token.encode()):
        raise InputError(
            f"Who replaces a head has the cluster's token. Received: another one than that in {paths.token}. "
            f"Copy that file into the INSITU_HOME of the new head, with mode 0600"
        )
    found, settings = [], read_settings(paths)
    metadata = "" if settings is None else settings.url
    for record in list_agents(paths).values():
        answers = answers_as_head(record.head, token)
        view = AgentView(record.cluster, record.head, record.epoch, answers, metadata)
        found.append(asdict(view))
    return {"views": found}


def _parse_views(outcome: Outcome) -> list[AgentView]:
    """Return what a host has said. Raises ClusterError for anything else."""
    try:
        views = [AgentView(**each) for each in (outcome.answer or {"views": []})["views"]]
    except (KeyError, TypeError):
        views = [AgentView("", "", -1, head_answers=False)]
    for view in views:
        if not (view.cluster and view.head and type(view.epoch) is int and view.epoch >= 0):
            raise ClusterError(
                f"A host says which head its agents follow. Received: something else from {outcome.host}. "
                f"Install the same version of insitu there"
            )
    return views
