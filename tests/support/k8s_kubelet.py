"""Nodes for a control plane of `k8s_plane.py`, on which pods are processes of this machine.

    with Cluster(folder, nodes=2) as cluster:
        cluster.plane.apply(pod)
        cluster.wait_phase("default", "pod", "Succeeded")
        cluster.nodes[0].kill()

`python tests/support/k8s_kubelet.py FOLDER --nodes 2 [--gpus 1] [--queues]` keeps one up until a signal.

A pod has a network, an address, a host name and a /dev/shm (64 MiB) of its own. Each of its containers has
processes and mounts of its own over this machine's root (`k8s_container.py`). The command is the container's
first process, so it ignores signals for which it has no handler, as in a real container. An image is but a
name: commands are found in `Cluster.path`, and `Cluster.images`, if given, names those that can be pulled.
Volumes are emptyDir, claims, secrets, config maps, projected ones and hostPath (a folder of the node); none
is updated later. Claims of the storage class `disk` become folders of the node that the scheduler has chosen.

Names of headless Services and of their pods resolve as in a cluster. There is no kube-proxy: the name of
another Service resolves to the addresses of its ready pods, so its ports must be theirs, and its cluster IP
leads nowhere. `kubectl logs` works while the pod's node is up; NODE.disk/logs keeps all. Not there: exec,
limits of memory and processors, sidecars, service links in environments, network policies, devices behind
nvidia.com/gpu. A restart waits 0.2 s, and twice as long each time, up to 5 s (Kubernetes: 10 s to 5 min).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import http.server
import json
import os
import shutil
import signal
import socket
import socketserver
import ssl
import struct
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hosts_lab import Host, HostsLab
from k8s_binaries import KUBERNETES
from k8s_plane import NO_ANSWER, ControlPlane, Object, now, wait_for
from k8s_pods import Pod
from kubernetes.client.exceptions import ApiException

_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_LOGS_PORT = 10250
_LIBC = ctypes.CDLL(None, use_errno=True)
_TICK = 0.1
_CLASS = "disk"
_PROVISIONER = "insitu.test/disk"


class Node:
    """A node: a host whose kubelet runs in this process."""

    def __init__(self, cluster: Cluster, host: Host, capacity: dict[str, str]) -> None:
        self.cluster, self.host, self.name = cluster, host, host.name
        self.capacity = {"cpu": "8", "memory": "16Gi", "pods": "60", **capacity}
        self.on = False
        self.pods: dict[str, Pod] = {}
        self.path = f"/api/v1/nodes/{self.name}"
        self._cut = False
        self._boot = ""

    def ask(self, method: str, path: str, body: Object | None = None) -> Object:
        """Ask the API server, as long as the node is on and has its link."""
        if self._cut or not self.on:
            raise ConnectionError(f"{self.name} has no network")
        kind = "strategic-merge-patch+json" if method == "PATCH" else "json"
        return self.cluster.plane.api.ask(method, path, body, kind)

    def start(self) -> None:
        """Switch it on (again): its pods resume as their restart policies say."""
        if not self.host.pid:
            self.host.start()
        self.on, self._boot, self.pods = True, str(uuid.uuid4()), {}
        self._register()
        acts = (self._watch, self._beat, self._serve_logs)
        threads = [threading.Thread(target=act, args=(self._boot,), daemon=True) for act in acts]
        for thread in threads:
            thread.start()
        self._logs = threads[-1]

    def kill(self) -> None:
        """Cut its power: all its processes end, and nothing is said to anybody."""
        self.on = False
        for pod in list(self.pods.values()):
            with contextlib.suppress(ProcessLookupError):  # it is about to end by itself
                os.kill(pod.sandbox.pid or self.host.pid, signal.SIGKILL)
        self.host.kill()
        for pod in list(self.pods.values()):
            pod.join()
        self._logs.join(30)
        self.host.pid = 0

    def reboot(self) -> None:
        self.kill()
        self.start()

    def cut(self) -> None:
        """Take its network away: processes keep running, and can't reach each other on other nodes."""
        self._cut = True
        for host in (self.host, *(pod.sandbox for pod in list(self.pods.values()))):
            host.cut()

    def heal(self) -> None:
        """Give it its network back."""
        for host in (self.host, *(pod.sandbox for pod in list(self.pods.values()))):
            host.heal()
        self._cut = False

    def cordon(self, value: bool = True) -> None:
        """Have no new pods placed on it, or have them placed again."""
        self.cluster.plane.api.patch(self.path, {"spec": {"unschedulable": value}})

    def drain(self) -> None:
        """Evict its pods, as their budgets for disruptions allow."""
        self.cordon()
        for pod in list(self.pods.values()):
            wait_for(lambda pod=pod: self.evict(pod.namespace, pod.name))

    def evict(self, namespace: str, name: str) -> bool:
        """Ask for a pod's eviction; return whether its budget for disruptions allows it."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
        }
        try:
            self.cluster.plane.api.ask("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", body)
        except ApiException as error:
            if error.status not in (404, 429):
                raise
            return error.status == 404
        return True

    def mark_out_of_service(self) -> None:
        """Tell Kubernetes that it is off for sure, so that its pods are forgotten."""
        taint = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
        taints = self.cluster.plane.get(self.path)["spec"].get("taints", [])
        self.cluster.plane.api.patch(self.path, {"spec": {"taints": [*taints, taint]}})

    def _register(self) -> None:
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
        }
        facts = {"name": self.name, "labels": labels}
        if not self.cluster.plane.exists(self.path):
            self.ask("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": facts})
            lease = {
                "holderIdentity": self.name,
                "leaseDurationSeconds": 40,
                "renewTime": now("microseconds"),
            }
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self.name}}
            self.ask("POST", _LEASES, {**body, "spec": lease})
        self._write_status()

    def _write_status(self) -> None:
        facts = ("machineID", "systemUUID", "kernelVersion", "osImage", "containerRuntimeVersion")
        info = {
            **dict.fromkeys((*facts, "kubeProxyVersion"), "test"),
            "kubeletVersion": f"v{KUBERNETES}",
            "bootID": self._boot,
            "operatingSystem": "linux",
            "architecture": "amd64",
        }
        beat = {"lastHeartbeatTime": now(), "reason": "Test", "message": ""}
        conditions = [
            {"type": kind, "status": str(kind == "Ready"), **beat}
            for kind in ("Ready", "MemoryPressure", "DiskPressure", "PIDPressure")
        ]
        addresses = [
            {"type": "InternalIP", "address": self.host.address},
            {"type": "Hostname", "address": self.name},
        ]
        status = {
            "capacity": self.capacity,
            "allocatable": self.capacity,
            "conditions": conditions,
            "addresses": addresses,
            "daemonEndpoints": {"kubeletEndpoint": {"Port": _LOGS_PORT}},
            "nodeInfo": info,
        }
        self.ask("PATCH", f"{self.path}/status", {"status": status})

    def _is_current(self, boot: str) -> bool:
        return self.on and self._boot == boot

    def _beat(self, boot: str) -> None:
        last = time.monotonic()
        while self._is_current(boot):
            with contextlib.suppress(*NO_ANSWER, ApiException):
                self.ask("PATCH", f"{_LEASES}/{self.name}", {"spec": {"renewTime": now("microseconds")}})
                # A node that was thought lost isn't ready before it says so.
                if time.monotonic() > last + 2:
                    self._write_status()
                    last = time.monotonic()
            time.sleep(1)

    def _watch(self, boot: str) -> None:
        while self._is_current(boot):
            seen, synced = set(), False
            with contextlib.suppress(*NO_ANSWER, ApiException):
                for kind, found in self.cluster.plane.api.watch("/api/v1/pods", f"spec.nodeName={self.name}"):
                    if self._cut or not self._is_current(boot):
                        break
                    if kind == "SYNCED":
                        synced = True
                        for uid, pod in list(self.pods.items()):
                            if uid not in seen:
                                pod.removed = True
                        continue
                    uid = found["metadata"]["uid"]
                    if not synced:
                        seen.add(uid)
                    if uid in self.pods:
                        self.pods[uid].found = found
                    elif kind != "DELETED":
                        self.pods[uid] = Pod(self, found)
                        self.pods[uid].start()
                    if kind == "DELETED" and uid in self.pods:
                        self.pods.pop(uid).removed = True
            time.sleep(0.2)

    def _serve_logs(self, boot: str) -> None:
        """Serve logs to the API server, at the node's address, in its network."""
        descriptor = os.open(f"/run/netns/{self.host.namespace}", os.O_RDONLY)
        assert _LIBC.setns(descriptor, 0x40000000) == 0
        os.close(descriptor)
        handler = type("Handler", (_LogHandler,), {"node": self})
        with http.server.ThreadingHTTPServer((self.host.address, _LOGS_PORT), handler) as server:
            server.daemon_threads = True
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self.cluster.certificate)
            wrap = context.wrap_socket
            server.socket = wrap(server.socket, server_side=True, do_handshake_on_connect=False)
            server.timeout = 0.2
            while self._is_current(boot):
                server.handle_request()


class _LogHandler(http.server.BaseHTTPRequestHandler):
    node: Node

    def do_GET(self) -> None:
        address = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(address.query))
        _, _, namespace, name, container = address.path.split("/")
        pods = [pod for pod in self.node.pods.values() if (pod.namespace, pod.name) == (namespace, name)]
        found = next(
            (each for pod in pods for each in (*pod.first, *pod.containers) if each.name == container), None
        )
        path = found.log if found else Path()
        if found and query.get("previous") == "true":
            path = path.with_name(f"{found.restarts - 1}.log")
        if found is None or not path.is_file() or "timestamps" in query or "sinceSeconds" in query:
            return self.send_error(404 if found is None or not path.is_file() else 400)
        self.send_response(200)
        self.end_headers()
        with path.open("rb") as file:
            if "tailLines" in query:
                count = int(query["tailLines"])
                self.wfile.write(b"".join(file.readlines()[-count:] if count else []))
            while True:
                running = found.process is not None and found.log == path
                shutil.copyfileobj(file, self.wfile)
                self.wfile.flush()
                if query.get("follow") != "true" or not running or not self.node.on:
                    return None
                time.sleep(_TICK)

    def log_message(self, *_: Any) -> None:
        pass


class _Names(socketserver.BaseRequestHandler):
    """Answers questions for the addresses of names, as a cluster's DNS does."""

    cluster: Cluster

    def handle(self) -> None:
        query, sock = self.request
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode().lower())
            at += query[at] + 1
        question = query[12 : at + 5]
        kind = struct.unpack(">H", question[-4:-2])[0]
        found = self.cluster.resolve(".".join(labels))
        addresses = (found or []) if kind == 1 else []
        # An answer, without recursion; 3: there is no such name.
        head = struct.pack(">HHHHH", 0x8580 | (3 if found is None else 0), 1, len(addresses), 0, 0)
        record = struct.pack(">HHHIH", 0xC00C, 1, 1, 1, 4)
        sock.sendto(
            query[:2] + head + question + b"".join(record + socket.inet_aton(each) for each in addresses),
            self.client_address,
        )


class Cluster:
    """A control plane and nodes. `capacity` is added to that of each node: {"nvidia.com/gpu": "2"}."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 2,
        capacity: dict[str, str] | None = None,
        path: str = f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        images: Sequence[str] | None = None,
        entrypoint: Sequence[str] = (),
    ) -> None:
        self.lab = HostsLab(folder / "lab", nodes)
        self.plane = ControlPlane(folder / "plane", self.lab.gateway)
        #: PATH in all containers, and the command of those without one.
        self.path, self.entrypoint = path, entrypoint
        self.images = images
        self.numbers = list(range(20, 250))
        self.errors: list[str] = []
        self.nodes = [Node(self, host, capacity or {}) for host in self.lab.hosts]
        self._stack = contextlib.ExitStack()
        self._known: dict[str, list[str] | None] = {}
        self._on = True

    def __enter__(self) -> Cluster:
        self.lab.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.lab)
            stack.enter_context(self.plane)
            stack.callback(self._stop)
            self.certificate = self.plane.authority.sign(
                "kubelet", names=[node.host.address for node in self.nodes]
            )
            handler = type("Handler", (_Names,), {"cluster": self})
            names = stack.enter_context(socketserver.ThreadingUDPServer((self.lab.gateway, 53), handler))
            names.daemon_threads = True
            threading.Thread(target=names.serve_forever, args=(_TICK,), daemon=True).start()
            stack.callback(names.shutdown)
            facts = {"name": _CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
            self.plane.apply(
                {
                    "apiVersion": "storage.k8s.io/v1",
                    "kind": "StorageClass",
                    "metadata": facts,
                    "provisioner": _PROVISIONER,
                    "volumeBindingMode": "WaitForFirstConsumer",
                    "reclaimPolicy": "Delete",
                }
            )
            for node in self.nodes:
                node.start()
            threading.Thread(target=self._provision, daemon=True).start()
            for node in self.nodes:
                wait_for(
                    lambda node=node: "taints" not in self.plane.get(node.path)["spec"],
                    why=self.plane.read_logs,
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        assert not self.errors, "\n".join(self.errors)

    def _stop(self) -> None:
        self._on = False
        for node in self.nodes:
            if node.on:
                node.kill()

    def take_number(self) -> int:
        """Return the last part of an address that no pod has."""
        return self.numbers.pop(0)

    def find(self, namespace: str, name: str) -> Pod:
        """Return a pod as its node knows it: its processes, folders and addresses."""
        pods = [pod for node in self.nodes for pod in list(node.pods.values())]
        return next(pod for pod in pods if (pod.namespace, pod.name) == (namespace, name))

    def get_pod(self, namespace: str, name: str) -> Object:
        return self.plane.get(f"/api/v1/namespaces/{namespace}/pods/{name}")

    def wait_phase(self, namespace: str, name: str, phase: str) -> Object:
        """Wait until a pod is in a phase, or Ready; return it."""

        def found() -> Object:
            pod = self.get_pod(namespace, name)
            status = pod.get("status", {})
            ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", []))
            return pod if status.get("phase") == phase or (phase == "Ready" and ready) else {}

        why = lambda: json.dumps([self.get_pod(namespace, name).get("status"), self.errors], indent=1)  # noqa: E731
        result: Object = wait_for(found, why=why)
        return result

    def resolve(self, name: str) -> list[str] | None:
        """Return the addresses of a name of the cluster; None if there is no such name."""
        parts = name.split(".")
        if parts[-3:] != ["svc", "cluster", "local"] or len(parts) not in (5, 6):
            return None
        namespace, service, host = parts[-4], parts[-5], parts[0] if len(parts) == 6 else ""
        if (namespace, service) == ("default", "kubernetes"):
            return [self.plane.host]
        # While the API server is away, names stay what they were.
        with contextlib.suppress(*NO_ANSWER, ApiException):
            self._known[name] = self._look_up(namespace, service, host)
        return self._known.get(name)

    def _look_up(self, namespace: str, service: str, host: str) -> list[str] | None:
        if not self.plane.exists(f"/api/v1/namespaces/{namespace}/services/{service}"):
            return None
        query = urllib.parse.quote(f"kubernetes.io/service-name={service}")
        where = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector={query}"
        points = [each for slice_ in self.plane.get(where)["items"] for each in slice_["endpoints"] or []]
        found = [
            point["addresses"][0]
            for point in points
            if point["conditions"].get("ready", True) and host in ("", point.get("hostname"))
        ]
        return found if found or not host else None

    def _provision(self) -> None:
        """Make a folder for each claim of our class whose node is known; remove those of deleted claims."""
        while self._on:
            with contextlib.suppress(*NO_ANSWER, ApiException):
                for claim in self.plane.get("/api/v1/persistentvolumeclaims")["items"]:
                    chosen = (
                        claim["metadata"].get("annotations", {}).get("volume.kubernetes.io/selected-node")
                    )
                    if (
                        claim["spec"].get("storageClassName") == _CLASS
                        and chosen
                        and "volumeName" not in claim["spec"]
                    ):
                        self._make_disk(claim, chosen)
                for disk in self.plane.get("/api/v1/persistentvolumes")["items"]:
                    spec = disk["spec"]
                    unused = disk.get("status", {}).get("phase") == "Released" and "local" in spec
                    if unused and spec["persistentVolumeReclaimPolicy"] == "Delete":
                        shutil.rmtree(spec["local"]["path"], ignore_errors=True)
                        where = f"/api/v1/persistentvolumes/{disk['metadata']['name']}"
                        self.plane.api.ask("DELETE", where)
            time.sleep(0.3)

    def _make_disk(self, claim: Object, chosen: str) -> None:
        facts = claim["metadata"]
        name = f"pvc-{facts['uid']}"
        host = next(node.host for node in self.nodes if node.name == chosen)
        path = host.disk / "disks" / name
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
        term = {"key": "kubernetes.io/hostname", "operator": "In", "values": [chosen]}
        owner = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "name": facts["name"],
            "uid": facts["uid"],
        }
        spec = {
            "capacity": claim["spec"]["resources"]["requests"],
            "accessModes": claim["spec"]["accessModes"],
            "storageClassName": _CLASS,
            "persistentVolumeReclaimPolicy": "Delete",
            "local": {"path": str(path)},
            "claimRef": {**owner, "namespace": facts["namespace"]},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [term]}]}},
        }
        annotations = {"pv.kubernetes.io/provisioned-by": _PROVISIONER}
        self.plane.api.ask(
            "POST",
            "/api/v1/persistentvolumes",
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": name, "annotations": annotations},
                "spec": spec,
            },
        )


def main() -> None:
    """Keep a cluster up until a signal."""
    parser = argparse.ArgumentParser(description="A cluster of Kubernetes whose pods are processes.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="how many each node says it has")
    parser.add_argument("--queues", action="store_true", help="install JobSet and Kueue")
    options = parser.parse_args()
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    capacity = {"nvidia.com/gpu": str(options.gpus)} if options.gpus else {}
    with Cluster(options.folder.absolute(), options.nodes, capacity) as cluster:
        if options.queues:
            cluster.plane.add_jobset()
            cluster.plane.add_kueue()
        sys.stdout.write(f"export KUBECONFIG={cluster.plane.kubeconfig}\n")
        sys.stdout.flush()
        signal.sigwait(ends)


if __name__ == "__main__":
    main()
