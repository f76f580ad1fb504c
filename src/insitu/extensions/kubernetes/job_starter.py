"""Runs the tasks of jobs in pods of their own: `insitu start --engine k8s`, in the pod of the head."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import JobPaths
from insitu.base.spec import JobSpec, NodeId
from insitu.extensions.kubernetes.client import Client, KubeconfigTransport
from insitu.extensions.kubernetes.job_pods import (
    JOB_LABEL,
    JOBSET_API,
    is_over,
    is_suspended,
    make_jobset,
    name_of_jobset,
    parse_request,
    store_of,
)
from insitu.extensions.kubernetes.objects import QUEUE_LABEL
from insitu.extensions.kubernetes.waits import Snapshot, explain_pod

_REMOVED_SECONDS = 60.0
_LOOK_SECONDS = 0.5


def open_client() -> Client:
    """Return the API, with the account of the head's pod. Raises ClusterError."""
    return Client(KubeconfigTransport.of_pod(), "")


class PodStarter:
    """Makes the pods of one job; see `ServerStarter` of the hosts' engine."""

    is_on_hosts = True

    def __init__(self, job: JobPaths) -> None:
        self._job = job
        self._name = name_of_jobset(job.root.name)
        self._client = open_client()

    @staticmethod
    def check(spec: JobSpec) -> None:
        request = parse_request(spec.pod)
        client = open_client()
        if not client.serves(JOBSET_API):
            raise InputError(
                f"--engine k8s makes a JobSet. Received: an API server without {JOBSET_API}. Install JobSet: "
                f"https://jobset.sigs.k8s.io/docs/installation, or leave --engine out: tasks run in the "
                f"pods of the stores then"
            )
        if request.queue and client.find("LocalQueue", request.queue) is None:
            raise InputError(
                f"--pod queue=NAME is a LocalQueue of Kueue in the namespace {client.namespace}. Received: "
                f"{request.queue}. `kubectl get localqueues` lists them"
            )

    def make_places(self, nodes: Sequence[NodeId]) -> None:
        from insitu.cluster import read_placement, read_spec

        for node in nodes:
            store_of(node)
        spec, (placement, _) = read_spec(self._job), read_placement(self._job)
        found = self._client.find("JobSet", self._name)
        if found is not None and is_over(found):  # of an attempt that has ended
            self._remove()
            found = None
        if found is None:
            image = self._find_image(nodes[0])
            wanted = make_jobset(spec, placement, nodes, self._client.namespace, image)
            self._client.create(wanted)

    def _remove(self) -> None:
        self._client.delete("JobSet", self._name)
        deadline = time.monotonic() + _REMOVED_SECONDS
        while self._client.find("JobSet", self._name) is not None:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"The pods of the job's last attempt must go first. Received: JobSet {self._name}, which "
                    f"is there after {_REMOVED_SECONDS:g} s. Look at it by kubectl, and resume the job again"
                )
            time.sleep(_LOOK_SECONDS)

    def _find_image(self, node: NodeId) -> str:
        store = self._client.find("Pod", store_of(node))
        if store is None:
            raise ClusterError(
                f"Pods of a job have the image of the stores. Received: no pod {node} in "
                f"{self._client.namespace}. `insitu k8s status` shows what it waits for"
            )
        return str(store["spec"]["containers"][0]["image"])

    def explain_waiting(self, nodes: Collection[NodeId], *, may_pause: bool) -> str:
        found = self._client.find("JobSet", self._name)
        if found is None:
            raise ClusterError(f"the job's JobSet {self._name} was deleted")
        if is_suspended(found) and not may_pause:
            raise ClusterError(f"the queue has taken the pods of JobSet {self._name} away")
        if is_suspended(found):
            queue = found["metadata"].get("labels", {}).get(QUEUE_LABEL)
            return f"its pods wait for queue {queue} to admit them" if queue else "its pods are suspended"
        return explain_pods(self._client, self._job.root.name)


def explain_pods(client: Client, job_id: str) -> str:
    """Return what the first pod of a job that doesn't run waits for; "": all run."""
    pods = sorted(client.list("Pod", f"{JOB_LABEL}={job_id}"), key=lambda pod: str(pod["metadata"]["name"]))
    by_name = {kind: _by_name(client.list(kind)) for kind in ("PersistentVolumeClaim",)}
    found = Snapshot({}, {}, by_name["PersistentVolumeClaim"], client.list("Event"))
    for pod in pods:
        if why := explain_pod(pod, found):
            return f"pod {pod['metadata']['name']} waits for {why}"
    return "" if pods else "its pods are being made"


def _by_name(objects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {str(each["metadata"]["name"]): each for each in objects}
