"""Brings a cluster up on Kubernetes, scales it and takes it down, and asks how it is."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from insitu.base.errors import ClusterError, InputError
from insitu.base.wording import format_count
from insitu.extensions.kubernetes.client import Client
from insitu.extensions.kubernetes.job_pods import JOB
from insitu.extensions.kubernetes.job_starter import list_objects
from insitu.extensions.kubernetes.objects import (
    CLUSTER_SELECTOR,
    GPU_RESOURCE,
    HEAD,
    MANAGED_BY,
    STORE,
    TOKEN_SECRET,
    Object,
    make_objects,
    make_secret,
)
from insitu.extensions.kubernetes.options import ClusterOptions, parse_quantity
from insitu.extensions.kubernetes.waits import PodState, Snapshot, all_ready, describe_pods, read_time

Report = Callable[[Sequence[PodState]], None]
Notify = Callable[[str], None]

_LOOK_SECONDS = 1.0
_TOKEN_BYTES = 32
_KINDS = (
    *("StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy", "RoleBinding", "Role"),
    *("ServiceAccount", "Secret", "ConfigMap"),
)
"""What `down` deletes, in this order. Head, pods of jobs and stores go before, one after the other."""
_BOOKKEEPING = (
    "status",
    *(f"metadata.{each}" for each in ("managedFields", "resourceVersion", "generation")),
)
"""Values that change with each application."""
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


def bring_up(client: Client, options: ClusterOptions, notify: Notify, *, waits: bool) -> None:
    """Apply the objects of a cluster, all or, if one of them would be refused, none.

    `waits`: nodes with GPUs must be there now. Raises InputError for what can't be applied as asked,
    ClusterError for what may be possible later.
    """
    _check_namespace(client, options, notify)
    _check(client, options, notify, waits=waits)
    objects = [each for each in make_objects(options) if each["kind"] != "Namespace"]
    for each in objects:
        client.apply(each, dry_run=True)
    if client.find("Secret", TOKEN_SECRET) is None:
        client.create(make_secret(client.namespace, secrets.token_hex(_TOKEN_BYTES)))
    for each in objects:
        client.apply(each)


def preview(client: Client, options: ClusterOptions, notify: Notify, *, waits: bool) -> list[str]:
    """Return what `bring_up` would do, a line for each object. Changes nothing; raises what that raises."""
    is_new = not _check_namespace(client, options, notify, dry_run=True)
    objects = [each for each in make_objects(options) if each["kind"] != "Namespace"]
    if is_new:  # so the server can't check what is in it yet
        return [f"Namespace {client.namespace}: new", *(f"{_title(each)}: new" for each in objects)]
    _check(client, options, notify, waits=waits)
    lines = []
    for each in objects:
        found = client.find(each["kind"], each["metadata"]["name"])
        wanted = client.apply(each, dry_run=True)
        changed = list_changes(found, wanted) if found is not None else []
        lines.append(f"{_title(each)}: {'new' if found is None else ', '.join(changed) or 'stays as it is'}")
    return lines


def _title(each: Object) -> str:
    return f"{each['kind']} {each['metadata']['name']}"


def list_changes(found: Any, wanted: Any, path: str = "") -> list[str]:
    """Return the values of an object that change, as in `spec.replicas: 1 -> 3`. Pure."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        keys = [key for key in sorted({*found, *wanted}) if f"{path}{key}" not in _BOOKKEEPING]
        pairs = [(f"{path}{key}", found.get(key), wanted.get(key)) for key in keys]
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = [(f"{path[:-1]}[{n}]", *both) for n, both in enumerate(zip(found, wanted, strict=True))]
    else:
        return [] if found == wanted else [f"{path[:-1]}: {_show(found)} -> {_show(wanted)}"]
    return [line for at, old, new in pairs for line in list_changes(old, new, f"{at}.")]


def _show(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)[:100]


def wait_until(
    client: Client, is_done: Callable[[Sequence[PodState]], bool], seconds: float, report: Report
) -> None:
    """Wait until the cluster is as wanted; `report` gets how it is. Raises ClusterError after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        states = read_states(client)
        report(states)
        if is_done(states):
            return
        if time.monotonic() > deadline:
            waiting = "; ".join(f"{each.name} waits for {each.waits}" for each in states if each.waits)
            raise ClusterError(
                f"The cluster must be ready within {seconds:g} s. Received: {waiting}. All is applied, and "
                f"`insitu k8s status` shows how it continues"
            )
        time.sleep(_LOOK_SECONDS)


def read_states(client: Client) -> list[PodState]:
    """Return how the pods of the cluster are. Raises InputError if the namespace has no cluster."""
    return describe_pods(read_snapshot(client))


def read_snapshot(client: Client) -> Snapshot:
    """Return what Kubernetes has of the cluster. Raises InputError if the namespace has none."""
    sets = _list_own_sets(client)
    if not sets:
        raise InputError(
            f"The namespace must have a cluster. Received: {client.namespace} without one. `insitu k8s up` "
            f"makes one; --namespace names another namespace"
        )
    pods = {each["metadata"]["name"]: each for each in client.list("Pod", CLUSTER_SELECTOR)}
    claims = {
        each["metadata"]["name"]: each for each in client.list("PersistentVolumeClaim", CLUSTER_SELECTOR)
    }
    try:
        volumes = {each["metadata"]["name"]: each for each in client.list("PersistentVolume")}
    except InputError:  # those of all the cluster are for its administrators
        volumes = None
    return Snapshot(sets, pods, claims, sorted(client.list("Event"), key=read_time), volumes)


def _list_own_sets(client: Client) -> dict[str, Object]:
    found = client.list("StatefulSet", CLUSTER_SELECTOR)
    return {each["metadata"]["name"]: each for each in found if each["metadata"]["name"] in (HEAD, STORE)}


# Checks before anything is applied


def _check(client: Client, options: ClusterOptions, notify: Notify, *, waits: bool) -> None:
    _check_own(client, options)
    _check_disks(client, options, notify)
    _check_queue(client, options.queue)
    _check_monitor(client, options)
    if options.gpus:
        _check_gpus(client, options.gpus, notify, waits=waits)


def _check_namespace(
    client: Client, options: ClusterOptions, notify: Notify, *, dry_run: bool = False
) -> bool:
    """Make the namespace if that is asked for. Returns False if it would be made. Raises InputError if it
    isn't there, or goes."""
    try:
        found = client.find("Namespace", client.namespace)
    except InputError:
        return True  # the user may not read it; applying says what is wrong with it
    if found is None and options.create_namespace:
        if dry_run:
            return False
        namespace, *_ = make_objects(options)
        client.create(namespace)
        notify(f"Namespace {client.namespace} made")
    elif found is None:
        raise InputError(
            f"The namespace must be there. Received: {client.namespace}, which isn't. Give "
            "--create-namespace, "
            f"or run `kubectl create namespace {client.namespace}`"
        )
    elif (found.get("status") or {}).get("phase") == "Terminating":
        raise InputError(
            f"A cluster needs a namespace that stays. Received: {client.namespace}, which is being deleted. "
            f"Wait until `kubectl get namespace {client.namespace}` finds it no more, or choose another by "
            f"--namespace"
        )
    return True


def _check_own(client: Client, options: ClusterOptions) -> None:
    """Raise InputError if names are taken by others, or stores would go without being drained."""
    for kind, name in (("StatefulSet", HEAD), ("StatefulSet", STORE), ("Service", HEAD), ("Service", STORE)):
        found = client.find(kind, name)
        manager = ((found or {}).get("metadata", {}).get("labels") or {}).get(MANAGED_BY)
        if found is not None and manager != "insitu":
            raise InputError(
                f"A namespace has one cluster, whose objects `insitu k8s up` has made. Received: {kind} "
                f"{name} in "
                f"{client.namespace}, managed by {manager or 'something else'}. Choose another namespace by "
                f"--namespace, or change it with what has made it"
            )
        replicas = ((found or {}).get("spec") or {}).get("replicas", 0) if name == STORE else 0
        if kind == "StatefulSet" and replicas > options.nodes:
            raise InputError(
                f"Stores are drained before they go. Received: --nodes {options.nodes}, and {replicas} that "
                "are "
                f"there. Run `insitu k8s scale --nodes {options.nodes}`, or give --nodes {replicas}"
            )


def _check_disks(client: Client, options: ClusterOptions, notify: Notify) -> None:
    """Raise InputError for a storage class that isn't there, and for disks that tasks couldn't share."""
    for claim in client.list("PersistentVolumeClaim", CLUSTER_SELECTOR):
        if "ReadWriteOncePod" in claim["spec"].get("accessModes", ()):
            name = claim["metadata"]["name"]
            raise InputError(
                "A store's disk must be ReadWriteOnce: the tasks of a job mount it too, in pods of their "
                "own on "
                f"the same node. Received: {name} with ReadWriteOncePod, which one pod alone may mount. Copy "
                "what "
                f"is on it, delete it, and let `insitu k8s up` make another"
            )
    try:
        classes = client.list("StorageClass")
    except InputError:
        return notify("Your user may not list storage classes, so that they exist isn't checked")
    names = [each["metadata"]["name"] for each in classes]
    defaults = [c for c in classes if (c["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"]
    if options.storage_class and options.storage_class not in names:
        raise InputError(
            f"--storage-class names one that is there: {', '.join(names) or 'none is'}. Received: "
            f"{options.storage_class}. Choose one, or have an administrator install what makes disks, such "
            "as "
            f"TopoLVM or local-path for disks of the nodes"
        )
    if not options.storage_class and not defaults:
        advice = "Name it by --storage-class" if names else "Have an administrator install what makes disks"
        raise InputError(
            f"Disks need a storage class. Received: no --storage-class, and none is the default; there are: "
            f"{', '.join(names) or 'none'}. {advice}"
        )


def _check_queue(client: Client, queue: str) -> None:
    if not queue:
        return
    if not client.serves("kueue.x-k8s.io/v1beta1"):
        raise InputError(
            f"--queue names a queue of Kueue, which must be installed. Received: --queue {queue}, and an API "
            "server without kueue.x-k8s.io/v1beta1. Have an administrator install Kueue, or leave --queue "
            "out"
        )
    if client.find("LocalQueue", queue) is None:
        names = [each["metadata"]["name"] for each in client.list("LocalQueue")]
        raise InputError(
            f"--queue names a LocalQueue of the namespace: {', '.join(names) or 'it has none'}. Received: "
            f"{queue}. Choose one, or leave --queue out"
        )


def _check_monitor(client: Client, options: ClusterOptions) -> None:
    if options.monitor and not client.serves("monitoring.coreos.com/v1"):
        raise InputError(
            "--monitor makes a ServiceMonitor for the operator of Prometheus. Received: an API server "
            "without "
            "monitoring.coreos.com/v1. Have an administrator install the operator, or leave --monitor out"
        )


def _check_gpus(client: Client, gpus: int, notify: Notify, *, waits: bool) -> None:
    try:
        nodes = client.list("Node")
    except InputError:
        return notify("Your user may not list nodes, so that some have GPUs isn't checked")
    most = max((_count_gpus(each) for each in nodes), default=0)
    if most < gpus:
        text = (
            f"--gpus is at most what a node has as {GPU_RESOURCE}. Received: {gpus}, and the most that one "
            "of "
            f"{format_count(len(nodes), 'node')} has is {most}."
        )
        if waits:
            raise InputError(
                f"{text} Ask for fewer, or install the device plug-in of the vendor; give --no-wait if an "
                f"autoscaler adds such nodes"
            )
        notify(f"{text} Stores wait until a node with more is there.")


def _count_gpus(node: Object) -> int:
    try:
        return int(
            parse_quantity(str(((node.get("status") or {}).get("allocatable") or {}).get(GPU_RESOURCE, 0)))
        )
    except ValueError:
        return 0


# Changes of a cluster that is there


def scale(client: Client, nodes: int, seconds: float, report: Report, notify: Notify) -> None:
    """Have the cluster have so many stores. Those that go are drained first. Raises InputError, "
    "ClusterError."""
    found = _list_own_sets(client).get(STORE)
    if found is None:
        read_states(client)
        raise InputError(f"A cluster has stores. Received: none in {client.namespace}. Run `insitu k8s up`")
    now = int(found["spec"].get("replicas", 1))
    leaving = [f"{STORE}-{number}" for number in range(nodes, now)]
    deadline = time.monotonic() + seconds
    for pod in _list_needed(client, leaving):
        _ask_head(client, ["drain", pod, "--deadline", f"{max(1, round(seconds))}s"])
    while left := _list_needed(client, leaving):
        notify(f"{', '.join(left)}: what others need moves to them")
        if time.monotonic() > deadline:
            raise ClusterError(
                f"Stores must be empty within {seconds:g} s before they go. Received: {', '.join(left)} "
                "isn't. "
                f"They are still drained: run the same command again, or `kubectl exec {HEAD}-0 -c head -- "
                "insitu drain "
                f"{left[0]} --cancel` keeps one"
            )
        time.sleep(_LOOK_SECONDS)
    client.set_replicas(STORE, nodes)
    wait_until(
        client,
        lambda states: all_ready(states) and not {each.name for each in states} & {*leaving},
        max(1.0, deadline - time.monotonic()),
        report,
    )


def _list_needed(client: Client, pods: Sequence[str]) -> list[str]:
    """Return the stores on which something is that others need. What has never joined has nothing."""
    if not pods:
        return []
    listed: Any = json.loads(_ask_head(client, ["nodes", "--json"]))
    states = {each["node"]: each["state"] for each in listed}
    return [pod for pod in pods if states.get(pod) not in (None, "drained", "left")]


def _ask_head(client: Client, arguments: Sequence[str]) -> str:
    """Run a command of insitu in the head's pod. Returns its output. Raises ClusterError."""
    code, output, errors = client.run(f"{HEAD}-0", "head", ["insitu", *arguments])
    if code:
        raise ClusterError(
            f"The head must run `insitu {' '.join(arguments)}`. Received: exit code {code}: "
            f"{' '.join(errors.split()).removeprefix('error: ')}"
        )
    return output


def list_claims(client: Client) -> dict[str, str]:
    """Return the claims of the cluster's disks, with their sizes."""
    return {
        each["metadata"]["name"]: str(each["spec"]["resources"]["requests"]["storage"])
        for each in client.list("PersistentVolumeClaim", CLUSTER_SELECTOR)
    }


def take_down(
    client: Client, seconds: float, report: Report, *, with_claims: Mapping[str, str]
) -> dict[str, list[str]]:
    """Delete a cluster, but for its disks; `with_claims` are those that are deleted, too.

    The head goes first: without it stores don't move their data to each other, and jobs stay as they are,
    for the next head to resume. Returns the names by kind.
    """
    deleted: dict[str, list[str]] = {}

    def delete(kind: str, names: Iterable[str]) -> None:
        if found := [name for name in names if client.delete(kind, name)]:
            deleted.setdefault(kind, []).extend(found)

    for pods in (HEAD, JOB, STORE):
        if pods == JOB:
            for each in chain.from_iterable(list_objects(client).values()):
                delete(each["kind"], [each["metadata"]["name"]])
        elif _is_own(client.find("StatefulSet", pods)):
            delete("StatefulSet", [pods])
        _wait_for_end(client, pods, seconds, report)
    kinds = [*_KINDS, "ServiceMonitor"] if client.serves("monitoring.coreos.com/v1") else [*_KINDS]
    for kind in kinds:
        delete(kind, [e["metadata"]["name"] for e in client.list(kind, CLUSTER_SELECTOR) if _is_own(e)])
    delete("PersistentVolumeClaim", with_claims)
    return deleted


def _is_own(each: Object | None) -> bool:
    return each is not None and (each["metadata"].get("labels") or {}).get(MANAGED_BY) == "insitu"


def _wait_for_end(client: Client, name: str, seconds: float, report: Report) -> None:
    deadline = time.monotonic() + seconds
    while pods := [
        each
        for each in client.list("Pod", CLUSTER_SELECTOR)
        if each["metadata"]["name"].startswith(f"{name}-")
    ]:
        found = Snapshot({}, {each["metadata"]["name"]: each for each in pods}, {})
        report(describe_pods(found))
        if time.monotonic() > deadline:
            raise ClusterError(
                f"Pods must end within {seconds:g} s. Received: {', '.join(found.pods)} are there. `kubectl "
                f"describe pods` says what they wait for; run `insitu k8s down` again"
            )
        time.sleep(_LOOK_SECONDS)
