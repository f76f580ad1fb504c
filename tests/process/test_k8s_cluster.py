"""`insitu k8s` against a real control plane, pods as processes: from an empty namespace to a training."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hosts_lab
import k8s_binaries
import pytest

pytest.importorskip("kubernetes", reason="the library `kubernetes` must be installed: make ready-k8s")

from k8s_insitu import (
    IMAGE,
    SMALL,
    act_as_administrator,
    head,
    insitu,
    read_weights,
    use,
    write_input,
)
from k8s_kubelet import Cluster
from k8s_plane import wait_for

from insitu.base.errors import InsituError
from insitu.extensions.kubernetes.client import Client, KubeconfigTransport
from insitu.extensions.kubernetes.objects import make_objects
from insitu.extensions.kubernetes.options import ClusterOptions

_CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
_OBSTACLE = hosts_lab.find_obstacle() or k8s_binaries.find_obstacle(*_CONTROL_PLANE)
pytestmark = [pytest.mark.k8s, pytest.mark.long, pytest.mark.skipif(bool(_OBSTACLE), reason=_OBSTACLE)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("k8s"), 3, {"nvidia.com/gpu": "1"}, images=[IMAGE]) as made:
        yield made


@pytest.fixture(autouse=True)
def as_administrator(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    act_as_administrator(cluster, monkeypatch)


def error_of(*arguments: str) -> str:
    with pytest.raises(InsituError) as error:
        insitu(*arguments)
    return str(error.value)


def states_of(namespace: str) -> dict[str, str]:
    return {
        each["name"]: each["state"]
        for each in json.loads(insitu("status", "--namespace", namespace, "--json")[1])
    }


def job_of(cluster: Cluster, namespace: str) -> dict[str, Any]:
    (job,) = json.loads(head(cluster, namespace, "insitu", "ps", "--all", "--json"))
    return dict(job)


def node_of(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    listed = json.loads(head(cluster, namespace, "insitu", "nodes", "--json"))
    return dict(next(each for each in listed if each["node"] == name))


def test_a_cluster_trains_loses_pods_scales_and_goes(cluster: Cluster) -> None:
    where = ("--namespace", "story")
    code, _, said = insitu("up", "--nodes", "2", "--create-namespace", *where, *SMALL)
    assert code == 0 and "store-1: ready" in said
    assert states_of("story") == dict.fromkeys(("head-0", "store-0", "store-1"), "ready")
    write_input(cluster, "story")
    head(cluster, "story", "insitu", "import", "d", "/tmp/d.jsonl", "--backups", "1")
    start = ("insitu", "start", "--workers", "2", "--seed", "1")
    head(cluster, "story", *start, "--name", "calm", "d", "/tmp/job", "train.py")
    (wanted,) = read_weights(cluster, "story", "calm")
    head(cluster, "story", "insitu", "delete", "--yes", job_of(cluster, "story")["job_id"])

    # The head's pod goes in the middle. Its disk has all that it knows, so the next one resumes the job.
    head(cluster, "story", *start, "--name", "lost", "--detach", "d", "/tmp/job", "train.py")
    wait_for(lambda: (job_of(cluster, "story")["progress"] or {}).get("epoch", 0) >= 2)
    before = cluster.get_pod("story", "head-0")["metadata"]["uid"]
    cluster.plane.api.ask("DELETE", "/api/v1/namespaces/story/pods/head-0")
    wait_for(lambda: cluster.get_pod("story", "head-0").get("metadata", {}).get("uid", before) != before)
    cluster.wait_phase("story", "head-0", "Ready")
    wait_for(
        lambda: job_of(cluster, "story")["state"] == "finished", why=lambda: str(job_of(cluster, "story"))
    )
    assert read_weights(cluster, "story", "lost") == {wanted}

    # A store's pod comes back at another address, and its node stays.
    address = cluster.get_pod("story", "store-1")["status"]["podIP"]
    cluster.plane.api.ask("DELETE", "/api/v1/namespaces/story/pods/store-1")

    def is_back() -> bool:
        found = node_of(cluster, "story", "store-1")
        return bool(found["state"] == "alive" and found["address"] != f"{address}:7071")

    wait_for(is_back)
    code, _, said = insitu("scale", "--nodes", "3", *where, "--timeout", "3m")
    assert code == 0 and states_of("story")["store-2"] == "ready"
    head(cluster, "story", "insitu", "rebalance", "d", "--rate", "0")
    code, _, said = insitu("scale", "--nodes", "1", *where, "--timeout", "3m")
    assert code == 0 and states_of("story") == dict.fromkeys(("head-0", "store-0"), "ready")
    head(cluster, "story", "insitu", "describe", "d", "--verify")

    code, out, _ = insitu("down", *where, "--json")
    assert json.loads(out)["kept"] == ["data-head-0", *(f"data-store-{number}" for number in range(3))]
    assert not cluster.plane.get("/api/v1/namespaces/story/pods")["items"]
    insitu("up", "--nodes", "1", *where, *SMALL)
    (cache,) = json.loads(head(cluster, "story", "insitu", "caches", "--json"))
    assert (cache["name"], cache["rows"]) == ("d", 2000)
    insitu("down", *where, "--claims", "--yes")
    wait_for(lambda: not cluster.plane.get("/api/v1/namespaces/story/persistentvolumeclaims")["items"])


def test_a_lost_nodes_disk_is_waited_for_and_commands_come_from_elsewhere(
    cluster: Cluster, tmp_path: Path
) -> None:
    where = ("--namespace", "lost")
    insitu("up", "--nodes", "2", "--create-namespace", *where, *SMALL)
    secret = cluster.plane.get("/api/v1/namespaces/lost/secrets/insitu-token")["data"]["cluster-token"]
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_bytes(base64.b64decode(secret))
    address = cluster.get_pod("lost", "head-0")["status"]["podIP"]
    done = subprocess.run(
        [sys.executable, "-m", "insitu", "--cluster", f"{address}:7070", "nodes", "--json"],
        env={**os.environ, "INSITU_HOME": str(tmp_path), "INSITU_TOKEN_FILE": str(token)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    listed = {each["node"]: each["state"] for each in json.loads(done.stdout)}
    assert listed == {"store-0": "alive", "store-1": "alive"}

    write_input(cluster, "lost")
    head(cluster, "lost", "insitu", "import", "d", "/tmp/d.jsonl", "--backups", "1")
    states = {each["name"]: each for each in json.loads(insitu("status", *where, "--json")[1])}
    lost = next(name for name in ("store-0", "store-1") if states[name]["node"] != states["head-0"]["node"])
    node = next(each for each in cluster.nodes if each.name == states[lost]["node"])
    node.kill()
    node.mark_out_of_service()
    try:
        wanted = f"{lost} waits for node {node.name}'s disk: 0/3 nodes"
        wait_for(lambda: wanted in insitu("status", *where)[2])

        # Lost for good: others get copies of what it had, and another store takes its place.
        head(cluster, "lost", "insitu", "drain", lost)
        wait_for(lambda: node_of(cluster, "lost", lost)["state"] == "left")
        for path in (f"persistentvolumeclaims/data-{lost}", f"pods/{lost}"):
            cluster.plane.api.ask("DELETE", f"/api/v1/namespaces/lost/{path}")
        wait_for(lambda: node_of(cluster, "lost", lost)["state"] == "alive")
        wait_for(lambda: insitu("status", *where)[0] == 0)
        head(cluster, "lost", "insitu", "describe", "d", "--verify")
    finally:
        taints = {"spec": {"taints": None}}
        cluster.plane.api.patch(node.path, taints, "merge-patch+json")
        node.start()
    insitu("down", *where, "--claims", "--yes")


def test_what_can_not_be_is_said_before_a_change(cluster: Cluster) -> None:
    make_namespace(cluster, "empty")
    where = ("--namespace", "empty", *SMALL)
    assert "Received: nowhere, which isn't. Give --create-namespace" in error_of(
        "up", "--namespace", "nowhere"
    )
    assert "--storage-class names one that is there: disk" in error_of("up", *where, "--storage-class", "x")
    assert "the most that one of 3 nodes has is 1" in error_of("up", *where, "--gpus", "2")
    assert "Have an administrator install Kueue" in error_of("up", *where, "--queue", "q")
    assert "without one. `insitu k8s up` makes one" in error_of("status", "--namespace", "empty")
    assert not cluster.plane.get("/apis/apps/v1/namespaces/empty/statefulsets")["items"]


def make_namespace(cluster: Cluster, name: str, **more: Any) -> None:
    cluster.plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, **more}})
    wait_for(lambda: cluster.plane.exists(f"/api/v1/namespaces/{name}/serviceaccounts/default"))


def test_who_may_not_is_named_with_what_is_missing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    make_namespace(cluster, "rights")
    rule = {"apiGroups": ["", "apps"], "resources": ["*"], "verbs": ["get", "list"]}
    use(cluster.plane.make_account("rights", "ann", [rule]), monkeypatch)
    said = error_of("up", "--namespace", "rights", *SMALL, "--storage-class", "disk")
    assert (
        "allowed to patch ServiceAccount insitu-head in namespace rights. Received: serviceaccounts" in said
    )
    granted = [
        {"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "patch", "create"]},
    ]
    use(cluster.plane.make_account("rights", "bob", granted), monkeypatch)
    said = error_of("up", "--namespace", "rights", *SMALL, "--storage-class", "disk")
    assert "Who makes the head's Role must hold its rights" in said
    assert not cluster.plane.get("/apis/apps/v1/namespaces/rights/statefulsets")["items"]


def test_a_quota_is_what_is_waited_for(cluster: Cluster) -> None:
    make_namespace(cluster, "quota")
    hard = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small", "namespace": "quota"}}
    cluster.plane.apply({**hard, "spec": {"hard": {"pods": "1"}}})
    wait_for(lambda: cluster.plane.get("/api/v1/namespaces/quota/resourcequotas/small").get("status"))
    said = error_of("up", "--nodes", "2", "--namespace", "quota", *SMALL[:-1], "5s")
    assert "exceeded quota: small, requested: pods=1, used: pods=1, limited: pods=1" in said
    assert "waits for the API server to let it be made" in said
    insitu("down", "--namespace", "quota", "--claims", "--yes")


def test_images_disks_and_nodes_are_what_is_waited_for(cluster: Cluster) -> None:
    make_namespace(cluster, "waits")
    insitu("up", "--nodes", "4", "--namespace", "waits", *SMALL, "--image", "insitu:none", "--no-wait")
    wait_for(lambda: "ImagePullBackOff" in insitu("status", "--namespace", "waits")[2])
    code, _, said = insitu("status", "--namespace", "waits")
    assert code == 1 and "store-3 waits for a node: 0/3 nodes are available" in said
    assert "store-0 waits for image insitu:none: ImagePullBackOff" in said
    assert "Run `insitu k8s scale --nodes 1`" in error_of("up", "--namespace", "waits", *SMALL)
    changed = error_of("up", "--nodes", "4", "--namespace", "waits", *SMALL, "--storage", "60Gi")
    assert "The size and the class of disks stay as a set was made" in changed
    insitu("down", "--namespace", "waits", "--claims", "--yes")


def test_a_namespace_that_goes_and_a_server_that_is_away(cluster: Cluster) -> None:
    finalizers = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "going"}}
    make_namespace(cluster, "going")
    finalizers["metadata"]["finalizers"] = ["insitu.test/stay"]
    cluster.plane.apply(finalizers)
    cluster.plane.api.ask("DELETE", "/api/v1/namespaces/going")
    assert "Received: going, which is being deleted" in error_of("up", "--namespace", "going", *SMALL)
    cluster.plane.stop("kube-apiserver")
    try:
        assert "The API server must answer. Received: https://" in error_of("status", "--namespace", "going")
    finally:
        cluster.plane.start("kube-apiserver")
        cluster.plane.wait_ready()


@pytest.mark.parametrize("more", [{}, {"gpus": 1, "page_url": "https://insitu.example.com"}])
def test_the_server_itself_finds_no_field_that_it_does_not_know(cluster: Cluster, more: Any) -> None:
    """Under the strictest standard of Pod Security, of which the server would warn."""
    make_namespace(cluster, "strict", labels={"pod-security.kubernetes.io/enforce": "restricted"})
    client = Client(KubeconfigTransport(""), "strict")
    options = ClusterOptions(nodes=2, namespace="strict", **more)
    for each in make_objects(options):
        client.apply(each, dry_run=True)
    broken = make_objects(options)[-1]
    broken["spec"]["template"]["spec"]["containers"][0]["imagePull"] = "x"
    with pytest.raises(InsituError, match="imagePull"):
        client.apply(broken, dry_run=True)
