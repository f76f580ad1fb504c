"""A cluster is brought up, scaled and taken down, or refused before anything is changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from k8s_fake import FakeApi, status_of

from insitu.base.errors import ClusterError, InputError
from insitu.extensions.kubernetes.cluster import (
    bring_up,
    list_claims,
    read_states,
    scale,
    take_down,
    wait_until,
)
from insitu.extensions.kubernetes.objects import make_objects
from insitu.extensions.kubernetes.options import ClusterOptions
from insitu.extensions.kubernetes.waits import all_ready

OWN = {"app.kubernetes.io/name": "insitu", "app.kubernetes.io/managed-by": "insitu"}


def ignore(*_: object) -> None:
    pass


def up(api: FakeApi, *, waits: bool = True, **options: Any) -> list[str]:
    """Bring a cluster up. Returns the notices."""
    said: list[str] = []
    bring_up(api.client(), ClusterOptions(namespace="team", **options), said.append, waits=waits)
    return said


def test_all_objects_are_applied_once_the_server_would_take_each(api: FakeApi) -> None:
    assert up(api, nodes=3) == []
    wanted = {(each["kind"], each["metadata"]["name"]) for each in make_objects(ClusterOptions(nodes=3))}
    assert {(k, n) for k in {kind for kind, _ in wanted} for n in api.names(k)} == wanted | {
        ("Secret", n) for n in ()
    }
    assert len(api.get("Secret", "insitu-token")["stringData"]["cluster-token"]) == 64


def test_the_token_stays_when_a_cluster_is_changed(api: FakeApi) -> None:
    up(api, nodes=2)
    before = api.get("Secret", "insitu-token")["stringData"]
    up(api, nodes=3, image="insitu:2")
    assert api.get("Secret", "insitu-token")["stringData"] == before
    assert api.get("StatefulSet", "store")["spec"]["replicas"] == 3


def test_nothing_is_applied_if_one_object_would_be_refused(api: FakeApi) -> None:
    api.answers[r"PATCH .*/statefulsets/store\?.*dryRun=All"] = status_of(
        403, "Forbidden", "exceeded quota: small"
    )
    with pytest.raises(ClusterError, match=r"no room to patch StatefulSet store: exceeded quota: small"):
        up(api, nodes=3)
    assert api.changes == []


def test_a_namespace_is_made_if_that_is_asked_for(api: FakeApi) -> None:
    del api.objects["/api/v1/namespaces/team"]
    with pytest.raises(InputError, match=r"team, which isn't\. Give --create-namespace"):
        up(api)
    assert up(api, create_namespace=True) == ["Namespace team made"]
    labels = api.get("Namespace", "team")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def refuse_terminating(api: FakeApi) -> None:
    api.put("Namespace", "team", status={"phase": "Terminating"})


def refuse_strangers_head(api: FakeApi) -> None:
    api.put("StatefulSet", "head", spec={"replicas": 1})


def refuse_a_release_of_helm(api: FakeApi) -> None:
    made = api.put("StatefulSet", "head", spec={"replicas": 1})
    made["metadata"]["labels"] = {**OWN, "app.kubernetes.io/managed-by": "Helm"}


def refuse_fewer_stores(api: FakeApi) -> None:
    api.put("StatefulSet", "store", spec={"replicas": 3})["metadata"]["labels"] = OWN


def refuse_disks_of_one_pod(api: FakeApi) -> None:
    made = api.put("PersistentVolumeClaim", "data-store-0", spec={"accessModes": ["ReadWriteOncePod"]})
    made["metadata"]["labels"] = OWN


def refuse_no_default_class(api: FakeApi) -> None:
    api.put("StorageClass", "fast")


def refuse_no_class_at_all(api: FakeApi) -> None:
    del api.objects["/apis/storage.k8s.io/v1/storageclasses/fast"]


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (
            refuse_terminating,
            "A cluster needs a namespace that stays. Received: team, which is being deleted",
        ),
        (refuse_strangers_head, "Received: StatefulSet head in team, managed by something else"),
        (refuse_a_release_of_helm, "managed by Helm. Choose another namespace by --namespace"),
        (refuse_fewer_stores, "--nodes 1, and 3 that are there. Run `insitu k8s scale --nodes 1`"),
        (
            refuse_disks_of_one_pod,
            "Received: data-store-0 with ReadWriteOncePod, which one pod alone",
        ),
        (refuse_no_default_class, "none is the default; there are: fast. Name it by --storage-class"),
        (refuse_no_class_at_all, "there are: none. Have an administrator install what makes disks"),
    ],
)
def test_a_cluster_that_can_not_be_is_refused_before_a_change(api: FakeApi, prepare: Any, said: str) -> None:
    prepare(api)
    with pytest.raises(InputError) as error:
        up(api)
    assert said in str(error.value) and api.changes == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"storage_class": "slow"}, "--storage-class names one that is there: fast. Received: slow"),
        ({"queue": "q"}, "an API server without kueue.x-k8s.io/v1beta1. Have an administrator install Kueue"),
        ({"monitor": True}, "without monitoring.coreos.com/v1"),
        ({"gpus": 2}, "Received: 2, and the most that one of 1 node has is 0. Ask for fewer"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(api: FakeApi, options: Any, said: str) -> None:
    with pytest.raises(InputError) as error:
        up(api, **options)
    assert said in str(error.value) and api.changes == []


def test_a_queue_must_be_in_the_namespace(api: FakeApi) -> None:
    api.groups.add("kueue.x-k8s.io/v1beta1")
    api.put("LocalQueue", "other")
    with pytest.raises(InputError, match=r"a LocalQueue of the namespace: other\. Received: q"):
        up(api, queue="q")
    api.put("LocalQueue", "q")
    up(api, queue="q")


def test_nodes_with_gpus_may_come_later_if_nobody_waits(api: FakeApi) -> None:
    (said,) = up(api, gpus=2, waits=False)
    assert said.endswith("Stores wait until a node with more is there.")
    api.put("Node", "n2", status={"allocatable": {"nvidia.com/gpu": "2"}})
    assert up(api, gpus=2) == []


def test_what_a_user_may_not_list_is_said_to_be_unchecked(api: FakeApi) -> None:
    for kind in ("nodes", "storageclasses", "namespaces/team"):
        api.answers[rf"GET .*/{kind}$"] = status_of(403, "Forbidden", f"{kind} is forbidden")
    assert [text.partition(",")[0] for text in up(api, gpus=1, storage_class="x")] == [
        "Your user may not list storage classes",
        "Your user may not list nodes",
    ]


def test_waiting_ends_when_all_are_ready_or_the_time_is_up(api: FakeApi) -> None:
    up(api, nodes=1)
    seen: list[list[str]] = []

    def report(states: Sequence[Any]) -> None:
        seen.append([each.state for each in states])
        api.make_pods(ready=len(seen) > 1)

    wait_until(api.client(), all_ready, 60.0, report)
    assert seen == [["missing", "missing"], ["starting", "starting"], ["ready", "ready"]]
    api.make_pods(ready=False)
    with pytest.raises(ClusterError, match=r"within 0 s\. Received: head-0 waits for .*; store-0 waits for"):
        wait_until(api.client(), all_ready, 0.0, ignore)


def test_a_namespace_without_a_cluster_says_how_to_make_one(api: FakeApi) -> None:
    with pytest.raises(InputError, match=r"Received: team without one\. `insitu k8s up`"):
        read_states(api.client())


# Scaling


def nodes_as_json(**states: str) -> tuple[int, str, str]:
    return 0, json.dumps([{"node": name, "state": state} for name, state in states.items()]), ""


def test_more_stores_are_added(api: FakeApi) -> None:
    up(api, nodes=1)
    api.after = lambda method, path: api.make_pods()
    scale(api.client(), 3, 60.0, ignore, ignore)
    assert api.get("StatefulSet", "store")["spec"]["replicas"] == 3 and api.commands == []


def test_stores_are_drained_before_they_go(api: FakeApi) -> None:
    up(api, nodes=3)
    api.make_pods()
    api.after = lambda method, path: api.make_pods()
    states = {"store_0": "alive", "store_1": "alive", "store_2": "silent"}

    def run(command: Sequence[str]) -> tuple[int, str, str]:
        if command[1] == "drain":
            states[command[2].replace("-", "_")] = "draining"
        elif "draining" in states.values() and len(api.commands) > 4:
            states.update(store_1="drained", store_2="left")
        assert api.get("StatefulSet", "store")["spec"]["replicas"] == 3
        return nodes_as_json(**{name.replace("_", "-"): state for name, state in states.items()})

    api.run = run
    said: list[str] = []
    scale(api.client(), 1, 60.0, ignore, said.append)
    assert api.commands[1:3] == [
        ["insitu", "drain", "store-1", "--deadline", "60s"],
        ["insitu", "drain", "store-2", "--deadline", "60s"],
    ]
    assert said[0] == "store-1, store-2: what others need moves to them"
    assert api.get("StatefulSet", "store")["spec"]["replicas"] == 1


def test_a_store_that_never_joined_needs_no_drain(api: FakeApi) -> None:
    up(api, nodes=2)
    api.after = lambda method, path: api.make_pods()
    api.run = lambda command: nodes_as_json(**{"store-0": "alive"})
    scale(api.client(), 1, 60.0, ignore, ignore)
    assert api.commands == [["insitu", "nodes", "--json"], ["insitu", "nodes", "--json"]]


def test_a_drain_that_is_refused_leaves_all_as_it_is(api: FakeApi) -> None:
    up(api, nodes=2)
    api.run = lambda command: (
        nodes_as_json(**{"store-1": "alive"}) if command[1] == "nodes" else (2, "", "error: one must stay\n")
    )
    with pytest.raises(
        ClusterError, match=r"`insitu drain store-1 --deadline 60s`\. Received: exit code 2: one must"
    ):
        scale(api.client(), 1, 60.0, ignore, ignore)
    assert api.get("StatefulSet", "store")["spec"]["replicas"] == 2


def test_stores_that_are_not_empty_in_time_stay(api: FakeApi) -> None:
    up(api, nodes=2)
    api.run = lambda command: nodes_as_json(**{"store-1": "draining"})
    with pytest.raises(ClusterError, match=r"Received: store-1 isn't\. They are still drained: run the same"):
        scale(api.client(), 1, 0.0, ignore, ignore)
    assert api.get("StatefulSet", "store")["spec"]["replicas"] == 2


# Taking down


def test_the_head_goes_first_and_disks_stay(api: FakeApi) -> None:
    up(api, nodes=2)
    api.make_pods()
    api.changes.clear()
    api.after = lambda method, path: api.make_pods() if "statefulsets" in path else None
    deleted = take_down(api.client(), 60.0, ignore, with_claims={})
    sets = [path.rsplit("/", 1)[-1] for method, path in api.changes if "statefulsets" in path]
    assert sets == ["head", "store"] and deleted["StatefulSet"] == ["head", "store"]
    assert deleted["Secret"] == ["insitu-token"] and "PersistentVolumeClaim" not in deleted
    assert api.names("PersistentVolumeClaim") == ["data-head-0", "data-store-0", "data-store-1"]
    kinds = {each["kind"] for each in api.objects.values()}
    assert kinds == {"Namespace", "StorageClass", "Node", "PersistentVolumeClaim"}


@pytest.mark.parametrize("kind", ["JobSet", "Job"])
def test_the_pods_of_jobs_go_between_the_head_and_the_stores(api: FakeApi, kind: str) -> None:
    """Without a head their end stops no job, and the disks of stores are free once they have gone."""
    up(api)
    api.make_pods()
    api.groups.add("jobset.x-k8s.io/v1alpha2")
    for name in ("a", "b"):
        api.put(kind, f"job-{name}")["metadata"]["labels"] = {"insitu.dev/job": name}
    api.put("Job", "mine")
    api.changes.clear()

    def make_pods(method: str, path: str) -> None:
        api.make_pods()
        if api.names(kind) != (["mine"] if kind == "Job" else []):
            pod = api.put("Pod", "job-a-store-0", spec={})
            pod["metadata"]["labels"] = {"app.kubernetes.io/name": "insitu"}

    api.after = make_pods
    deleted = take_down(api.client(), 60.0, ignore, with_claims={})
    names = [path.rsplit("/", 1)[-1] for _, path in api.changes]
    assert names[:4] == ["head", "job-a", "job-b", "store"] and deleted[kind] == ["job-a", "job-b"]
    assert api.names("Job") == ["mine"]


def test_what_others_have_made_stays(api: FakeApi) -> None:
    up(api)
    api.put("Secret", "mine")["metadata"]["labels"] = {"app.kubernetes.io/name": "insitu"}
    api.put("Service", "web")
    take_down(api.client(), 60.0, ignore, with_claims={})
    assert api.names("Secret") == ["mine"] and api.names("Service") == ["web"]


def test_disks_go_if_they_are_named(api: FakeApi) -> None:
    up(api)
    api.make_pods()
    claims = list_claims(api.client())
    assert claims == {"data-head-0": "20Gi", "data-store-0": "50Gi"}
    api.objects = {path: each for path, each in api.objects.items() if each["kind"] != "Pod"}
    deleted = take_down(api.client(), 60.0, ignore, with_claims=claims)
    assert deleted["PersistentVolumeClaim"] == ["data-head-0", "data-store-0"]
    assert take_down(api.client(), 60.0, ignore, with_claims={}) == {}


def test_pods_that_do_not_end_are_named(api: FakeApi) -> None:
    up(api)
    api.make_pods()
    with pytest.raises(ClusterError, match=r"Received: head-0 are there\. `kubectl describe pods` says"):
        take_down(api.client(), 0.0, ignore, with_claims={})
