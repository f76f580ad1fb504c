"""The ground of the tests of Kubernetes: a real control plane, and nodes whose pods are processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hosts_lab
import k8s_binaries
import pytest

pytest.importorskip("kubernetes", reason="the library `kubernetes` must be installed: make ready-k8s")

from k8s_kubelet import Cluster
from k8s_plane import Object, wait_for
from kubernetes import client
from kubernetes.client.exceptions import ApiException

_CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
_OBSTACLE = hosts_lab.find_obstacle() or k8s_binaries.find_obstacle(*_CONTROL_PLANE)
pytestmark = [pytest.mark.k8s, pytest.mark.skipif(bool(_OBSTACLE), reason=_OBSTACLE)]
SERVER = "python -m http.server --directory /data 8000"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("k8s")
    with Cluster(folder, 2, {"nvidia.com/gpu": "1"}, images=["insitu:test"]) as made:
        yield made


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    name = request.node.name.replace("_", "-").removeprefix("test-")[:50].rstrip("-")
    cluster.plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    accounts = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    wait_for(lambda: cluster.plane.exists(accounts))
    return name


def describe(script: str, container: Object | None = None, **spec: Any) -> Object:
    """Return a pod's spec whose container runs a script."""
    main = {"name": "main", "image": "insitu:test", "command": ["sh", "-c", script], **(container or {})}
    return {"restartPolicy": "Never", "containers": [main], **spec}


def make_pod(namespace: str, name: str, script: str, container: Object | None = None, **spec: Any) -> Object:
    facts = {"name": name, "namespace": namespace, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": facts, "spec": describe(script, container, **spec)}


def make_store(namespace: str, replicas: int = 2) -> list[Object]:
    """Return a StatefulSet with a claim for each replica, one on a node, and its headless Service."""
    facts = {"name": "store", "namespace": namespace}
    labels = {"app": "store"}
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    container = {
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
    }
    spec = describe(
        f"hostname >> /data/names; exec {SERVER}",
        container,
        restartPolicy="Always",
        terminationGracePeriodSeconds=1,
        affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}},
    )
    claim = {
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    service = {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": facts,
            "spec": {**service, "ports": [{"port": 8000}]},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": facts,
            "spec": {
                "serviceName": "store",
                "replicas": replicas,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": spec},
                "volumeClaimTemplates": [claim],
            },
        },
    ]


def read_log(cluster: Cluster, namespace: str, name: str, **options: Any) -> str:
    core = client.CoreV1Api(cluster.plane.client())
    return str(core.read_namespaced_pod_log(name, namespace, **options))


def end_state(pod: Object) -> Object:
    found: Object = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    return found


def test_pod_finds_what_it_was_given(cluster: Cluster, namespace: str) -> None:
    facts = {"name": "facts", "namespace": namespace}
    script = (
        "hostname; echo $(NAME) $PASSWORD $IP $CPUS; cat /etc/own/*; "
        "df -B1M --output=size /dev/shm | tail -1; "
        "cat /proc/1/comm; test -s /var/run/secrets/kubernetes.io/serviceaccount/token && echo token; "
        "touch /somewhere; echo why > /dev/termination-log; exit 3"
    )
    container = {
        "env": [
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "facts", "key": "password"}}},
            {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
        ],
        "resources": {"limits": {"cpu": "2"}},
        "volumeMounts": [
            {"name": "own", "mountPath": "/etc/own"},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    volumes = [
        {"name": "own", "configMap": {"name": "facts"}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "128Mi"}},
    ]
    cluster.plane.apply(make_pod(namespace, "pod", script, container, volumes=volumes))
    # It waits for what isn't there yet, and says so.
    events = f"/api/v1/namespaces/{namespace}/events"
    wait_for(lambda: any(each["reason"] == "FailedMount" for each in cluster.plane.get(events)["items"]))
    assert cluster.get_pod(namespace, "pod")["status"]["phase"] == "Pending"
    cluster.plane.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": facts, "data": {"a": "from a map\n"}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": facts, "stringData": {"password": "hidden"}},
    )
    pod = cluster.wait_phase(namespace, "pod", "Failed")
    address = pod["status"]["podIP"]
    expected = f"pod pod hidden {address} 2 from a map 128 sh token"
    assert " ".join(read_log(cluster, namespace, "pod").split()) == expected
    assert end_state(pod)["exitCode"] == 3 and end_state(pod)["message"] == "why\n"
    assert not Path("/somewhere").exists()


def test_tasks_are_placed_beside_the_data_of_stores(cluster: Cluster, namespace: str) -> None:
    cluster.plane.apply(*make_store(namespace))
    stores = [cluster.wait_phase(namespace, f"store-{index}", "Ready") for index in (0, 1)]
    nodes = [store["spec"]["nodeName"] for store in stores]
    assert sorted(nodes) == ["host1", "host2"]
    read = "import urllib.request as u; print(u.urlopen('http://store-%d.store:8000/names').read())"
    fetch = f'python -c "{read}"'
    for index in (0, 1):
        claim = {"name": "data", "persistentVolumeClaim": {"claimName": f"data-store-{index}"}}
        mounts = {"volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}]}
        script = f"cat /data/names; {fetch % (1 - index)}; touch /data/mine || exit 7"
        cluster.plane.apply(make_pod(namespace, f"task-{index}", script, mounts, volumes=[claim]))
        task = cluster.wait_phase(namespace, f"task-{index}", "Failed")
        assert task["spec"]["nodeName"] == nodes[index] and end_state(task)["exitCode"] == 7
        said = read_log(cluster, namespace, f"task-{index}")
        assert f"store-{index}\nb'store-{1 - index}\\n'" in said and "Read-only file system" in said
    # A pod that is deleted comes again, with the disk of before, and names lead to its new address.
    cluster.plane.api.ask("DELETE", f"/api/v1/namespaces/{namespace}/pods/store-1")
    before = stores[1]["metadata"]["uid"]
    wait_for(lambda: cluster.get_pod(namespace, "store-1").get("metadata", {}).get("uid", before) != before)
    again = cluster.wait_phase(namespace, "store-1", "Ready")
    assert again["spec"]["nodeName"] == nodes[1]
    cluster.plane.apply(make_pod(namespace, "asks", fetch % 1))
    cluster.wait_phase(namespace, "asks", "Succeeded")
    assert read_log(cluster, namespace, "asks") == "b'store-1\\nstore-1\\n'\n"


def test_probes_and_restarts(cluster: Cluster, namespace: str) -> None:
    check = {"exec": {"command": ["test", "-e", "/data/ready"]}, "periodSeconds": 1}
    container = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    data = [{"name": "data", "emptyDir": {}}]
    waits = make_pod(
        namespace,
        "waits",
        "until [ -e /data/go ]; do sleep 0.1; done; touch /data/ready; sleep 1000",
        {**container, "readinessProbe": check},
        volumes=data,
        terminationGracePeriodSeconds=0,
    )
    cluster.plane.apply(waits)
    pod = cluster.wait_phase(namespace, "waits", "Running")
    assert not pod["status"]["containerStatuses"][0]["ready"]
    (cluster.find(namespace, "waits").volumes["data"] / "go").touch()
    cluster.wait_phase(namespace, "waits", "Ready")
    live = {
        "exec": {"command": ["test", "!", "-e", "/data/stuck"]},
        "periodSeconds": 1,
        "failureThreshold": 1,
    }
    script = "echo began; [ -e /data/stuck ] && rm /data/stuck || touch /data/stuck; exec sleep 1000"
    cluster.plane.apply(
        make_pod(
            namespace,
            "stuck",
            script,
            {**container, "livenessProbe": live},
            volumes=data,
            restartPolicy="Always",
            terminationGracePeriodSeconds=1,
        )
    )
    wait_for(lambda: restarts(cluster.get_pod(namespace, "stuck")) == 1)
    assert read_log(cluster, namespace, "stuck", previous=True) == "began\n"
    # An image that isn't there and a wrong program are told apart.
    cluster.plane.apply(make_pod(namespace, "no-image", "true", {"image": "else:1"}))
    cluster.plane.apply(make_pod(namespace, "no-program", "", {"command": ["/no/such"]}))
    assert end_state(cluster.wait_phase(namespace, "no-program", "Failed"))["reason"] == "StartError"
    waiting = wait_for(lambda: cluster.get_pod(namespace, "no-image")["status"].get("containerStatuses"))
    assert waiting[0]["state"]["waiting"]["reason"] == "ImagePullBackOff"


def restarts(pod: Object) -> int:
    found = pod.get("status", {}).get("containerStatuses")
    return found[0]["restartCount"] if found else 0


def test_pods_are_asked_to_end_before_they_are_killed(cluster: Cluster, namespace: str) -> None:
    follow = "/api/v1/namespaces/{}/pods/{}"
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data", "namespace": namespace},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    cluster.plane.apply(claim)
    shared = {
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "terminationGracePeriodSeconds": 60,
    }
    mounts = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    polite = "trap 'echo ended > /data/polite; exit 0' TERM; echo up > /data/up; while :; do sleep 0.1; done"
    cluster.plane.apply(make_pod(namespace, "polite", polite, mounts, **shared))
    # The first process of a container ignores a signal for which it has no handler.
    cluster.plane.apply(make_pod(namespace, "deaf", "exec sleep 1000", mounts, **shared))
    for name in ("polite", "deaf"):
        cluster.wait_phase(namespace, name, "Running")
    where = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/data"
    volume = cluster.plane.get(where)["spec"]["volumeName"]
    disk = cluster.find(namespace, "polite").node.host.disk / "disks" / volume
    wait_for((disk / "up").exists)
    for name, seconds in (("polite", 60), ("deaf", 1)):
        cluster.plane.api.ask("DELETE", follow.format(namespace, name), {"gracePeriodSeconds": seconds})
        wait_for(lambda name=name: not cluster.get_pod(namespace, name))
    assert (disk / "polite").read_text() == "ended\n"
    # A claim that is deleted takes its disk along.
    cluster.plane.api.ask("DELETE", where)
    wait_for(lambda: not disk.exists())


def test_eviction_waits_for_budgets(cluster: Cluster, namespace: str) -> None:
    cluster.plane.apply(make_pod(namespace, "kept", "exec sleep 1000", terminationGracePeriodSeconds=0))
    budget = {"minAvailable": 1, "selector": {"matchLabels": {"app": "kept"}}}
    facts = {"name": "kept", "namespace": namespace}
    cluster.plane.apply(
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": facts, "spec": budget}
    )
    cluster.wait_phase(namespace, "kept", "Ready")
    node = cluster.find(namespace, "kept").node
    where = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/kept"
    wait_for(lambda: cluster.plane.get(where).get("status", {}).get("currentHealthy") == 1)
    assert not node.evict(namespace, "kept")
    cluster.plane.api.ask("DELETE", where)
    node.drain()
    wait_for(lambda: not cluster.get_pod(namespace, "kept"))
    node.cordon(False)


def test_rights_and_security(cluster: Cluster, namespace: str) -> None:
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}]
    reader = client.CoreV1Api(cluster.plane.client(cluster.plane.make_account(namespace, "reader", rules)))
    assert reader.list_namespaced_pod(namespace).items == []
    with pytest.raises(ApiException, match='cannot list resource \\\\"secrets\\\\"'):
        reader.list_namespaced_secret(namespace)
    enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
    facts = {"name": namespace, "labels": enforce}
    cluster.plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": facts})
    with pytest.raises(ApiException, match="violates PodSecurity"):
        cluster.plane.apply(make_pod(namespace, "root", "id -u"))
    locked = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    user = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 2000}
    security = {**user, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {"securityContext": locked, "volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    script = "id -u; touch /tmp/x || echo refused; touch /data/x && stat -c %g /data/x; python -c 'print(1)'"
    data = [{"name": "data", "emptyDir": {}}]
    cluster.plane.apply(
        make_pod(
            namespace,
            "user",
            script,
            container,
            volumes=data,
            securityContext=security,
            automountServiceAccountToken=False,
        )
    )
    cluster.wait_phase(namespace, "user", "Succeeded")
    said = read_log(cluster, namespace, "user")
    assert said.startswith("1000\n") and said.endswith("refused\n2000\n1\n") and "Read-only" in said


def test_pods_run_while_the_api_server_is_away(cluster: Cluster, namespace: str) -> None:
    find = "getent hosts store-0.store"
    script = f"until {find}; do sleep 0.1; done; sleep 3; {find}"
    cluster.plane.apply(*make_store(namespace, 1), make_pod(namespace, "pod", script))
    cluster.wait_phase(namespace, "store-0", "Ready")
    cluster.wait_phase(namespace, "pod", "Running")
    wait_for(lambda: read_log(cluster, namespace, "pod"))
    cluster.plane.stop("kube-apiserver", signal.SIGKILL)
    try:
        wait_for(lambda: cluster.find(namespace, "pod").containers[0].ended)
    finally:
        cluster.plane.start("kube-apiserver")
        cluster.plane.wait_ready()
    cluster.wait_phase(namespace, "pod", "Succeeded")
    assert read_log(cluster, namespace, "pod").count("store-0.store") == 2


def test_gpus_are_counted(cluster: Cluster, namespace: str) -> None:
    gpu = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    cluster.plane.apply(make_pod(namespace, "greedy", "true", gpu))

    def refused() -> bool:
        conditions = cluster.get_pod(namespace, "greedy")["status"].get("conditions", [])
        return any("Insufficient nvidia.com/gpu" in each.get("message", "") for each in conditions)

    wait_for(refused)


@pytest.mark.skipif(bool(k8s_binaries.find_obstacle("jobset")), reason="JobSet isn't built: make ready-k8s")
def test_jobset_and_kueue(cluster: Cluster, namespace: str) -> None:
    cluster.plane.add_jobset()

    def make_set(name: str, script: str, **facts: Any) -> Object:
        container = {"resources": {"requests": {"cpu": "1"}}}
        template = {"spec": describe(script, container)}
        job = {"parallelism": 2, "completions": 2, "backoffLimit": 0, "template": template}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name, "namespace": namespace, **facts},
            "spec": {"replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}]},
        }

    def wait_set(name: str, kind: str) -> Object:
        path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets/{name}"

        def find() -> Object:
            found = cluster.plane.get(path)
            conditions = found.get("status", {}).get("conditions", [])
            ended = any(each["type"] == kind and each["status"] == "True" for each in conditions)
            return found if ended else {}

        result: Object = wait_for(
            find, why=lambda: (cluster.plane.get(path), cluster.plane.read_logs("jobset"))
        )
        return result

    # Its pods find each other by names.
    peers = "getent hosts train-workers-0-$((1 - JOB_COMPLETION_INDEX)).train"
    cluster.plane.apply(make_set("train", f"until {peers}; do sleep 0.1; done; sleep 1"))
    wait_set("train", "Completed")
    cluster.plane.apply(make_set("fails", "exit 5"))
    wait_set("fails", "Failed")
    wrong = make_set("wrong", "true")
    wrong["spec"]["successPolicy"] = {"operator": "All", "targetReplicatedJobs": ["else"]}
    with pytest.raises(ApiException, match="invalid replicatedJob name 'else'"):
        cluster.plane.apply(wrong)
    if k8s_binaries.find_obstacle("kueue"):
        pytest.skip("Kueue isn't built: make ready-k8s")
    cluster.plane.add_kueue()
    quota = {"name": "cpu", "nominalQuota": "2"}
    flavors = [{"name": "any", "resources": [quota]}]
    version = "kueue.x-k8s.io/v1beta2"
    cluster.plane.apply(
        {"apiVersion": version, "kind": "ResourceFlavor", "metadata": {"name": "any"}},
        {
            "apiVersion": version,
            "kind": "ClusterQueue",
            "metadata": {"name": "all"},
            "spec": {
                "namespaceSelector": {},
                "resourceGroups": [{"coveredResources": ["cpu"], "flavors": flavors}],
            },
        },
        {
            "apiVersion": version,
            "kind": "LocalQueue",
            "metadata": {"name": "queue", "namespace": namespace},
            "spec": {"clusterQueue": "all"},
        },
    )
    queued = {"labels": {"kueue.x-k8s.io/queue-name": "queue"}}
    running = "until [ -e /tmp/never ]; do sleep 0.2; done"
    cluster.plane.apply(make_set("first", running, **queued))
    path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets"
    wait_for(lambda: cluster.plane.get(f"{path}/first")["spec"].get("suspend") is False)
    cluster.plane.apply(make_set("second", "true", **queued))
    # The quota is used up: the second waits, suspended, until the first is gone.
    wait_set("second", "Suspended")
    cluster.plane.api.ask("DELETE", f"{path}/first")
    wait_set("second", "Completed")


def test_nodes_die_and_come_again(cluster: Cluster, namespace: str) -> None:
    cluster.plane.apply(*make_store(namespace))
    for index in (0, 1):
        cluster.wait_phase(namespace, f"store-{index}", "Ready")
    node = cluster.find(namespace, "store-1").node
    once = {"nodeSelector": {"kubernetes.io/hostname": node.name}}
    cluster.plane.apply(make_pod(namespace, "once", "exec sleep 1000", **once))
    cluster.wait_phase(namespace, "once", "Running")
    # Switched off and on at once: pods stay, and begin again as they say.
    node.reboot()
    wait_for(lambda: restarts(cluster.get_pod(namespace, "store-1")) == 1)
    cluster.wait_phase(namespace, "store-1", "Ready")
    assert cluster.wait_phase(namespace, "once", "Failed")["status"]["reason"] == "NodeRebooted"
    # Cut off, its processes run.
    store = cluster.find(namespace, "store-1")
    node.cut()
    wait_for(lambda: not is_ready(cluster.plane.get(node.path)))
    assert store.sandbox.listeners() == ["00000000:1F40"]
    node.heal()
    wait_for(lambda: is_ready(cluster.plane.get(node.path)))
    cluster.wait_phase(namespace, "store-1", "Ready")
    # Off for long: its pods are to end, and nobody there says that they have.
    node.kill()
    wait_for(lambda: "deletionTimestamp" in cluster.get_pod(namespace, "store-1")["metadata"])
    uid = cluster.get_pod(namespace, "store-1")["metadata"]["uid"]
    node.mark_out_of_service()
    wait_for(lambda: cluster.get_pod(namespace, "store-1").get("metadata", {}).get("uid", uid) != uid)

    def waits() -> bool:
        conditions = cluster.get_pod(namespace, "store-1").get("status", {}).get("conditions", [])
        return any("node" in each.get("message", "") for each in conditions)

    # The one in its place waits for the disk.
    wait_for(waits)
    node.start()
    cluster.plane.api.patch(node.path, {"spec": {"taints": None}})
    again = cluster.wait_phase(namespace, "store-1", "Ready")
    assert again["spec"]["nodeName"] == node.name
    fetch = "cat < /data/names"
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": "data-store-1"}}
    mounts = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    cluster.plane.apply(make_pod(namespace, "asks", fetch, mounts, volumes=[claim]))
    cluster.wait_phase(namespace, "asks", "Succeeded")
    assert read_log(cluster, namespace, "asks") == "store-1\n" * 3


def is_ready(node: Object) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"]["conditions"])
