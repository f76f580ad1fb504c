"""Volumes and environment of a pod of `k8s_pods.py`."""

from __future__ import annotations

import os
import re
import subprocess
from base64 import b64decode
from pathlib import Path
from typing import TYPE_CHECKING

from hosts_lab import Host, HostsLab
from k8s_plane import Object
from kubernetes.client.exceptions import ApiException
from kubernetes.utils.quantity import parse_quantity

if TYPE_CHECKING:
    from k8s_kubelet import Node


class NotPossible(Exception):
    """Something that a pod needs isn't there (yet): a reason in one word and a message."""


class Sandbox(Host):
    """The network, host name and shared memory of a pod."""

    shared_size = "64m"

    def __init__(self, lab: HostsLab, number: int, name: str, disk: Path) -> None:
        super().__init__(lab, number)
        self.name, self.disk = name, disk

    def run(self, *command: str) -> None:
        subprocess.run(["nsenter", "-t", str(self.pid), "-m", *command], check=True, capture_output=True)


class Contents:
    """What a pod finds in its environment and its mounts."""

    def __init__(self, node: Node, found: Object) -> None:
        self.node, self.found = node, found
        self.spec, facts = found["spec"], found["metadata"]
        self.name, self.namespace, self.uid = facts["name"], facts["namespace"], facts["uid"]
        self.folder = node.host.disk / "pods" / self.uid
        self.volumes: dict[str, Path] = {}
        #: What its security context says of all its containers.
        self.security: Object = self.spec.get("securityContext", {})
        group = self.security.get("fsGroup")
        self.group = [] if group is None else [group]
        name = self.spec.get("hostname", self.name)
        self.sandbox = Sandbox(node.cluster.lab, node.cluster.take_number(), name, self.folder)

    def make_files(self) -> dict[str, str]:
        domain = f"{self.namespace}.svc.cluster.local svc.cluster.local cluster.local"
        own, server = self.sandbox.name, self.node.cluster.lab.gateway
        if "subdomain" in self.spec:
            own = f"{own}.{self.spec['subdomain']}.{self.namespace}.svc.cluster.local {own}"
        return {
            "/etc/hosts": f"127.0.0.1 localhost\n{self.sandbox.address} {own}\n",
            "/etc/resolv.conf": f"nameserver {server}\nsearch {domain}\noptions ndots:5\n",
            "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        }

    def make_environment(self, spec: Object, user: int) -> dict[str, str]:
        """Return the variables of a container. Raises NotPossible if a secret or a config map isn't there."""
        plane = self.node.cluster.plane
        found = {
            "PATH": self.node.cluster.path,
            "HOSTNAME": self.sandbox.name,
            "HOME": "/" if user else "/root",
            "KUBERNETES_SERVICE_HOST": plane.host,
            "KUBERNETES_SERVICE_PORT": str(plane.port),
        }
        for each in spec.get("envFrom", []):
            kind = "secretRef" if "secretRef" in each else "configMapRef"
            data = self._read(kind, each[kind]["name"], each[kind].get("optional", False))
            found |= {each.get("prefix", "") + key: value.decode() for key, value in data.items()}
        for each in spec.get("env", []):
            value = expand(each.get("value", ""), found)
            if "valueFrom" in each:
                got = self._resolve(spec, each["valueFrom"])
                if got is None:
                    continue
                value = got
            found[each["name"]] = value
        return found

    def _resolve(self, spec: Object, source: Object) -> str | None:
        if "fieldRef" in source:
            return self._field(source["fieldRef"]["fieldPath"])
        if "resourceFieldRef" in source:
            which, name = source["resourceFieldRef"]["resource"].split(".", 1)
            divisor = parse_quantity(source["resourceFieldRef"].get("divisor", "1") or "1") or 1
            amount = parse_quantity(spec["resources"].get(which, {}).get(name, 0))
            return str(int(-(-amount // divisor)))
        (kind, reference), *_ = source.items()
        data = self._read(kind, reference["name"], reference.get("optional", False))
        if reference["key"] not in data and not reference.get("optional"):
            why = f"couldn't find key {reference['key']} in {kind} {self.namespace}/{reference['name']}"
            raise NotPossible("CreateContainerConfigError", why)
        return data[reference["key"]].decode() if reference["key"] in data else None

    def _field(self, path: str) -> str:
        own = {
            "podIP": self.sandbox.address,
            "podIPs": self.sandbox.address,
            "hostIP": self.node.host.address,
        }
        if path.startswith("status."):
            return own[path.removeprefix("status.")]
        if parts := re.fullmatch(r"metadata\.(labels|annotations)(?:\['(.+)'\])?", path):
            among = self.found["metadata"].get(parts[1], {})
            return (
                str(among.get(parts[2], ""))
                if parts[2]
                else "".join(f'{k}="{v}"\n' for k, v in among.items())
            )
        value = self.found
        for part in path.split("."):
            value = value[part]
        return str(value)

    def _read(self, kind: str, name: str, optional: bool) -> dict[str, bytes]:
        """Return the contents of a secret or config map."""
        secret = kind.startswith("secret")
        where = f"/api/v1/namespaces/{self.namespace}/{'secrets' if secret else 'configmaps'}/{name}"
        try:
            found = self.node.ask("GET", where)
        except ApiException as error:
            if error.status != 404:
                raise
            if optional:
                return {}
            why = f'{"secret" if secret else "configmap"} "{name}" not found'
            raise NotPossible("CreateContainerConfigError", why) from None
        if secret:
            return {key: b64decode(value) for key, value in (found.get("data") or {}).items()}
        data = {key: value.encode() for key, value in (found.get("data") or {}).items()}
        return data | {key: b64decode(value) for key, value in (found.get("binaryData") or {}).items()}

    def make_volumes(self) -> None:
        """Make what isn't made yet. Raises NotPossible if something isn't there."""
        for volume in self.spec.get("volumes", []):
            if volume["name"] not in self.volumes:
                path = self.folder / "volumes" / volume["name"]
                self.volumes[volume["name"]] = self._make_volume(volume, path)

    def _make_volume(self, volume: Object, path: Path) -> Path:
        if "persistentVolumeClaim" in volume:
            where = f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims"
            claim = self.node.ask("GET", f"{where}/{volume['persistentVolumeClaim']['claimName']}")
            if claim.get("status", {}).get("phase") != "Bound":
                raise NotPossible("FailedMount", f"claim {claim['metadata']['name']} isn't bound")
            disk = self.node.ask("GET", f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}")
            return self._own(Path(disk["spec"]["local"]["path"]))
        if "hostPath" in volume:
            path = self.node.host.disk / "root" / volume["hostPath"]["path"].lstrip("/")
            path.mkdir(parents=True, exist_ok=True)
            return path
        path.mkdir(parents=True, exist_ok=True)
        if "emptyDir" in volume:
            empty = volume["emptyDir"]
            if empty.get("medium") == "Memory":
                size = [f"size={int(parse_quantity(empty['sizeLimit']))}"] if "sizeLimit" in empty else []
                options = ",".join(["mode=0777", *size, *(f"gid={each}" for each in self.group)])
                self.sandbox.run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path))
                return path
            path.chmod(0o777)
            return self._own(path)
        sources = volume["projected"]["sources"] if "projected" in volume else [volume]
        body = next(
            volume[kind] for kind in ("projected", "secret", "configMap", "downwardAPI") if kind in volume
        )
        for source in sources:
            for name, (data, mode) in self._contents(source).items():
                file = path / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
                file.chmod(mode or body.get("defaultMode", 0o644))
        return self._own(path, 0o440)

    def _contents(self, source: Object) -> dict[str, tuple[bytes, int | None]]:
        """Return the files that a source has: contents and modes."""
        if "serviceAccountToken" in source:
            wanted = source["serviceAccountToken"]
            account = self.spec.get("serviceAccountName", "default")
            audience = [wanted["audience"]] if "audience" in wanted else []
            bound = {"apiVersion": "v1", "kind": "Pod", "name": self.name, "uid": self.uid}
            spec = {"expirationSeconds": wanted.get("expirationSeconds", 3600), "boundObjectRef": bound}
            body = {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {**spec, "audiences": audience},
            }
            where = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{account}/token"
            token = self.node.ask("POST", where, body)["status"]["token"].encode()
            return {wanted["path"]: (token, 0o600 if "runAsUser" in self.security else 0o644)}
        if "downwardAPI" in source:
            items = source["downwardAPI"].get("items", [])
            return {
                each["path"]: (self._field(each["fieldRef"]["fieldPath"]).encode(), each.get("mode"))
                for each in items
            }
        kind = "secret" if "secret" in source else "configMap"
        body = source[kind]
        try:
            data = self._read(kind, body.get("secretName", body.get("name", "")), body.get("optional", False))
        except NotPossible as error:
            raise NotPossible("FailedMount", error.args[1]) from None
        items = body.get("items") or [{"key": key, "path": key} for key in data]
        missing = [each["key"] for each in items if each["key"] not in data]
        if missing and not body.get("optional"):
            raise NotPossible("FailedMount", f"references non-existent keys: {', '.join(missing)}")
        return {each["path"]: (data[each["key"]], each.get("mode")) for each in items if each["key"] in data}

    def _own(self, path: Path, mask: int = 0o660) -> Path:
        """Give a volume to the pod's group, and tokens to its user."""
        for group in self.group:
            for each in (path, *path.rglob("*")):
                os.chown(each, -1, group, follow_symlinks=False)
                if not each.is_symlink():
                    each.chmod(each.stat().st_mode | (0o2770 if each.is_dir() else mask))
        if "runAsUser" in self.security:
            for each in path.glob("token"):
                os.chown(each, self.security["runAsUser"], -1)
        return path


def expand(text: str, values: dict[str, str]) -> str:
    """Put values in place of `$(NAME)`, as Kubernetes does."""
    return re.sub(
        r"\$(\$|\((\w+)\))", lambda found: "$" if found[1] == "$" else values.get(found[2], found[0]), text
    )
