"""Shows a cluster on the page, brings one up and scales it: a plug-in of `insitu.pages`.

Reading asks the API server each time, with a deadline. Changes are commands of `insitu k8s`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insitu.base.errors import InputError
from insitu.base.paths import JobPaths
from insitu.extensions.kubernetes.options import ClusterOptions, ScaleRequest, UpRequest, check_namespace
from insitu.options import Declared, format_options

if TYPE_CHECKING:
    from insitu.extensions.kubernetes.client import Client, KubeconfigTransport
    from insitu.extensions.kubernetes.objects import Object
    from insitu.ui import Plan

_SECONDS = 3.0
"""How long the API server may take for an answer: somebody looks."""
_KEPT = 60.0
"""Seconds after which the kubeconfig is read again. Reading it may start a program that signs in."""
_KUBECONFIG = Path("~/.kube/config")
_IN_POD = "KUBERNETES_SERVICE_HOST"
_LOOKING = (
    "A page with a kubeconfig changes a cluster. Received: the page of the head's pod, whose account may "
    "only look. Run `insitu ui` on your machine, or `insitu k8s up` and `insitu k8s scale`"
)


class KubernetesPage:
    """The page; see `PluginPage`."""

    title, source = "Kubernetes", "The API server"
    templates = Path(__file__).parent / "templates"
    query = ("namespace", "context")
    forms: Mapping[str, type[Declared]] = {"up": UpRequest, "scale": ScaleRequest}

    def __init__(self) -> None:
        #: By context: when its kubeconfig was read, and what calls its server.
        self._transports: dict[str, tuple[float, KubeconfigTransport]] = {}

    def is_here(self) -> bool:
        return _IN_POD in os.environ or "KUBECONFIG" in os.environ or _KUBECONFIG.expanduser().exists()

    def read(self, query: Mapping[str, str]) -> dict[str, Any]:
        from insitu.extensions.kubernetes.cluster import read_snapshot
        from insitu.extensions.kubernetes.job_pods import JOB_LABEL
        from insitu.extensions.kubernetes.views import choose_events, describe_job_pods, read_fields
        from insitu.extensions.kubernetes.waits import describe_pods

        client = self.open_client(query["context"], query["namespace"])
        try:
            found, missing = read_snapshot(client), ""
        except InputError as error:
            found, missing = None, error.message
        objects = {} if found is None else {**found.sets, **found.pods, **found.claims}
        jobs = client.list("Pod", JOB_LABEL) if found else []
        queues, workloads = _read_queues(client) if found else ([], {})
        own = {*objects, *workloads, *(str(each["metadata"]["name"]) for each in jobs), *_owners_of(jobs)}
        return {
            "namespace": client.namespace,
            "missing": missing,
            "pods": [asdict(each) for each in describe_pods(found)] if found else [],
            "jobs": describe_job_pods(jobs, found) if found else [],
            "queues": [asdict(each) for each in queues],
            "events": choose_events(found.events, own) if found else [],
            "refusal": _LOOKING if _is_in_pod() else "",
            "fields": {"up": read_fields(found.sets) if found else {}},
        }

    def plan(self, form: str, request: Declared) -> Plan:
        from insitu.ui import Plan

        if _is_in_pod():
            raise InputError(_LOOKING)
        words = ["k8s", form, *format_options(request)]
        if isinstance(request, ScaleRequest):
            return Plan(words, self._plan_scale(request))
        if not isinstance(request, UpRequest):
            raise InputError(f"{self.title} has the forms {', '.join(self.forms)}. Received: {form}")
        return Plan(words, self._plan_up(request))

    def _plan_up(self, request: UpRequest) -> list[str]:
        from insitu.extensions.kubernetes.cluster import preview

        client = self.open_client(request.context, request.namespace)
        names = ClusterOptions.__slots__
        options = ClusterOptions(**{name: getattr(request, name) for name in names})
        notices: list[str] = []
        lines = preview(
            client,
            replace(options, namespace=client.namespace),
            notices.append,
            waits=not request.no_wait,
        )
        return notices + lines

    def _plan_scale(self, request: ScaleRequest) -> list[str]:
        from insitu.extensions.kubernetes.cluster import read_snapshot

        client, nodes = self.open_client(request.context, request.namespace), request.nodes or 1
        store = read_snapshot(client).sets.get("store")
        if store is None:
            raise InputError(
                f"A cluster has stores. Received: none in {client.namespace}. Bring it up by the form below"
            )
        now = int(store["spec"].get("replicas", 1))
        if nodes == now:
            raise InputError(
                f"--nodes is another number than now. Received: {nodes}. The cluster stays as it is"
            )
        if nodes > now:
            return [f"store-{number}: new" for number in range(now, nodes)]
        return [f"store-{number}: drained, then removed; its disk stays" for number in range(nodes, now)]

    def concerns(self, job: JobPaths) -> bool:
        from insitu.cluster import read_spec

        return read_spec(job).starter == "k8s"

    def read_job(self, job: JobPaths) -> dict[str, Any]:
        from insitu.extensions.kubernetes.job_pods import JOB_LABEL, name_of_job
        from insitu.extensions.kubernetes.job_starter import list_objects, read_waits
        from insitu.extensions.kubernetes.views import choose_events, describe_job_pods

        client, name = self.open_client("", ""), job.root.name
        pods = client.list("Pod", f"{JOB_LABEL}={name}")
        found = read_waits(client)
        objects = list_objects(client, name).get(name, [])
        queues, workloads = _read_queues(client)
        own = (
            {str(each["metadata"]["name"]) for each in (*pods, *objects)}
            | {name_of_job(name)}
            | _owners_of(pods)
        )
        own |= {each for each, owners in workloads.items() if own & owners}
        places = {owner: place for queue in queues for owner, place in queue.places.items()}
        return {
            "pods": describe_job_pods(pods, found),
            "places": [places[each] for each in sorted(own) if each in places],
            "events": choose_events(found.events, own),
        }

    def open_client(self, context: str, namespace: str) -> Client:
        """Return the API that a context names, or that of the pod in which this runs. Raises InputError."""
        from insitu.extensions.kubernetes.client import Client, KubeconfigTransport

        check_namespace(namespace)
        opened = self._transports.get(context)
        if opened is None or time.monotonic() - opened[0] > _KEPT:
            make: Callable[[], KubeconfigTransport] = (
                KubeconfigTransport.of_pod if _is_in_pod() else lambda: KubeconfigTransport(context)
            )
            transport = make()
            transport.seconds = _SECONDS
            opened = self._transports[context] = time.monotonic(), transport
        return Client(opened[1], namespace)


def _is_in_pod() -> bool:
    return _IN_POD in os.environ and "KUBECONFIG" not in os.environ and not _KUBECONFIG.expanduser().exists()


def _read_queues(client: Client) -> tuple[list[Any], dict[str, set[str]]]:
    """Return the queues of a namespace, and the owners of each Workload by its name.

    There are none without Kueue, or if the user may not read them."""
    from insitu.extensions.kubernetes.views import describe_queues

    try:
        if not client.serves("kueue.x-k8s.io/v1beta1"):
            return [], {}
        queues, workloads = client.list("LocalQueue"), client.list("Workload")
    except InputError:
        return [], {}
    behind: dict[str, Object] = {}
    for name in {str(each["spec"].get("clusterQueue") or "") for each in queues} - {""}:
        try:
            behind |= {name: each} if (each := client.find("ClusterQueue", name)) else {}
        except InputError:  # those of all the cluster are for its administrators
            break
    owners = {
        str(each["metadata"]["name"]): {
            str(owner["name"]) for owner in each["metadata"].get("ownerReferences") or ()
        }
        for each in workloads
    }
    return describe_queues(queues, behind, workloads), owners


def _owners_of(pods: list[Object]) -> set[str]:
    """Return the Jobs that have made pods."""
    return {str(owner["name"]) for each in pods for owner in each["metadata"].get("ownerReferences") or ()}


PAGE = KubernetesPage()
