"""An API server of Kubernetes in memory: objects by path, and answers that a test sets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from insitu.extensions.kubernetes.client import Client, path_of

Object = dict[str, Any]


def status_of(code: int, reason: str, message: str, **details: Any) -> tuple[int, bytes]:
    """Return an answer as the API server gives it."""
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
    return code, json.dumps({**body, "details": details}).encode()


class FakeApi:
    """A `Transport`. Pods of applied sets appear when `make_pods` is called."""

    server = "https://fake:6443"
    namespace = "team"

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        #: All calls that change something: (method, path).
        self.changes: list[tuple[str, str]] = []
        #: Answers by a pattern of `METHOD path?query`, which come before anything is done.
        self.answers: dict[str, tuple[int, bytes] | OSError] = {}
        self.groups = {"apps/v1"}
        self.commands: list[list[str]] = []
        self.run: Callable[[Sequence[str]], tuple[int, str, str]] = lambda command: (0, "", "")
        self.put("Namespace", "team")
        self.put("StorageClass", "fast", annotations={"storageclass.kubernetes.io/is-default-class": "true"})
        self.put("Node", "n1", status={"allocatable": {"cpu": "4"}})

    def client(self) -> Client:
        return Client(self, "")

    def put(self, kind: str, name: str, *, annotations: Object | None = None, **more: Any) -> Object:
        made: Object = {"kind": kind, "metadata": {"name": name, "annotations": annotations or {}}, **more}
        self.objects[path_of(kind, self.namespace, name)] = made
        return made

    def get(self, kind: str, name: str) -> Object:
        return self.objects[path_of(kind, self.namespace, name)]

    def names(self, kind: str) -> list[str]:
        start = path_of(kind, self.namespace) + "/"
        return sorted(path.removeprefix(start) for path in self.objects if path.startswith(start))

    def make_pods(self, *, ready: bool = True) -> None:
        """Make what controllers and nodes would: pods and claims of each set, and no others."""
        for name in self.names("Pod"):
            del self.objects[path_of("Pod", self.namespace, name)]
        for name in self.names("StatefulSet"):
            spec = self.get("StatefulSet", name)["spec"]
            for number in range(spec["replicas"]):
                state = {"conditions": [{"type": "Ready", "status": str(ready)}]}
                labels = spec["template"]["metadata"]["labels"]
                pod = self.put("Pod", f"{name}-{number}", spec={"nodeName": "n1"}, status=state)
                pod["metadata"]["labels"] = labels
                claim = spec["volumeClaimTemplates"][0]["spec"]
                disk = self.put("PersistentVolumeClaim", f"data-{name}-{number}", spec=claim)
                disk["metadata"]["labels"] = labels

    def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        for pattern, answer in self.answers.items():
            if re.search(pattern, f"{method} {path}"):
                if isinstance(answer, OSError):
                    raise answer
                return answer
        address = urlsplit(path)
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        dry = "dryRun" in query
        if method != "GET" and not dry:
            self.changes.append((method, address.path))
        given = None if body is None else json.loads(body)
        if method == "GET":
            return self._read(address.path, query.get("labelSelector", ""))
        if method == "PATCH" and address.path.endswith("/scale"):
            self.objects[address.path.removesuffix("/scale")]["spec"]["replicas"] = given["spec"]["replicas"]
        elif method == "PATCH" and not dry:
            assert query["fieldManager"] == "insitu" and headers["Content-Type"].startswith(
                "application/apply"
            )
            self.objects[address.path] = given
        elif method == "POST":
            given["metadata"]["uid"] = f"uid-{len(self.changes)}"
            self.objects[f"{address.path}/{given['metadata']['name']}"] = given
            self.after(method, address.path)
            return 201, json.dumps(given).encode()
        elif method == "DELETE" and self.objects.pop(address.path, None) is None:
            return status_of(404, "NotFound", "not found")
        if method == "PATCH" and dry:
            return 200, json.dumps({**self.objects.get(address.path, {}), **(given or {})}).encode()
        self.after(method, address.path)
        return 200, b"{}"

    def after(self, method: str, path: str) -> None:
        """Do what a cluster would after a change; tests put something else here."""

    def _read(self, path: str, selector: str) -> tuple[int, bytes]:
        if path.startswith("/apis/") and path.count("/") == 3:
            known = path.removeprefix("/apis/") in self.groups
            return (200, b"{}") if known else status_of(404, "NotFound", "the server could not find it")
        if path in self.objects:
            return 200, json.dumps(self.objects[path]).encode()
        if path.rsplit("/", 1)[-1].endswith("s") or path.endswith("storageclasses"):
            found = [o for at, o in self.objects.items() if at.rpartition("/")[0] == path]
            wanted = [each.partition("=") for each in selector.split(",") if each]
            found = [
                o
                for o in found
                for labels in (o["metadata"].get("labels") or {},)
                if all(key in labels and (not equal or labels[key] == v) for key, equal, v in wanted)
            ]
            return 200, json.dumps({"items": found}).encode()
        return status_of(404, "NotFound", f"{path} not found")

    def execute(
        self, namespace: str, pod: str, container: str, command: Sequence[str]
    ) -> tuple[int, str, str]:
        assert (namespace, pod, container) == ("team", "head-0", "head")
        self.commands.append([*command])
        return self.run(command)
