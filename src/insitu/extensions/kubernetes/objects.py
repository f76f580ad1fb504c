"""Makes the objects of a cluster on Kubernetes from its options. Pure: equal options give equal objects.

Names are fixed, so a namespace has one cluster. The secret with the cluster's token isn't among the objects:
`insitu k8s up` makes it once, and nothing prints it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from insitu.base.process.process_log import LOG_FORMAT
from insitu.extensions.kubernetes.options import ClusterOptions

Object = dict[str, Any]

HEAD, STORE, TASKS = "head", "store", "tasks"
HEAD_PORT, STORE_PORT, PAGE_PORT, METRICS_PORT = 7070, 7071, 8780, 9100
TOKEN_SECRET, TOKEN_KEY = "insitu-token", "cluster-token"
MANAGED_BY = "app.kubernetes.io/managed-by"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
GPU_RESOURCE = "nvidia.com/gpu"
MANAGER = "insitu"
DRAIN_SECONDS, GRACE_SECONDS = 100, 120
TASKS_GRACE_SECONDS = 60
"""A store drains on SIGTERM; the rest is for its agent to end."""
DASHBOARD = Path(__file__).with_name("dashboard.json")
_USER = 10001
_SMALL = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}
_DATA, _TOKENS = "/var/lib/insitu", "/etc/insitu/token"
_NAME = {"app.kubernetes.io/name": "insitu"}
CLUSTER_SELECTOR = ",".join(f"{key}={value}" for key, value in _NAME.items())


def make_objects(options: ClusterOptions) -> list[Object]:
    """Return all objects of a cluster, in the order in which they are applied."""
    objects = [
        *_make_accounts(options),
        _make_policy_within(),
        _make_policy_of_page(options),
        _make_budget(),
        *_make_services(options),
        _make_head(options),
        _make_store(options),
    ]
    if options.monitor:
        objects += [_make_monitor(), _make_dashboard()]
    for each in objects:
        each["metadata"] = {
            "name": each["metadata"]["name"],
            "namespace": options.namespace or "default",
            "labels": {**_NAME, MANAGED_BY: "insitu", **each["metadata"].get("labels", {})},
        }
    return [_make_namespace(options.namespace), *objects] if options.create_namespace else objects


def make_secret(namespace: str, token: str) -> Object:
    """Return the secret with the cluster's token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": TOKEN_SECRET,
            "namespace": namespace,
            "labels": {**_NAME, MANAGED_BY: "insitu"},
        },
        "type": "Opaque",
        "stringData": {TOKEN_KEY: token},
    }


def make_labels(component: str) -> dict[str, str]:
    """Return the labels by which services, sets and policies select pods; a set's can't be changed."""
    return {**_NAME, "app.kubernetes.io/component": component}


def _make(version: str, kind: str, name: str, **rest: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **rest}


def _make_namespace(name: str) -> Object:
    labels = {MANAGED_BY: "insitu", "pod-security.kubernetes.io/enforce": "restricted"}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name or "default", "labels": labels},
    }


def _make_accounts(options: ClusterOptions) -> list[Object]:
    read = ["get", "list", "watch"]
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": [*read, "delete"]},
        {"apiGroups": [""], "resources": ["pods/log", "persistentvolumeclaims"], "verbs": read},
        {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": [*read, "create", "patch"]},
        {
            "apiGroups": ["batch", "jobset.x-k8s.io"],
            "resources": ["jobs", "jobsets"],
            "verbs": [*read, "create", "patch", "delete"],
        },
        # The page shows what pods wait for, and the place in the queue.
        {"apiGroups": ["apps"], "resources": ["statefulsets"], "verbs": ["get", "list"]},
        {
            "apiGroups": ["kueue.x-k8s.io"],
            "resources": ["localqueues", "workloads"],
            "verbs": ["get", "list"],
        },
    ]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "insitu-head"}
    account = {
        "kind": "ServiceAccount",
        "name": "insitu-head",
        "namespace": options.namespace or "default",
    }
    return [
        _make("v1", "ServiceAccount", "insitu-head", automountServiceAccountToken=False),
        _make("v1", "ServiceAccount", "insitu-store", automountServiceAccountToken=False),
        _make("rbac.authorization.k8s.io/v1", "Role", "insitu-head", rules=rules),
        _make("rbac.authorization.k8s.io/v1", "RoleBinding", "insitu-head", roleRef=role, subjects=[account]),
    ]


def _make_policy_within() -> Object:
    """Pods of insitu reach each other. Their tasks meet at ports that the system chooses."""
    spec = {
        "podSelector": {"matchLabels": dict(_NAME)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": dict(_NAME)}}]}],
    }
    return _make("networking.k8s.io/v1", "NetworkPolicy", "insitu", spec=spec)


def _make_policy_of_page(options: ClusterOptions) -> Object:
    """All may reach the page, which has users sign in, and Prometheus the metrics: both may be elsewhere."""
    ports = [PAGE_PORT, METRICS_PORT] if options.monitor else [PAGE_PORT]
    spec = {
        "podSelector": {"matchLabels": make_labels(HEAD)},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": port, "protocol": "TCP"} for port in ports]}],
    }
    return _make("networking.k8s.io/v1", "NetworkPolicy", "insitu-page", spec=spec)


def _make_budget() -> Object:
    """Have nodes drained one after another, so that what one had is elsewhere before the next one goes."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": make_labels(STORE)}}
    return _make("policy/v1", "PodDisruptionBudget", STORE, spec=spec)


def _make_services(options: ClusterOptions) -> list[Object]:
    ports = [("head", HEAD_PORT), ("page", PAGE_PORT)]
    if options.monitor:
        ports.append(("metrics", METRICS_PORT))
    head = {
        "selector": make_labels(HEAD),
        "ports": [_serve(name, port) for name, port in ports],
        # Agents dial it while the page isn't ready yet.
        "publishNotReadyAddresses": True,
    }
    store = {
        "clusterIP": "None",
        "selector": make_labels(STORE),
        "ports": [_serve("store", STORE_PORT)],
        "publishNotReadyAddresses": True,
    }
    service = _make("v1", "Service", HEAD, spec=head)
    service["metadata"]["labels"] = make_labels(HEAD)
    return [service, _make("v1", "Service", STORE, spec=store)]


def _serve(name: str, port: int) -> Object:
    return {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}


# Pods


def _make_head(options: ClusterOptions) -> Object:
    limits = {"memory": "2Gi"}
    resources = {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": limits}
    page = ["insitu", "ui", "--host", "0.0.0.0", "--port", str(PAGE_PORT), "--no-link"]
    page += ["--proxy", options.page_url] if options.page_url else ["--self-signed"]
    containers = [
        _make_container("head", options, ["insitu", "k8s", "run-head"], resources, port=HEAD_PORT),
        _make_container("page", options, page, resources, port=PAGE_PORT),
    ]
    if options.monitor:
        metrics = ["insitu", "top", "--metrics-host", "0.0.0.0", "--metrics-port", str(METRICS_PORT)]
        containers.append(_make_container("metrics", options, metrics, _SMALL, port=METRICS_PORT))
    pod = _make_pod(options, HEAD, containers, grace=30, shared_memory="1Gi")
    return _make_set(options, HEAD, 1, pod, options.head_storage)


def _make_store(options: ClusterOptions) -> Object:
    limits = {"memory": options.memory}
    if options.gpus:
        limits[GPU_RESOURCE] = str(options.gpus)
    resources = {"requests": {"cpu": options.cpu, **limits}, "limits": limits}
    command = ["insitu", "k8s", "run-store", "--head", f"{HEAD}:{HEAD_PORT}"]
    container = _make_container("store", options, command, resources, port=STORE_PORT)
    pod = _make_pod(options, STORE, [container], grace=GRACE_SECONDS, shared_memory=options.memory)
    rule = {"labelSelector": {"matchLabels": make_labels(STORE)}, "topologyKey": "kubernetes.io/hostname"}
    pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [rule]}}
    made = _make_set(options, STORE, options.nodes, pod, options.storage)
    made["spec"]["podManagementPolicy"] = "Parallel"
    if options.queue:
        made["metadata"]["labels"] = {QUEUE_LABEL: options.queue}
    return made


def _make_set(options: ClusterOptions, name: str, replicas: int, pod: Object, storage: str) -> Object:
    claim: Object = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": storage}},
    }
    if options.storage_class:
        claim["storageClassName"] = options.storage_class
    spec = {
        "replicas": replicas,
        "serviceName": name,
        "selector": {"matchLabels": make_labels(name)},
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
        "template": {"metadata": {"labels": make_labels(name)}, "spec": pod},
        "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
    }
    return _make("apps/v1", "StatefulSet", name, spec=spec)


def _make_pod(
    options: ClusterOptions, name: str, containers: list[Object], *, grace: int, shared_memory: str
) -> Object:
    return {
        "serviceAccountName": f"insitu-{name}",
        "automountServiceAccountToken": name == HEAD,
        # Variables such as HEAD_PORT would reach the scripts of users.
        "enableServiceLinks": False,
        # Containers of a pod see each other's processes, and orphans are reaped, whatever has started them.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": grace,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            # Else each start would open all files of the home to the group, which `prepare` takes back.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [_make_container("prepare", options, ["insitu", "k8s", "prepare"], _SMALL)],
        "containers": containers,
        "volumes": [
            # The group of the pod may read it, too: so the kubelet makes it for a user who isn't root.
            {"name": "token", "secret": {"secretName": TOKEN_SECRET, "defaultMode": 0o400}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def make_task_pod(image: str, command: list[str], claim: str, resources: Object) -> Object:
    """Return the pod in which tasks run beside a store, whose disk `claim` names."""
    options = ClusterOptions(image=image)
    container = _make_container(TASKS, options, command, resources)
    memory = resources["requests"]["memory"]
    pod = _make_pod(options, STORE, [container], grace=TASKS_GRACE_SECONDS, shared_memory=memory)
    pod["volumes"].append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
    return pod


def _make_container(
    name: str, options: ClusterOptions, command: list[str], resources: Object, *, port: int | None = None
) -> Object:
    """Return a container. If it has a port, it is started again when nothing listens there."""
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    container: Object = {
        "name": name,
        "image": options.image,
        "command": command,
        "env": [
            # A folder that insitu makes: the disk's own belongs to root, and its group may write there.
            {"name": "INSITU_HOME", "value": f"{_DATA}/home"},
            {"name": "INSITU_TOKEN_FILE", "value": f"{_TOKENS}/{TOKEN_KEY}"},
            {"name": "HOME", "value": "/tmp"},
            {"name": "POD_IP", "valueFrom": address},
        ],
        "resources": resources,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "data", "mountPath": _DATA},
            {"name": "token", "mountPath": _TOKENS, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    if options.log_format != "text":
        container["env"].append({"name": LOG_FORMAT, "value": options.log_format})
    if port is not None:
        container["ports"] = [{"name": name, "containerPort": port, "protocol": "TCP"}]
        probe = {"tcpSocket": {"port": name}}
        container["startupProbe"] = {**probe, "periodSeconds": 2, "failureThreshold": 450}
        container["readinessProbe"] = {**probe, "periodSeconds": 5}
        container["livenessProbe"] = {**probe, "periodSeconds": 20, "failureThreshold": 6}
    return container


def _make_monitor() -> Object:
    spec = {
        "selector": {"matchLabels": make_labels(HEAD)},
        # Else Prometheus would put the name of its own job in the place of the label `job`.
        "endpoints": [{"port": "metrics", "interval": "15s", "honorLabels": True}],
    }
    return _make("monitoring.coreos.com/v1", "ServiceMonitor", "insitu", spec=spec)


def _make_dashboard() -> Object:
    """Return the dashboard, which Grafana's sidecar finds by its label."""
    made = _make("v1", "ConfigMap", "insitu-dashboard", data={"dashboard.json": DASHBOARD.read_text()})
    made["metadata"]["labels"] = {"grafana_dashboard": "1"}
    return made
