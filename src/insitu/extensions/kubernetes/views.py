"""Makes what a page shows of a cluster, its jobs, queues and events from the objects of Kubernetes. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from insitu.extensions.kubernetes.objects import GPU_RESOURCE, HEAD, QUEUE_LABEL, STORE, Object
from insitu.extensions.kubernetes.waits import Snapshot, explain_pod, find_condition, is_waiting, read_time

_MOST_EVENTS = 30
_OF_SETS = re.compile(rf"({HEAD}|{STORE})-\d+")


@dataclass(frozen=True, slots=True)
class QueueState:
    """How a queue of Kueue is."""

    #: Its name, and that of the ClusterQueue behind it.
    name: str
    cluster_queue: str
    #: Workloads that wait for it, in all of the namespace.
    pending: int
    #: What is used here and what its ClusterQueue has, as in `cpu: 2 of 4`.
    quotas: tuple[str, ...]
    #: The places of workloads that wait, by the name of the job's object: `2 of 3`, with Kueue's reason.
    places: Mapping[str, str]


def describe_queues(
    queues: Iterable[Object], cluster_queues: Mapping[str, Object], workloads: Iterable[Object]
) -> list[QueueState]:
    """Return how the queues of a namespace are. `cluster_queues`: those that may be read, by name."""
    found = [*workloads]
    return [_describe_queue(each, cluster_queues, found) for each in queues]


def _describe_queue(
    queue: Object, cluster_queues: Mapping[str, Object], workloads: Sequence[Object]
) -> QueueState:
    name, behind = str(queue["metadata"]["name"]), str(queue["spec"].get("clusterQueue") or "")
    status = queue.get("status") or {}
    waiting = [each for each in workloads if each["spec"].get("queueName") == name and _is_queued(each)]
    # Kueue's order: by priority, then by age.
    waiting.sort(key=lambda w: (-int(w["spec"].get("priority") or 0), w["metadata"]["creationTimestamp"]))
    places = {
        owner: f"{place} of {len(waiting)} in queue {name}{_explain(each)}"
        for place, each in enumerate(waiting, 1)
        for owner in _list_owners(each)
    }
    used = _sum_resources(status.get("flavorsReservation") or (), "total")
    behind_it = cluster_queues.get(behind)
    groups = behind_it["spec"].get("resourceGroups") or () if behind_it else ()
    most = _sum_resources((each for group in groups for each in group["flavors"]), "nominalQuota")
    quotas = tuple(
        f"{resource}: {' + '.join(used.get(resource, ['0']))} of {' + '.join(most.get(resource, ['?']))}"
        for resource in sorted({*used, *most})
    )
    return QueueState(name, behind, int(status.get("pendingWorkloads") or 0), quotas, places)


def _sum_resources(flavors: Iterable[Object], key: str) -> dict[str, list[str]]:
    """Return the quantities of each resource: one for each flavor, such as kinds of nodes."""
    found: dict[str, list[str]] = {}
    for flavor in flavors:
        for each in flavor.get("resources") or ():
            found.setdefault(str(each["name"]), []).append(str(each.get(key, 0)))
    return found


def _is_queued(workload: Object) -> bool:
    return all(
        find_condition(workload, kind).get("status") != "True" for kind in ("QuotaReserved", "Finished")
    )


def _explain(workload: Object) -> str:
    said = find_condition(workload, "QuotaReserved").get("message")
    return f": {said}" if said else ""


def _list_owners(workload: Object) -> list[str]:
    return [str(each["name"]) for each in workload["metadata"].get("ownerReferences") or ()]


def describe_job_pods(pods: Iterable[Object], found: Snapshot) -> list[dict[str, str]]:
    """Return the pods of jobs, with what each waits for. `found` has claims and events."""
    described = []
    for each in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        phase = str((each.get("status") or {}).get("phase") or "Pending")
        waits = explain_pod(each, found) if is_waiting(each) else ""
        node = str(each["spec"].get("nodeName") or "")
        described.append(
            {"name": str(each["metadata"]["name"]), "state": phase.lower(), "node": node, "waits": waits}
        )
    return described


def choose_events(events: Iterable[Object], own: Collection[str]) -> list[dict[str, str]]:
    """Return the newest events about objects of insitu, whose names are `own`, the newest first."""
    chosen = []
    for each in sorted(events, key=read_time, reverse=True):
        about = each.get("involvedObject") or {}
        name = str(about.get("name") or "")
        if name in own or (about.get("kind") == "Pod" and _OF_SETS.fullmatch(name)):
            kind, said = str(each.get("type") or ""), " ".join(str(each.get("message") or "").split())
            title = f"{about.get('kind')} {name}: {each.get('reason')}"
            chosen.append({"at": read_time(each), "kind": kind, "title": title, "text": said[:300]})
    return chosen[:_MOST_EVENTS]


def read_fields(sets: Mapping[str, Object]) -> dict[str, str]:
    """Return the fields of the form that would bring up the cluster that is there; {} if none is."""
    if HEAD not in sets or STORE not in sets:
        return {}
    head, store = sets[HEAD], sets[STORE]
    container = store["spec"]["template"]["spec"]["containers"][0]
    limits = container["resources"]["limits"]
    claim = _claim_of(store)
    of_head = {each["name"]: each for each in head["spec"]["template"]["spec"]["containers"]}
    page = [*(of_head.get("page") or {}).get("command", ()), "", ""]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    fields = {
        "nodes": str(store["spec"].get("replicas", 1)),
        "gpus": str(limits.get(GPU_RESOURCE, "")),
        "cpu": str(container["resources"]["requests"]["cpu"]),
        "memory": str(limits["memory"]),
        "storage": str(claim["resources"]["requests"]["storage"]),
        "head_storage": str(_claim_of(head)["resources"]["requests"]["storage"]),
        "storage_class": str(claim.get("storageClassName") or ""),
        "image": str(container["image"]),
        "queue": str((store["metadata"].get("labels") or {}).get(QUEUE_LABEL) or ""),
        "page_url": page[page.index("--proxy") + 1] if "--proxy" in page else "",
        "log_format": str(variables.get("INSITU_LOG_FORMAT") or ""),
        "monitor": "on" if "metrics" in of_head else "",
    }
    return {name: value for name, value in fields.items() if value}


def _claim_of(each: Object) -> Any:
    return each["spec"]["volumeClaimTemplates"][0]["spec"]
