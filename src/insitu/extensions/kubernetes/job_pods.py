"""Makes the pods of a job: one for each store beside which tasks run. Pure.

A pod mounts the claim of its store, so the scheduler puts it on the node that has the data. In it a server
runs the tasks and starts them again; Kubernetes makes another pod only if a node is lost or drained, or
somebody evicts the pod.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from insitu.base.errors import JobSpecError
from insitu.base.spec import JobSpec, NodeId, Placement
from insitu.cluster import FOR_TASKS, is_of_insitu, is_secret
from insitu.extensions.kubernetes.objects import (
    GPU_RESOURCE,
    MANAGED_BY,
    QUEUE_LABEL,
    STORE,
    TASKS,
    Object,
    make_labels,
    make_task_pod,
)
from insitu.extensions.kubernetes.options import is_name
from insitu.extensions.kubernetes.waits import list_conditions
from insitu.options import JobOptions, options_of

JOB, JOB_LABEL = "job", "insitu.dev/job"
JOB_API, JOBSET_API = "batch/v1", "jobset.x-k8s.io/v1alpha2"
_ENDED = ("Complete", "Completed", "Failed")
"""Conditions of a Job or a JobSet."""
_MOST_NAME = 40
"""Characters of an object's name: names of its pods have 63 at most, with what comes behind."""
_REPLACED = 6
"""Pods of a store that may fail by themselves. What the cluster takes away doesn't count."""
TAKEN_AWAY = (137, 143)
"""Exit codes of a pod that was killed or ended by Kubernetes. With any other one the job itself is over."""
_KEYS = next(tuple(each.keys) for each in options_of(JobOptions) if each.name == "pod")
_VARIABLE = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.ASCII | re.DOTALL)
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
    #: Variables of the tasks, with their values.
    variables: tuple[tuple[str, str], ...] = ()
    #: Secrets whose keys are variables of the tasks.
    secrets: tuple[str, ...] = ()


def parse_request(given: Sequence[str]) -> PodRequest:
    """Return what values of `--pod` ask for. Raises JobSpecError."""
    single: dict[str, str] = {}
    tolerations: list[Object] = []
    pairs: dict[str, list[tuple[str, str]]] = {"select": [], "env": []}
    secrets: list[str] = []
    for text in given:
        key, _, value = text.partition("=")
        if key not in _KEYS or not value:
            raise JobSpecError(f"--pod is {'=..., '.join(_KEYS)}=... Received: {text!r}")
        if key == "toleration":
            tolerations.append(_parse_toleration(value))
        elif key in pairs:
            pairs[key].append(_parse_pair(key, value))
        elif key in single:
            raise JobSpecError(f"--pod {key}=... is given once. Received: {single[key]!r} and {value!r}")
        elif key != "image" and not is_name(value):
            raise JobSpecError(
                f"A name of Kubernetes has small letters, digits, dashes and dots. Received: --pod {text}. "
                f"Give the name of one that exists"
            )
        elif key == "secret":
            secrets.append(value)
        else:
            single[key] = value
    return PodRequest(
        **single,
        tolerations=tuple(tolerations),
        selector=tuple(pairs["select"]),
        variables=tuple(pairs["env"]),
        secrets=tuple(secrets),
    )


def _parse_pair(key: str, text: str) -> tuple[str, str]:
    """Return a label of nodes, or a variable, with its value."""
    if key == "select":
        if (found := _SELECTOR.fullmatch(text)) is None:
            raise JobSpecError(f"--pod select=LABEL=VALUE names a label of nodes. Received: 'select={text}'")
        return found["key"], found["value"]
    if (found := _VARIABLE.fullmatch(text)) is None or is_of_insitu(found["name"]):
        raise JobSpecError(
            f"--pod env=NAME=VALUE sets a variable of the tasks, which isn't one of insitu's own. Received: "
            f"'env={text}'. Names have letters, digits and _"
        )
    if is_secret(found["name"], found["value"], lambda path: path.startswith("/")):
        raise JobSpecError(
            f"--pod env=NAME=VALUE is kept on disks and in the job's objects, so it isn't for secrets. "
            f"Received: env={found['name']}=... Make a Secret by `kubectl create secret generic`, and name "
            f"that by --pod secret=NAME"
        )
    return found["name"], found["value"]


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


def name_of_job(job_id: str) -> str:
    """Return the name of a job's object: its id as far as Kubernetes takes it, with its random end."""
    name = re.sub(r"[^a-z0-9]+", "-", job_id.lower())
    return f"{JOB}-{name[-_MOST_NAME:]}".replace("--", "-")


def check_queue(request: PodRequest, *, has_jobsets: bool) -> None:
    """Raise JobSpecError for a queue if JobSet isn't installed."""
    if request.queue and not has_jobsets:
        raise JobSpecError(
            f"--pod queue=NAME needs JobSet: a queue admits all pods of a job together. Received: --pod "
            f"queue={request.queue}, and an API server without {JOBSET_API}. Install JobSet: "
            f"https://jobset.sigs.k8s.io/docs/installation, or leave the queue out"
        )


def make_job_objects(
    spec: JobSpec,
    placement: Placement,
    nodes: Sequence[NodeId],
    namespace: str,
    image: str,
    *,
    has_jobsets: bool,
) -> list[Object]:
    """Return the objects with the pods of a job beside the stores of some nodes: a JobSet, or without that a
    Job for each store, of which one is to own the others.

    A JobSet waits suspended if a queue admits it. `image` is that of the stores. Raises JobSpecError.
    """
    request = parse_request(spec.pod)
    check_queue(request, has_jobsets=has_jobsets)
    tasks = Counter(task.node for task in placement.tasks)
    jobs = {node: _make_job(spec, request, node, tasks[node], image) for node in sorted(nodes)}
    name = name_of_job(spec.job_id)
    metadata: Object = {"namespace": namespace, "labels": {JOB_LABEL: spec.job_id, MANAGED_BY: "insitu"}}
    if not has_jobsets:
        return [
            {
                "apiVersion": JOB_API,
                "kind": "Job",
                "metadata": {"name": f"{name}-{node}", **metadata},
                "spec": job["spec"],
            }
            for node, job in jobs.items()
        ]
    if request.queue:
        metadata["labels"] = {**metadata["labels"], QUEUE_LABEL: request.queue}
    jobset = {
        "suspend": bool(request.queue),
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": node, "replicas": 1, "template": job} for node, job in jobs.items()],
    }
    return [
        {"apiVersion": JOBSET_API, "kind": "JobSet", "metadata": {"name": name, **metadata}, "spec": jobset}
    ]


def _make_job(spec: JobSpec, request: PodRequest, node: NodeId, tasks: int, image: str) -> Object:
    """Return the template of the Job whose pod runs the tasks of one store's node."""
    command = ["insitu", "k8s", "run-tasks", "--job", spec.job_id, "--node", node]
    pod = make_task_pod(request.image or image, command, f"data-{node}", _resources(spec, max(1, tasks)))
    pod |= {"restartPolicy": "Never"}
    (container,) = pod["containers"]
    container["env"] += [{"name": f"{FOR_TASKS}{n}", "value": value} for n, value in request.variables]
    if request.secrets:
        named = [{"prefix": FOR_TASKS, "secretRef": {"name": name}} for name in request.secrets]
        container["envFrom"] = named
    if request.priority:
        pod["priorityClassName"] = request.priority
    if request.tolerations:
        pod["tolerations"] = list(request.tolerations)
    if request.selector:
        pod["nodeSelector"] = dict(request.selector)
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    over = {"containerName": TASKS, "operator": "NotIn", "values": [*TAKEN_AWAY]}
    rules = [
        {"action": "Ignore", "onPodConditions": disrupted},
        {"action": "FailJob", "onExitCodes": over},
    ]
    return {
        "metadata": {"labels": {JOB_LABEL: spec.job_id}},
        "spec": {
            "parallelism": 1,
            "completions": 1,
            "backoffLimit": _REPLACED,
            "podFailurePolicy": {"rules": rules},
            "template": {
                "metadata": {"labels": {JOB_LABEL: spec.job_id, **make_labels(TASKS)}},
                "spec": pod,
            },
        },
    }


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


def group_by_job(objects: Iterable[Object]) -> dict[str, list[Object]]:
    """Return the objects of each job, by its id: its JobSet, or if there is none its Jobs.

    So a job whose JobSet is deleted has none once its Jobs have gone, too. The API of JobSet may be missing
    for a moment, and its Jobs are there then.
    """
    found: dict[str, list[Object]] = {}
    for each in objects:
        found.setdefault(str(each["metadata"]["labels"][JOB_LABEL]), []).append(each)
    return {
        job: [each for each in of_job if each["kind"] == "JobSet"] or of_job for job, of_job in found.items()
    }


def find_owner(objects: Iterable[Object]) -> Object | None:
    """Return the object of a job with which all others go; None if it has gone."""
    return next((each for each in objects if not each["metadata"].get("ownerReferences")), None)


def set_owner(each: Object, owner: Object) -> Object:
    """Return an object that goes with its owner."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    }
    return {**each, "metadata": {**each["metadata"], "ownerReferences": [reference]}}


def is_over(objects: Iterable[Object]) -> bool:
    """Return whether the pods of an attempt have ended: all of a JobSet, or the first one of several Jobs."""
    return any(_find_end(each) is not None for each in objects)


def explain_end(each: Object) -> str:
    """Return what Kubernetes says about the end of a JobSet or a Job."""
    return str((_find_end(each) or {}).get("message") or "nothing is known").rstrip(".")


def _find_end(each: Object) -> Object | None:
    ends = (one for one in list_conditions(each) if one["type"] in _ENDED and one["status"] == "True")
    return next(ends, None)


def is_suspended(objects: Sequence[Object]) -> bool:
    """Return whether a job has to wait for its queue."""
    return any(each["spec"].get("suspend") for each in objects)
