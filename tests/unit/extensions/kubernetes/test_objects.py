"""The objects of a cluster: the schemas of Kubernetes take them, and they ask for no more than they need."""

from __future__ import annotations

import functools
from typing import Any

import kubernetes_validate
import pytest
import yaml

from insitu.extensions.kubernetes.objects import make_objects, make_secret
from insitu.extensions.kubernetes.options import ClusterOptions
from insitu.extensions.kubernetes.rendering import format_objects

VERSIONS = ("1.33", "1.34", "1.35", "1.36", "1.37")
GRID = [
    {},
    {"nodes": 1000, "gpus": 8, "cpu": "500m", "memory": "1.5Gi", "storage": "10Ti"},
    {"storage_class": "topolvm.example.com", "image": "registry:5000/a/insitu:1@sha256:" + "0" * 64},
    {"queue": "team-a", "monitor": True, "page_url": "https://insitu.example.com:8443"},
    {"namespace": "team", "create_namespace": True, "head_storage": "512Mi"},
]


@pytest.fixture(autouse=True, scope="module")
def schemas_read_once() -> Any:
    """Have each file of schemas, of 2 MB, parsed once."""
    read = kubernetes_validate.utils.schema_contents
    kubernetes_validate.utils.schema_contents = functools.cache(read)
    yield
    kubernetes_validate.utils.schema_contents = read


def make(**options: Any) -> dict[tuple[str, str], Any]:
    made = make_objects(ClusterOptions(**options))
    return {(each["kind"], each["metadata"]["name"]): each for each in made}


def pods_of(**options: Any) -> list[Any]:
    return [o["spec"]["template"]["spec"] for o in make(**options).values() if o["kind"] == "StatefulSet"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("options", GRID, ids=str)
def test_the_schemas_of_kubernetes_take_all_objects(version: str, options: dict[str, Any]) -> None:
    objects = make_objects(ClusterOptions(**options))
    for each in [*objects, make_secret("team", "x" * 64)]:
        if each["kind"] != "ServiceMonitor":  # its schema is that of an operator
            kubernetes_validate.validate(each, version, strict=True)


def test_the_schemas_would_refuse_a_field_that_there_is_not() -> None:
    store = make()["StatefulSet", "store"]
    store["spec"]["template"]["spec"]["containers"][0]["imagePull"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePull"):
        kubernetes_validate.validate(store, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("options", GRID, ids=str)
def test_pods_are_as_pod_security_restricted_wants(options: dict[str, Any]) -> None:
    for pod in pods_of(**options):
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        kinds = {kind for volume in pod["volumes"] for kind in volume.keys() - {"name"}}
        assert kinds == {"secret", "emptyDir"}
        for container in (*pod["initContainers"], *pod["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]


def test_the_head_alone_has_a_token_of_the_api_with_rights_in_its_namespace() -> None:
    made = make(namespace="team")
    head, store = (made["StatefulSet", n]["spec"]["template"]["spec"] for n in ("head", "store"))
    assert head["automountServiceAccountToken"] is True and store["automountServiceAccountToken"] is False
    assert head["serviceAccountName"] == "insitu-head" and store["serviceAccountName"] == "insitu-store"
    rules = made["Role", "insitu-head"]["rules"]
    granted = {(r, v) for rule in rules for r in rule["resources"] for v in rule["verbs"]}
    assert {r for r, _ in granted} == {
        *("pods", "pods/log", "persistentvolumeclaims", "events", "jobs", "jobsets", "localqueues"),
        *("statefulsets", "workloads"),
    }
    assert not any("*" in pair for pair in granted)
    assert not {("pods", "create"), ("persistentvolumeclaims", "delete"), ("events", "delete")} & granted
    (subject,) = made["RoleBinding", "insitu-head"]["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": "insitu-head", "namespace": "team"}
    assert not {kind for kind, _ in made} & {"ClusterRole", "ClusterRoleBinding", "Secret"}


def test_stores_are_on_nodes_of_their_own_keep_their_disks_and_have_time_to_drain() -> None:
    store = make(nodes=3, gpus=2, queue="q")["StatefulSet", "store"]
    spec, pod = store["spec"], store["spec"]["template"]["spec"]
    assert (spec["replicas"], spec["podManagementPolicy"]) == (3, "Parallel")
    assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}
    assert pod["terminationGracePeriodSeconds"] == 120
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["labelSelector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    (container,) = pod["containers"]
    assert container["resources"]["requests"]["nvidia.com/gpu"] == "2"
    assert store["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert "storageClassName" not in claim["spec"]
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod["volumes"]


def test_services_select_pods_and_lead_to_ports_that_these_have() -> None:
    made = make(monitor=True)
    for name in ("head", "store"):
        service, pods = made["Service", name]["spec"], made["StatefulSet", name]["spec"]["template"]
        assert service["selector"].items() <= pods["metadata"]["labels"].items()
        ports = {p["name"]: p["containerPort"] for c in pods["spec"]["containers"] for p in c["ports"]}
        assert {p["targetPort"]: p["port"] for p in service["ports"]} == ports
        assert service["publishNotReadyAddresses"] is True
    assert made["Service", "store"]["spec"]["clusterIP"] == "None"
    (endpoint,) = made["ServiceMonitor", "insitu"]["spec"]["endpoints"]
    assert endpoint["port"] in {p["name"] for p in made["Service", "head"]["spec"]["ports"]}
    labels = made["Service", "head"]["metadata"]["labels"]
    assert made["ServiceMonitor", "insitu"]["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_no_metrics_are_served_unless_asked_for() -> None:
    made = make()
    assert ("ServiceMonitor", "insitu") not in made
    (rule,) = made["NetworkPolicy", "insitu-page"]["spec"]["ingress"]
    assert [each["port"] for each in rule["ports"]] == [8780]
    assert {c["name"] for pod in pods_of() for c in pod["containers"]} == {"head", "page", "store"}


def test_logs_are_json_if_asked_for() -> None:
    def formats(**options: Any) -> set[Any]:
        containers = [each for pod in pods_of(**options) for each in pod["containers"]]
        return {{e["name"]: e.get("value") for e in c["env"]}.get("INSITU_LOG_FORMAT") for c in containers}

    assert formats(log_format="json") == {"json"} and formats() == {None}


def test_the_yaml_has_the_same_objects_in_the_same_order_without_a_secret() -> None:
    options = ClusterOptions(nodes=2, namespace="team")
    text = format_objects(options)
    assert list(yaml.safe_load_all(text)) == make_objects(options)
    assert text == format_objects(ClusterOptions(nodes=2, namespace="team"))
    assert "kind: Secret" not in text and "&id" not in text
    assert "kubectl --namespace team create secret generic insitu-token" in text
