"""Calls the Kubernetes API, with the official client's way to read kubeconfigs and to sign in.

The client itself has a class for each kind of object, which takes a second to load; here a call is a path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlencode

from insitu.base.errors import ClusterError, InputError
from insitu.extensions.kubernetes.failures import (
    NOT_FOUND,
    ApiFailure,
    explain,
    explain_unreachable,
    read_failure,
)
from insitu.extensions.kubernetes.objects import MANAGER, Object

_SECONDS = 30.0
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TRIES = 3
_RESOURCES = {
    "Namespace": ("api/v1", "namespaces"),
    "Node": ("api/v1", "nodes"),
    "PersistentVolume": ("api/v1", "persistentvolumes"),
    "StorageClass": ("apis/storage.k8s.io/v1", "storageclasses"),
    "Secret": ("api/v1", "secrets"),
    "ConfigMap": ("api/v1", "configmaps"),
    "Service": ("api/v1", "services"),
    "ServiceAccount": ("api/v1", "serviceaccounts"),
    "Pod": ("api/v1", "pods"),
    "PersistentVolumeClaim": ("api/v1", "persistentvolumeclaims"),
    "Event": ("api/v1", "events"),
    "StatefulSet": ("apis/apps/v1", "statefulsets"),
    "PodDisruptionBudget": ("apis/policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "Role": ("apis/rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "ServiceMonitor": ("apis/monitoring.coreos.com/v1", "servicemonitors"),
    "Job": ("apis/batch/v1", "jobs"),
    "JobSet": ("apis/jobset.x-k8s.io/v1alpha2", "jobsets"),
    "ClusterQueue": ("apis/kueue.x-k8s.io/v1beta1", "clusterqueues"),
    "Workload": ("apis/kueue.x-k8s.io/v1beta1", "workloads"),
    "LocalQueue": ("apis/kueue.x-k8s.io/v1beta1", "localqueues"),
}
_WITHOUT_NAMESPACE = ("Namespace", "Node", "PersistentVolume", "StorageClass", "ClusterQueue")


def path_of(kind: str, namespace: str, name: str = "") -> str:
    """Return the path of an object, or of all of its kind."""
    prefix, plural = _RESOURCES[kind]
    inside = "" if kind in _WITHOUT_NAMESPACE else f"/namespaces/{quote(namespace)}"
    return f"/{prefix}{inside}/{plural}" + (f"/{quote(name)}" if name else "")


class Transport(Protocol):
    """What carries calls to an API server."""

    #: The server's address.
    server: str
    #: The namespace of the context.
    namespace: str

    def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        """Return the status and the body of an answer. Raises OSError if none comes."""

    def execute(
        self, namespace: str, pod: str, container: str, command: Sequence[str]
    ) -> tuple[int, str, str]:
        """Return the exit code, the output and the errors of a command in a container. Raises OSError."""


class Client:
    """The API of a cluster, seen from a namespace. All calls raise InsituError."""

    def __init__(self, transport: Transport, namespace: str) -> None:
        self._transport = transport
        self.namespace = namespace or transport.namespace

    def find(self, kind: str, name: str) -> Object | None:
        """Return an object; None if there is none."""
        try:
            return self._call("GET", path_of(kind, self.namespace, name))
        except ApiFailure as failure:
            if failure.status == NOT_FOUND:
                return None
            raise explain(failure, "get", f"{kind} {name}", self.namespace) from failure

    def list(self, kind: str, selector: str = "") -> list[Object]:
        """Return all objects of a kind, or those with labels."""
        query = {"labelSelector": selector} if selector else {}
        try:
            return list(self._call("GET", path_of(kind, self.namespace), query).get("items") or ())
        except ApiFailure as failure:
            raise explain(failure, "list", f"{kind}s", self.namespace) from failure

    def apply(self, each: Object, *, dry_run: bool = False) -> Object:
        """Apply an object on the server's side; with `dry_run` only check whether it could be. Returns it as
        it is then, or would be."""
        name = each["metadata"]["name"]
        query = {"fieldManager": MANAGER, "force": "true", "fieldValidation": "Strict"}
        if dry_run:
            query["dryRun"] = "All"
        path = path_of(each["kind"], self.namespace, name)
        try:
            return self._call("PATCH", path, query, each, "application/apply-patch+yaml")
        except ApiFailure as failure:
            raise explain(failure, "patch", f"{each['kind']} {name}", self.namespace) from failure

    def create(self, each: Object) -> Object:
        """Make an object that isn't there. Returns it as it is then."""
        name = each["metadata"]["name"]
        try:
            return self._call("POST", path_of(each["kind"], self.namespace), {"fieldManager": MANAGER}, each)
        except ApiFailure as failure:
            raise explain(failure, "create", f"{each['kind']} {name}", self.namespace) from failure

    def set_replicas(self, name: str, replicas: int) -> None:
        """Change how many pods a StatefulSet has."""
        path = f"{path_of('StatefulSet', self.namespace, name)}/scale"
        change = {"spec": {"replicas": replicas}}
        try:
            self._call("PATCH", path, {"fieldManager": MANAGER}, change, "application/merge-patch+json")
        except ApiFailure as failure:
            raise explain(failure, "patch", f"the scale of StatefulSet {name}", self.namespace) from failure

    def delete(self, kind: str, name: str) -> bool:
        """Delete an object, with what it owns. Returns False if it wasn't there."""
        try:
            self._call(
                "DELETE", path_of(kind, self.namespace, name), body={"propagationPolicy": "Background"}
            )
        except ApiFailure as failure:
            if failure.status == NOT_FOUND:
                return False
            raise explain(failure, "delete", f"{kind} {name}", self.namespace) from failure
        return True

    def serves(self, group_version: str) -> bool:
        """Return whether the server has an API, such as kueue.x-k8s.io/v1beta1."""
        try:
            self._call("GET", f"/apis/{group_version}")
        except ApiFailure as failure:
            if failure.status == NOT_FOUND:
                return False
            raise explain(failure, "read", f"the API {group_version}", self.namespace) from failure
        return True

    def run(self, pod: str, container: str, command: Sequence[str]) -> tuple[int, str, str]:
        """Run a command in a container. Returns its exit code, its output and its errors."""
        try:
            return self._transport.execute(self.namespace, pod, container, command)
        except ApiFailure as failure:
            raise explain(failure, "create", f"pods/exec of {pod}", self.namespace) from failure
        except OSError as error:
            raise ClusterError(
                f"Commands must run in pod {pod}. Received: {error}. See `insitu k8s status`, and try again"
            ) from error

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        url = f"{path}?{urlencode(query)}" if query else path
        headers = {"Accept": "application/json", "Content-Type": content_type}
        data = None if body is None else json.dumps(body).encode()
        for left in reversed(range(_TRIES)):
            try:
                status, answer = self._transport.send(method, url, headers, data)
            except OSError as error:
                raise explain_unreachable(self._transport.server, str(error)) from error
            # Of several servers one may be starting. Applying again is the same; creating isn't.
            if status < 500 or method == "POST" or not left:
                break
        if status >= 300:
            raise read_failure(status, answer)
        found = json.loads(answer)
        if not isinstance(found, dict):
            raise explain_unreachable(self._transport.server, "an answer that is no object")
        return found


def _import_library() -> tuple[Any, Any]:
    """Return `client` and `config` of the official client. Raises InputError."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise InputError(
            "`insitu k8s` and `--engine k8s` need the client of Kubernetes. Received: an environment without "
            "it. Install it: pip install 'insitu[kubernetes]'"
        ) from None
    return client, config


class KubeconfigTransport:
    """Calls the server that a context of the kubeconfig names, as the official client would."""

    #: How long it waits for an answer.
    seconds = _SECONDS

    def __init__(self, context: str) -> None:
        """Raise InputError without the client, a kubeconfig or this context."""
        client, config = _import_library()
        import yaml  # comes with it

        try:
            contexts, current = config.list_kube_config_contexts()
            names = [each["name"] for each in contexts]
            if context and context not in names:
                raise InputError(
                    f"--context is a context of the kubeconfig: {', '.join(names)}. Received: {context}"
                )
            found = next((each for each in contexts if each["name"] == context), current)
            configuration = client.Configuration()
            config.load_kube_config(context=context or None, client_configuration=configuration)
        except (config.ConfigException, yaml.YAMLError, OSError, TypeError, ValueError) as error:
            why = " ".join(str(error).split()).rstrip(".")
            raise InputError(
                "A kubeconfig must name the cluster: $KUBECONFIG, or ~/.kube/config. Received: "
                f"{why}. "
                f"Have one written, such as by the tool of your provider; `kubectl config view` shows it"
            ) from error
        self._client = client.ApiClient(configuration)
        self.server = str(configuration.host)
        self.namespace = str((found.get("context") or {}).get("namespace") or "default")

    @classmethod
    def of_pod(cls) -> KubeconfigTransport:
        """Return calls with the account of the pod in which this process runs. Raises InputError without the
        client, ClusterError elsewhere."""
        client, config = _import_library()
        found = cls.__new__(cls)
        configuration = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=configuration)
            found.namespace = (_ACCOUNT / "namespace").read_text().strip()
        except (config.ConfigException, OSError) as error:
            raise ClusterError(
                f"--engine k8s is for the pod of the head that `insitu k8s up` has made. Received: {error}. "
                f"Give the command there, or to its head by --cluster"
            ) from error
        found._client, found.server = client.ApiClient(configuration), str(configuration.host)
        return found

    def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        """Return the status and the body of an answer. Raises OSError if none comes."""
        from urllib3 import Retry
        from urllib3.exceptions import HTTPError

        signed = {k: v["value"] for k, v in self._list_signs() if v.get("value")}
        try:
            answer = self._client.rest_client.pool_manager.request(
                method,
                f"{self.server}{path}",
                headers={**headers, **signed},
                body=body,
                timeout=self.seconds,
                retries=Retry(connect=1, read=0, redirect=0),
            )
        except HTTPError as error:
            raise OSError(str(getattr(error, "reason", None) or error)) from error
        return int(answer.status), bytes(answer.data)

    def _list_signs(self) -> list[tuple[str, dict[str, Any]]]:
        settings = self._client.configuration.auth_settings()
        return [(str(each["key"]), each) for each in settings.values()]

    def execute(
        self, namespace: str, pod: str, container: str, command: Sequence[str]
    ) -> tuple[int, str, str]:
        """Return the exit code, the output and the errors of a command in a container. Raises OSError."""
        from kubernetes import client
        from kubernetes.stream import stream

        try:
            channel = stream(
                client.CoreV1Api(self._client).connect_get_namespaced_pod_exec,
                pod,
                namespace,
                container=container,
                command=[*command],
                stderr=True,
                stdin=False,
                stdout=True,
                tty=False,
                _preload_content=False,
            )
            try:
                channel.run_forever()
                output, errors, code = channel.read_stdout(), channel.read_stderr(), channel.returncode
            finally:
                channel.sock.shutdown()  # `close` leaves the socket open if the other side has begun to close
        except client.ApiException as error:
            if error.status:
                raise read_failure(
                    int(error.status), str(error.body or error.reason or "").encode()
                ) from error
            raise OSError(str(error.reason)) from error
        return 1 if code is None else int(code), output, errors
