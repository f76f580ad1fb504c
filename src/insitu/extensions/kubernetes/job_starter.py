"""Runs the tasks of jobs in pods of their own: `insitu start --engine k8s`, in the pod of the head."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from insitu.base.errors import ClusterError, InputError, InsituError
from insitu.base.paths import JobPaths
from insitu.base.spec import JobSpec, NodeId
from insitu.extensions.kubernetes.client import Client, KubeconfigTransport
from insitu.extensions.kubernetes.job_pods import (
    JOB_API,
    JOB_LABEL,
    JOBSET_API,
    check_queue,
    explain_end,
    find_owner,
    group_by_job,
    is_over,
    is_suspended,
    make_job_objects,
    parse_request,
    set_owner,
    store_of,
)
from insitu.extensions.kubernetes.objects import QUEUE_LABEL, Object
from insitu.extensions.kubernetes.waits import Snapshot, explain_pod, is_waiting, read_time

_REMOVED_SECONDS = 60.0
_LOOK_SECONDS = 0.5


def open_client() -> Client:
    """Return the API, with the account of the head's pod. Raises ClusterError."""
    return Client(KubeconfigTransport.of_pod(), "")


def list_objects(client: Client, job_id: str = "") -> dict[str, list[Object]]:
    """Return the objects of a job, or of all jobs with pods, by the job's id."""
    kinds = {"Job": JOB_API} | ({"JobSet": JOBSET_API} if client.serves(JOBSET_API) else {})
    selector = f"{JOB_LABEL}={job_id}" if job_id else JOB_LABEL
    # Those in a list don't say their kind.
    return group_by_job(
        {**each, "apiVersion": version, "kind": kind}
        for kind, version in kinds.items()
        for each in client.list(kind, selector)
    )


class PodStarter:
    """Makes the pods of one job; see `ServerStarter` of the hosts' engine."""

    is_on_hosts = True

    def __init__(self, job: JobPaths) -> None:
        self._job = job
        self._client = open_client()
        #: The nodes for which places were wanted last, and whether some were made for them.
        self._nodes: Sequence[NodeId] = ()
        self._has_made = False

    @staticmethod
    def check(spec: JobSpec) -> None:
        request = parse_request(spec.pod)
        client = open_client()
        check_queue(request, has_jobsets=client.serves(JOBSET_API))
        if request.queue and client.find("LocalQueue", request.queue) is None:
            raise InputError(
                f"--pod queue=NAME is a LocalQueue of Kueue in the namespace {client.namespace}. Received: "
                f"{request.queue}. `kubectl get localqueues` lists them"
            )

    def make_places(self, nodes: Sequence[NodeId]) -> None:
        from insitu.cluster import read_placement, read_spec

        for node in nodes:
            store_of(node)
        self._nodes = nodes
        spec, (placement, _) = read_spec(self._job), read_placement(self._job)
        found = self._list()
        owner = find_owner(found)
        if found and (owner is None or is_over(found)):  # of an attempt that has ended
            self._remove(found)
            found, owner = [], None
        has_jobsets = owner["kind"] == "JobSet" if owner else self._client.serves(JOBSET_API)
        image = self._find_image(nodes[0])
        wanted = make_job_objects(
            spec, placement, nodes, self._client.namespace, image, has_jobsets=has_jobsets
        )
        names = {each["metadata"]["name"] for each in found}
        for each in wanted:
            if each["metadata"]["name"] not in names:
                self._has_made = True
                made = self._client.create(set_owner(each, owner) if owner else each)
                owner = owner or made

    def remove_places(self) -> None:
        self._remove(self._list())

    def _list(self) -> list[Object]:
        job = self._job.root.name
        return list_objects(self._client, job).get(job, [])

    def _remove(self, found: Sequence[Object]) -> None:
        for each in found:
            self._client.delete(each["kind"], each["metadata"]["name"])
        deadline = time.monotonic() + _REMOVED_SECONDS
        while left := self._list():
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"The pods of the job's last attempt must go. Received: {_name(left)}, which is there "
                    f"after {_REMOVED_SECONDS:g} s. Look at it by kubectl, and give the command again"
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
        try:
            found = self._list()
            runs = bool(found) and not is_suspended(found)
            waits = explain_pods(self._client, self._job.root.name) if runs else ""
        except InsituError as error:  # the API server is away, and the pods don't need it
            return f"its pods can't be looked at: {error}"
        if not found:
            raise ClusterError("the pods of the job were deleted in Kubernetes")
        if ended := [each for each in found if is_over([each])]:
            if may_pause and not self._has_made:  # they have ended with the last attempt
                self.make_places(self._nodes)
                return "its pods are being made"
            raise ClusterError(f"{_name(ended)} has failed in Kubernetes: {explain_end(ended[0])}")
        if is_suspended(found) and not may_pause:
            raise ClusterError(f"the queue has taken the pods of {_name(found)} away")
        if is_suspended(found):
            queue = found[0]["metadata"].get("labels", {}).get(QUEUE_LABEL)
            return f"its pods wait for queue {queue} to admit them" if queue else "its pods are suspended"
        return waits


def _name(found: Sequence[Object]) -> str:
    return f"{found[0]['kind']} {found[0]['metadata']['name']}"


def explain_pods(client: Client, job_id: str) -> str:
    """Return what the first pod of a job that doesn't run waits for; "": all run."""
    pods = client.list("Pod", f"{JOB_LABEL}={job_id}")
    waiting = [pod for pod in pods if is_waiting(pod)]
    if not waiting:
        return "" if pods else "its pods are being made"
    found = read_waits(client)
    for pod in sorted(waiting, key=lambda pod: str(pod["metadata"]["name"])):
        if why := explain_pod(pod, found):
            return f"pod {pod['metadata']['name']} waits for {why}"
    return ""


def read_waits(client: Client) -> Snapshot:
    """Return the claims and events of a namespace, which say what its pods wait for."""
    claims = {str(each["metadata"]["name"]): each for each in client.list("PersistentVolumeClaim")}
    return Snapshot({}, {}, claims, sorted(client.list("Event"), key=read_time))
