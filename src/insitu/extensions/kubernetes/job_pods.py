"""Makes the pods of a job: one for each store beside which tasks run. Pure.

A pod mounts the claim of its store, so the scheduler puts it on the node that has the data. In it a server
runs the tasks and starts them again; Kubernetes makes another pod only if a node is lost or drained, or
somebody evicts the pod.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from insitu.base.errors import JobSpecError
from insitu.base.spec import JobSpec, NodeId, Placement
from insitu.extensions.kubernetes.objects import (
    GPU_RESOURCE,
    MANAGED_BY,
    QUEUE_LABEL,
    STORE,
    Object,
    make_task_pod,
)

JOB_LABEL = "insitu.dev/job"
JOBSET_API = "jobset.x-k8s.io/v1alpha2"
_MOST_NAME = 40
"""Characters of a JobSet's name: names of its pods have 63 at most, with what comes behind."""
_REPLACED = 6
"""Pods of a store that may fail by themselves. What the cluster takes away doesn't count."""
_KEYS = ("queue", "priority", "image", "toleration", "select")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_TOLERATION = re.compile(r"(?P<key>[\w./-]+)(=(?P<value>[\w.-]*))?(:(?P<effect>\w+))?")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_SELECTOR = re.compile(r"(?P<key>[\w./-]+)=(?P<value>[\w.-]*)")


@dataclass(frozen=True, slots=True)
class PodRequest:
    """What `--pod` asks of the pods of a job."""

    #: The queue of Kueue that admits the job; "": none.
    queue: str = ""
    #: The name of a PriorityClass; "": none.
    priority: str = ""
    #: The image; "": that of the stores.
    image: str = ""
    #: Taints that the pods tolerate.
    tolerations: tuple[Object, ...] = ()
    #: Labels that nodes must have.
    selector: tuple[tuple[str, str], ...] = ()


def parse_request(given: Sequence[str]) -> PodRequest:
    """Return what values of `--pod` ask for. Raises JobSpecError."""
    single: dict[str, str] = {}
    tolerations: list[Object] = []
    selector: list[tuple[str, str]] = []
    for text in given:
        key, _, value = text.partition("=")
        if key not in _KEYS or not value:
            raise JobSpecError(f"--pod is {'=..., '.join(_KEYS)}=... Received: {text!r}")
        if key == "toleration":
            tolerations.append(_parse_toleration(value))
        elif key == "select":
            if (found := _SELECTOR.fullmatch(value)) is None:
                raise JobSpecError(f"--pod select=LABEL=VALUE names a label of nodes. Received: {text!r}")
            selector.append((found["key"], found["value"]))
        elif key in single:
            raise JobSpecError(f"--pod {key}=... is given once. Received: {single[key]!r} and {value!r}")
        elif key != "image" and not _NAME.fullmatch(value):
            raise JobSpecError(
                f"A name of Kubernetes has small letters, digits, dashes and dots. Received: --pod {text}. "
                f"Give the name of one that exists"
            )
        else:
            single[key] = value
    return PodRequest(**single, tolerations=tuple(tolerations), selector=tuple(selector))


def _parse_toleration(text: str) -> Object:
    found = _TOLERATION.fullmatch(text)
    if found is None or found["effect"] not in (None, *_EFFECTS):
        raise JobSpecError(
            f"--pod toleration=KEY[=VALUE][:EFFECT] names a taint; effects are {', '.join(_EFFECTS)}. "
            f"Received: {text!r}"
        )
    operator: Object = {"operator": "Exists"}
    if found["value"] is not None:
        operator = {"operator": "Equal", "value": found["value"]}
    return {"key": found["key"], **operator, **({"effect": found["effect"]} if found["effect"] else {})}


def name_of_jobset(job_id: str) -> str:
    """Return the name of a job's object: its id as far as Kubernetes takes it, with its random end."""
    name = re.sub(r"[^a-z0-9]+", "-", job_id.lower())
    return f"job-{name[-_MOST_NAME:]}".replace("--", "-")


def make_jobset(
    spec: JobSpec, placement: Placement, nodes: Sequence[NodeId], namespace: str, image: str
) -> Object:
    """Return the JobSet with the pods of a job beside the stores of some nodes.

    It waits suspended if a queue admits it. `image` is that of the stores.
    """
    request = parse_request(spec.pod)
    tasks = Counter(task.node for task in placement.tasks)
    labels = {JOB_LABEL: spec.job_id, MANAGED_BY: "insitu"}
    return {
        "apiVersion": JOBSET_API,
        "kind": "JobSet",
        "metadata": {
            "name": name_of_jobset(spec.job_id),
            "namespace": namespace,
            "labels": labels | ({QUEUE_LABEL: request.queue} if request.queue else {}),
        },
        "spec": {
            "suspend": bool(request.queue),
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {"name": node, "replicas": 1, "template": _make_job(spec, request, node, tasks[node], image)}
                for node in sorted(nodes)
            ],
        },
    }


def _make_job(spec: JobSpec, request: PodRequest, node: NodeId, tasks: int, image: str) -> Object:
    """Return the template of the Job whose pod runs the tasks of one store's node."""
    command = ["insitu", "k8s", "run-tasks", "--job", spec.job_id, "--node", node]
    pod = make_task_pod(request.image or image, command, f"data-{node}", _resources(spec, max(1, tasks)))
    pod |= {"restartPolicy": "Never"}
    if request.priority:
        pod["priorityClassName"] = request.priority
    if request.tolerations:
        pod["tolerations"] = list(request.tolerations)
    if request.selector:
        pod["nodeSelector"] = dict(request.selector)
    taken_away = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "metadata": {"labels": {JOB_LABEL: spec.job_id}},
        "spec": {
            "parallelism": 1,
            "completions": 1,
            "backoffLimit": _REPLACED,
            "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": taken_away}]},
            "template": {
                "metadata": {"labels": {JOB_LABEL: spec.job_id, **task_labels()}},
                "spec": pod,
            },
        },
    }


def task_labels() -> dict[str, str]:
    """Return the labels by which pods of insitu reach each other."""
    return {"app.kubernetes.io/name": "insitu", "app.kubernetes.io/component": "tasks"}


def _resources(spec: JobSpec, tasks: int) -> Object:
    limits: Object = {}
    if spec.memory_per_worker:
        limits["memory"] = f"{spec.memory_per_worker * tasks}Mi"
    if spec.gpus_per_worker:
        limits[GPU_RESOURCE] = str(spec.gpus_per_worker * tasks)
    requests = {"cpu": str(max(1, spec.cores_per_worker) * tasks), "memory": f"{tasks}Gi"} | limits
    return {"requests": requests, "limits": limits}


def store_of(node: NodeId) -> str:
    """Return the name of the pod that is the store of a node."""
    if re.fullmatch(rf"{STORE}-\d+", node) is None:
        raise JobSpecError(
            f"--engine k8s makes pods beside stores of `insitu k8s up`. Received: the node {node}, which is "
            f"none. Run the job without --engine k8s"
        )
    return str(node)


def is_over(jobset: Mapping[str, Any]) -> bool:
    """Return whether all pods of a job have ended, or one has failed for good."""
    conditions = (jobset.get("status") or {}).get("conditions") or ()
    return any(each["type"] in ("Completed", "Failed") and each["status"] == "True" for each in conditions)


def is_suspended(jobset: Mapping[str, Any]) -> bool:
    """Return whether a job has to wait for its queue."""
    return bool(jobset["spec"].get("suspend"))
