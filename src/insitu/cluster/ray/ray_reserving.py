"""Reserves GPUs and processors with Ray for a job's supervisor, so that other work of Ray doesn't get them.

`python -P -m insitu.cluster.ray.ray_reserving` reads {"address": RAY, "cluster": ID, "job": JOB, "wanted":
{NODE: {"gpus": COUNT, "cores": COUNT}}} and writes {"gpus": {NODE: [ID]}, "failed": {NODE: WHY}}, or
{"error": WHY}. It is a process of its own, since one that is connected to Ray ends where Ray's head is lost,
and no job may.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from insitu.base.errors import ClusterError, InsituError
from insitu.base.process.processes import die_with_parent
from insitu.base.wording import format_count
from insitu.cluster.ray.ray_cluster import RayCluster, Share, connect_to_ray, make_namespace

_ANSWER_SECONDS = 20.0
_GRANT_SECONDS = 45.0
"""Seconds in which Ray gives what is free, on all nodes: it starts a process on each, which takes long on a
busy
one."""
_LEAST = 0.01
"""Of a processor: less is what holders take."""


@dataclass(slots=True)
class Reserved:
    """What came of a request."""

    #: Ray's ids of the GPUs that the job has, by node.
    gpus: dict[str, list[str]] = field(default_factory=dict)
    #: Why a node's weren't given.
    failed: dict[str, str] = field(default_factory=dict)


def reserve(ray: RayCluster, job: str, wanted: Mapping[str, Share]) -> Reserved:
    """Have so much of each node for a job, all of it or nothing that it hasn't had before.

    Raises ClusterError if Ray doesn't answer.
    """
    found = Reserved()
    ray_ids = _find_ray_ids(ray)
    made: list[str] = []
    deadline = time.monotonic() + _GRANT_SECONDS
    for node, share in sorted(wanted.items()):
        names = [name for name in ray.list_reservations() if name.startswith(_prefix(job, node))]
        given = [ray.read_reservation(name, _ANSWER_SECONDS) for name in names]
        gpus = [gpu for each in given for gpu in each.gpus]
        missing = Share(
            max(0, share.gpus - len(gpus)), max(0, share.cores - sum(each.cores for each in given))
        )
        if missing != Share() and node not in ray_ids:
            found.failed[node] = "Ray has no such node, or insitu's agent there hasn't been started by Ray"
            continue
        if missing != Share():
            name = f"{_prefix(job, node)}{secrets.token_hex(3)}"
            seconds = max(1.0, deadline - time.monotonic())
            try:
                new = ray.start_reservation(name, ray_ids[node], job, node, missing, seconds)
            except ClusterError as error:
                found.failed[node] = str(error)
                continue
            if new is None:
                found.failed[node] = _describe_shortage(ray, ray_ids[node], job, node, missing)
                continue
            made.append(name)
            gpus += new.gpus
        found.gpus[node] = gpus
    if found.failed:
        for name in made:
            ray.end_reservation(name)
    return found


def _prefix(job: str, node: str) -> str:
    return f"{job}/{node}/"


def _find_ray_ids(ray: RayCluster) -> dict[str, str]:
    """Return Ray's id of each node whose agent Ray has started."""
    controller = ray.find_controller()
    if controller is None:
        raise ClusterError(
            "A job on nodes of Ray needs insitu's controller there. Received: none. Run `insitu up --engine "
            "ray` again"
        )
    _, nodes = ray.call(controller.report, seconds=_ANSWER_SECONDS)
    return {str(node.joined["node"]): node.id for node in nodes if node.joined is not None}


def _describe_shortage(ray: RayCluster, ray_id: str, job: str, node: str, missing: Share) -> str:
    held: dict[str, Share] = {}
    for name in ray.list_reservations():
        other, _, rest = name.partition("/")
        if other != job and rest.startswith(f"{node}/"):
            before, given = held.get(other, Share()), ray.read_reservation(name, _ANSWER_SECONDS)
            held[other] = Share(before.gpus + len(given.gpus), before.cores + given.cores)
    said = []
    for count, resource, kind in (
        (missing.gpus, "GPU", "more GPU"),
        (missing.cores, "CPU", "more processor"),
    ):
        if not count:
            continue
        free, known = ray.count_free(ray_id, resource)
        of_jobs = {other: share.gpus if resource == "GPU" else share.cores for other, share in held.items()}
        jobs = [f"job {other} has {own}" for other, own in sorted(of_jobs.items()) if own]
        others = known - free - sum(of_jobs.values())
        if others > _LEAST:
            jobs.append(f"other work of Ray has {round(others, 2):g}")
        has = f"{max(0.0, round(free, 2)):g} of {known:g} free" + (f" ({', '.join(jobs)})" if jobs else "")
        said.append(f"{format_count(count, kind)} needed, and Ray has {has}")
    return ", and ".join(said)


def main() -> int:
    die_with_parent(signal.SIGKILL, os.getppid())
    answer: dict[str, Any]
    try:
        given = json.load(sys.stdin)
        wanted = {str(n): Share(int(w["gpus"]), int(w["cores"])) for n, w in given["wanted"].items()}
        with connect_to_ray(str(given["address"]), make_namespace(str(given["cluster"]))) as ray:
            found = reserve(ray, str(given["job"]), wanted)
        answer = {"gpus": found.gpus, "failed": found.failed}
    except (InsituError, OSError) as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
