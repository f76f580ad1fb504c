"""What a pod waits for, in words, from what Kubernetes says about it."""

from __future__ import annotations

from typing import Any

import pytest

from insitu.extensions.kubernetes.waits import Snapshot, all_ready, describe_pods, find_disk_node

Object = dict[str, Any]
LOST_DISK = (
    "0/2 nodes are available: 1 node(s) had untolerated taint, 1 node(s) didn't match volume node affinity."
)


def make_pod(name: str, node: str = "n1", status: Object | None = None, **metadata: Any) -> Object:
    return {
        "metadata": {"name": name, **metadata},
        "spec": {"nodeName": node} if node else {},
        "status": status or {},
    }


def make_event(kind: str, name: str, reason: str, message: str) -> Object:
    return {"involvedObject": {"kind": kind, "name": name}, "reason": reason, "message": message}


def waits_of(pod: Object | None, name: str = "store-0", **more: Any) -> str:
    owner = name.partition("-")[0]
    found = Snapshot(
        {owner: {"spec": {"replicas": 1}}}, {name: pod} if pod else {}, more.pop("claims", {}), **more
    )
    (state,) = describe_pods(found)
    assert not all_ready([state])
    return state.waits


def waiting(reason: str, message: str = "", name: str = "store", **more: Any) -> Object:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"name": name, "image": "insitu:1", "state": state, **more}]}


def unscheduled(message: str, reason: str = "Unschedulable") -> Object:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}]}


def claim(node: str = "", phase: str = "Bound", volume: str = "v") -> Object:
    annotations = {"volume.kubernetes.io/selected-node": node} if node else {}
    return {
        "metadata": {"name": "data-store-0", "annotations": annotations},
        "spec": {"volumeName": volume},
        "status": {"phase": phase},
    }


def volume_on(node: str) -> Object:
    rule = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    terms = [{"matchExpressions": [rule]}]
    return {"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}}


def test_a_ready_pod_waits_for_nothing() -> None:
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    sets = {"head": {"spec": {"replicas": 1}}, "store": {"spec": {"replicas": 2}}}
    pods = {name: make_pod(name, status=ready) for name in ("store-1", "head-0", "store-0")}
    states = describe_pods(Snapshot(sets, pods, {"data-store-1": claim("n7")}))
    assert [each.name for each in states] == ["head-0", "store-0", "store-1"]
    assert all_ready(states) and states[2].disk == "n7"


def test_pods_that_are_too_many_come_last() -> None:
    found = Snapshot(
        {"store": {"spec": {"replicas": 1}}}, {f"store-{n}": make_pod("x") for n in (0, 10, 2)}, {}
    )
    assert [each.name for each in describe_pods(found)] == ["store-0", "store-2", "store-10"]


@pytest.mark.parametrize("volumes", [{"v": volume_on("n2")}, None], ids=["administrator", "user"])
def test_a_store_whose_disk_is_elsewhere_waits_for_that_node(volumes: Any) -> None:
    """Who may not read volumes knows it by the claim."""
    own = claim("n2")
    waits = waits_of(
        make_pod("store-0", "", unscheduled(LOST_DISK)), claims={"data-store-0": own}, volumes=volumes
    )
    assert waits.startswith("node n2's disk: 0/2 nodes are available: 1 node(s) had untolerated taint")


def test_a_disk_of_the_network_is_bound_to_no_node() -> None:
    assert find_disk_node(claim("n2"), {"v": {"spec": {}}}) == ""
    assert find_disk_node(claim("n2"), {}) == "n2" and find_disk_node(None, {}) == ""


@pytest.mark.parametrize(
    ("pod", "more", "said"),
    [
        (None, {}, "its StatefulSet to make it"),
        (
            None,
            {
                "events": [
                    make_event("StatefulSet", "store", "FailedCreate", "create Pod store-1 failed: other"),
                    make_event(
                        "StatefulSet", "store", "FailedCreate", "create Pod store-0: exceeded quota: q"
                    ),
                    make_event("StatefulSet", "head", "FailedCreate", "create Pod head-0 failed"),
                ]
            },
            "the API server to let it be made: create Pod store-0: exceeded quota: q",
        ),
        (make_pod("store-0", ""), {}, "the scheduler"),
        (
            make_pod("store-0", "", unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")),
            {},
            "a node: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu",
        ),
        (
            make_pod("store-0", "", unscheduled("", "SchedulingGated")),
            {},
            "its queue to admit it: see `kubectl get workloads`",
        ),
        (
            make_pod("store-0", "", unscheduled("pod has unbound immediate PersistentVolumeClaims")),
            {
                "claims": {"data-store-0": claim(phase="Pending", volume="")},
                "events": [
                    make_event("PersistentVolumeClaim", "data-store-0", "ProvisioningFailed", "no space left")
                ],
            },
            "a disk: no space left",
        ),
        (
            make_pod("store-0", status=waiting("ImagePullBackOff", "not found")),
            {},
            "image insitu:1: ImagePullBackOff: not found. Push it where the nodes reach it, and name it by "
            "--image",
        ),
        (
            make_pod(
                "store-0",
                status=waiting(
                    "CrashLoopBackOff",
                    lastState={"terminated": {"exitCode": 2, "message": "a line\nerror: no token\n"}},
                ),
            ),
            {},
            "container store, which ended with 2: error: no token. `kubectl logs store-0 -c store "
            "--previous`",
        ),
        (
            make_pod("store-0", status=waiting("CreateContainerConfigError", "secret not found")),
            {},
            "container store: CreateContainerConfigError: secret not found",
        ),
        (
            make_pod("store-0", status=waiting("ContainerCreating")),
            {"events": [make_event("Pod", "store-0", "FailedMount", 'secret "insitu-token" not found')]},
            'its volumes, of which the secret is insitu-token: secret "insitu-token" not found',
        ),
        (make_pod("store-0", status=waiting("ContainerCreating")), {}, "its node to start it"),
        (
            make_pod("store-0", status={"containerStatuses": [{"name": "store", "state": {"running": {}}}]}),
            {},
            "its agent to join the head",
        ),
        (
            make_pod("store-0", deletionTimestamp="t", deletionGracePeriodSeconds=120),
            {},
            "its end, within 120 s: what others need of it moves to them",
        ),
        (
            make_pod(
                "store-0",
                deletionTimestamp="t",
                status={"conditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ),
            {},
            "node n1: if that is lost for good, taint it with node.kubernetes.io/out-of-service",
        ),
    ],
)
def test_each_wait_has_words(pod: Object | None, more: Object, said: str) -> None:
    assert waits_of(pod, **more).startswith(said)
