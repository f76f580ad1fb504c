"""Says in words what each pod of a cluster waits for, from the objects that Kubernetes has. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from insitu.extensions.kubernetes.objects import HEAD, STORE, TOKEN_SECRET, Object

_SELECTED_NODE = "volume.kubernetes.io/selected-node"
_HOSTNAME = "kubernetes.io/hostname"
_LONGEST = 300
_PULLS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What Kubernetes has of a cluster at a moment."""

    #: The StatefulSets `head` and `store`, by name.
    sets: Mapping[str, Object]
    #: Pods, and claims on disks, by name.
    pods: Mapping[str, Object]
    claims: Mapping[str, Object]
    #: Events of the namespace, oldest first.
    events: Sequence[Object] = ()
    #: Volumes, by name; empty if the user may not read them.
    volumes: Mapping[str, Object] | None = None


@dataclass(frozen=True, slots=True)
class PodState:
    """How a pod of the cluster is."""

    #: The pod's name, which is that of the node of insitu, too.
    name: str
    #: `ready`, `starting`, `pending`, `ending` or `missing`.
    state: str
    #: The node of Kubernetes on which it runs; empty if it isn't placed.
    node: str
    #: The node that has its disk; empty if it isn't known.
    disk: str
    #: What it waits for; empty if it's ready.
    waits: str


def describe_pods(found: Snapshot) -> list[PodState]:
    """Return how the pods of a cluster are, the head first, those that are too many last."""
    states = []
    for name in (HEAD, STORE):
        wanted = int(found.sets[name]["spec"].get("replicas", 1)) if name in found.sets else 0
        names = [f"{name}-{number}" for number in range(wanted)]
        numbers = (p.removeprefix(f"{name}-") for p in found.pods if p.startswith(f"{name}-"))
        further = sorted(int(n) for n in numbers if n.isdecimal() and int(n) >= wanted)
        states += [_describe(pod, name, found) for pod in (*names, *(f"{name}-{n}" for n in further))]
    return states


def all_ready(states: Iterable[PodState]) -> bool:
    """Return whether nothing is waited for."""
    return all(each.state == "ready" for each in states)


def find_disk_node(claim: Object | None, volumes: Mapping[str, Object] | None) -> str:
    """Return the node of Kubernetes to which the disk of a claim is bound; "" if it's none, or not known."""
    if claim is None:
        return ""
    volume = (volumes or {}).get(str(claim["spec"].get("volumeName") or ""))
    affinity = ((volume or {}).get("spec", {}).get("nodeAffinity") or {}).get("required") or {}
    for term in affinity.get("nodeSelectorTerms") or ():
        for rule in term.get("matchExpressions") or ():
            if "hostname" in rule.get("key", "") and len(rule.get("values") or ()) == 1:
                return str(rule["values"][0])
    if volume is not None and not affinity:
        return ""  # a disk of the network, which goes to any node
    return str((claim["metadata"].get("annotations") or {}).get(_SELECTED_NODE) or "")


def is_waiting(seen: Object) -> bool:
    """Return whether a pod of a job hasn't begun to run."""
    return (seen.get("status") or {}).get("phase") not in ("Running", "Succeeded", "Failed")


def explain_pod(seen: Object, found: Snapshot) -> str:
    """Return what a waiting pod of a job waits for, in words; "": it is about to run. `found` has its claim
    and the events."""
    name = str(seen["metadata"]["name"])
    mounted = [each.get("persistentVolumeClaim") or {} for each in seen["spec"].get("volumes") or ()]
    names = [str(each["claimName"]) for each in mounted if each]
    claim = next((found.claims[each] for each in names if each in found.claims), None)
    if not seen["spec"].get("nodeName"):
        return _explain_place(seen, find_disk_node(claim, found.volumes), claim, found.events)
    return _explain_start(name, "", seen, found.events)


def _describe(pod: str, owner: str, found: Snapshot) -> PodState:
    seen, claim = found.pods.get(pod), found.claims.get(f"data-{pod}")
    disk = find_disk_node(claim, found.volumes)
    if seen is None:
        why = _last_message(found.events, "StatefulSet", owner, ("FailedCreate",), naming=pod)
        wait = f"the API server to let it be made: {why}" if why else "its StatefulSet to make it"
        return PodState(pod, "missing", "", disk, wait)
    node = str(seen["spec"].get("nodeName") or "")
    if seen["metadata"].get("deletionTimestamp"):
        return PodState(pod, "ending", node, disk, _explain_end(pod, node, seen))
    if find_condition(seen, "Ready").get("status") == "True":
        return PodState(pod, "ready", node, disk, "")
    if not node:
        return PodState(pod, "pending", "", disk, _explain_place(seen, disk, claim, found.events))
    return PodState(pod, "starting", node, disk, _explain_start(pod, owner, seen, found.events))


def list_conditions(seen: Object) -> Sequence[Object]:
    """Return the conditions of an object; those of one that has just been made are missing."""
    return (seen.get("status") or {}).get("conditions") or ()


def find_condition(seen: Object, kind: str) -> Object:
    """Return the condition of an object of this type; {} if it has none."""
    return next((each for each in list_conditions(seen) if each["type"] == kind), {})


def read_time(event: Object) -> str:
    """Return when an event happened last, as Kubernetes writes it."""
    return str(
        event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp")
    )


def _explain_end(pod: str, node: str, seen: Object) -> str:
    seconds = seen["metadata"].get("deletionGracePeriodSeconds", 0)
    lost = any(
        each.get("reason") == "NodeLost" or each["type"] == "DisruptionTarget"
        for each in list_conditions(seen)
    )
    if lost and node:
        return (
            f"node {node}: if that is lost for good, taint it with node.kubernetes.io/out-of-service, or "
            f"delete it"
        )
    moving = ": what others need of it moves to them" if pod.startswith(STORE) else ""
    return f"its end, within {seconds} s{moving}"


def _explain_place(seen: Object, disk: str, claim: Object | None, events: Sequence[Object]) -> str:
    scheduled = find_condition(seen, "PodScheduled")
    said = _shorten(scheduled.get("message", ""))
    if scheduled.get("reason") == "SchedulingGated":
        return "its queue to admit it: see `kubectl get workloads`"
    if claim is not None and (claim.get("status") or {}).get("phase") == "Pending":
        reasons = ("ProvisioningFailed", "FailedBinding")
        why = _last_message(events, "PersistentVolumeClaim", str(claim["metadata"]["name"]), reasons)
        if why:
            return f"a disk: {why}"
    if disk and ("volume node affinity" in said or "node affinity" in said or "didn't match" in said):
        return f"node {disk}'s disk: {said}"
    return f"a node: {said}" if said else "the scheduler"


def _explain_start(pod: str, owner: str, seen: Object, events: Sequence[Object]) -> str:
    status = seen.get("status") or {}
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (each.get("state") or {}).get("waiting") or {}
        reason, said = waiting.get("reason", ""), _shorten(waiting.get("message", ""))
        if reason in _PULLS:
            return (
                f"image {each.get('image')}: {reason}: {said}. Push it where the nodes reach it, and name it "
                f"by --image"
            )
        ended = (each.get("state") or {}).get("terminated") or (each.get("lastState") or {}).get("terminated")
        if ended and not each.get("ready") and ended.get("exitCode"):
            lines = str(ended.get("message") or "").strip().splitlines()
            return (
                f"container {each['name']}, which ended with {ended['exitCode']}: "
                f"{_shorten(lines[-1] if lines else ended.get('reason', ''))}. `kubectl logs {pod} -c "
                f"{each['name']} --previous` says more"
            )
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            return f"container {each['name']}: {reason}: {said}"
    why = _last_message(events, "Pod", pod, ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"))
    running = any("running" in (each.get("state") or {}) for each in status.get("containerStatuses") or ())
    if why and not running:
        return f"its volumes, of which the secret is {TOKEN_SECRET}: {why}"
    if not running:
        return "its node to start it"
    return {STORE: "its agent to join the head", HEAD: "its head and its page to listen"}.get(owner, "")


def _last_message(
    events: Sequence[Object], kind: str, name: str, reasons: Sequence[str], *, naming: str = ""
) -> str:
    """Return the newest message about an object, of these reasons; "" if there is none."""
    said = [
        str(each.get("message") or "")
        for each in events
        if (each.get("involvedObject") or {}).get("kind") == kind
        and (each.get("involvedObject") or {}).get("name") == name
        and each.get("reason") in reasons
    ]
    fitting = [text for text in said if not naming or naming in text] or said
    return _shorten(fitting[-1]) if fitting else ""


def _shorten(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
