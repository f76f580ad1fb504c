"""A real control plane of Kubernetes as ordinary processes: etcd, API server, controllers, scheduler.

    with ControlPlane(folder) as plane:
        plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "lab"}})
        client.CoreV1Api(plane.client()).list_namespace()

It has RBAC, service accounts, and admission as by default, Pod Security included. No container runs:
`k8s_kubelet.py` makes nodes whose pods are processes. Some limits are short so that tests are: a node whose
lease isn't renewed for 8 s is lost, and its pods are evicted 5 s later (Kubernetes: 40 s and 300 s).
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import ipaddress
import json
import os
import signal
import ssl
import subprocess
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from free_ports import free_addresses
from k8s_binaries import PROGRAMS
from kubernetes import client, config, dynamic
from kubernetes.client.exceptions import ApiException

SECONDS = 120.0
_DOMAIN = "kubernetes.default.svc.cluster.local"
Object = dict[str, Any]
#: What a request raises that the API server doesn't answer.
NO_ANSWER = (OSError, http.client.HTTPException, ValueError)


def now(digits: str = "seconds") -> str:
    """Return the time as Kubernetes writes it."""
    return datetime.now(UTC).isoformat(timespec=digits).replace("+00:00", "Z")


def wait_for(condition: Callable[[], Any], seconds: float = SECONDS, why: Callable[[], Any] = str) -> Any:
    """Return what `condition` returns once that is true; fail after `seconds` with what `why` returns."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, why()
        time.sleep(0.1)
    return found


class Authority:
    """An authority that signs certificates, all as files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "insitu-test")])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        made = self._begin(self._name, self._key).add_extension(constraints, critical=True)
        self.certificate = folder / "ca.crt"
        self._write("ca", made.sign(self._key, hashes.SHA256()), self._key)

    def _begin(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=7))
        )

    def _write(
        self, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
    ) -> tuple[Path, Path]:
        paths = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        form = serialization.PrivateFormat.TraditionalOpenSSL
        plain = serialization.NoEncryption()
        paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
        return paths

    def sign(
        self, name: str, groups: Sequence[str] = (), names: Sequence[str] = (), folder: Path | None = None
    ) -> tuple[Path, Path]:
        """Return the files of a new certificate and its key, of a user in groups or a server with names."""
        key = ec.generate_private_key(ec.SECP256R1())
        parts = [(NameOID.ORGANIZATION_NAME, group) for group in groups] + [(NameOID.COMMON_NAME, name)]
        subject = x509.Name([x509.NameAttribute(*part) for part in parts])
        made = self._begin(subject, key)
        if names:
            known: list[x509.GeneralName] = []
            for each in names:
                try:
                    known.append(x509.IPAddress(ipaddress.ip_address(each)))
                except ValueError:
                    known.append(x509.DNSName(each))
            made = made.add_extension(x509.SubjectAlternativeName(known), critical=False)
        paths = self._write(name.replace(":", "-"), made.sign(self._key, hashes.SHA256()), key)
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            for path, kind in zip(paths, ("tls.crt", "tls.key"), strict=True):
                (folder / kind).write_bytes(path.read_bytes())
        return paths


class Api:
    """Requests of JSON to the API server as its administrator, for what needs no model of objects."""

    def __init__(self, address: str, authority: Path, certificate: tuple[Path, Path]) -> None:
        self.address = address
        self._context = ssl.create_default_context(cafile=str(authority))
        self._context.load_cert_chain(*map(str, certificate))

    def send(
        self, method: str, path: str, body: Object | None = None, kind: str = "json", seconds: float = 30.0
    ) -> http.client.HTTPResponse:
        """Return the answer to a request. Raises OSError if there is none."""
        connection = http.client.HTTPSConnection(self.address, timeout=seconds, context=self._context)
        headers = {"Content-Type": f"application/{kind}", "Connection": "close"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        return connection.getresponse()

    def ask(self, method: str, path: str, body: Object | None = None, kind: str = "json") -> Object:
        """Return an object. Raises ApiException if the answer is an error, and OSError if there is none."""
        try:
            with self.send(method, path, body, kind) as answer:
                text = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        if answer.status == 429 and b"(re)initializing" in text:  # the server has just started
            time.sleep(0.1)
            return self.ask(method, path, body, kind)
        if answer.status >= 400:
            raise ApiException(answer.status, text.decode())
        found: Object = json.loads(text)
        return found

    def patch(self, path: str, body: Object, kind: str = "strategic-merge-patch+json") -> Object:
        return self.ask("PATCH", path, body, kind)

    def watch(self, path: str, selector: str = "") -> Iterator[tuple[str, Object]]:
        """Yield kinds of events and objects: first those that exist (ADDED), then a SYNCED, then changes."""
        query = f"?fieldSelector={selector}&" if selector else "?"
        found = self.ask("GET", f"{path}{query}")
        for item in found["items"]:
            yield "ADDED", item
        yield "SYNCED", {}
        version = found["metadata"]["resourceVersion"]
        address = f"{path}{query}watch=1&resourceVersion={version}&timeoutSeconds=300"
        with contextlib.closing(self.send("GET", address, seconds=400.0)) as answer:
            for line in answer:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield event["type"], event["object"]


class ControlPlane:
    """A control plane whose API server answers at `address`, on all interfaces of this machine."""

    def __init__(self, folder: Path, address: str = "127.0.0.1") -> None:
        self.folder = folder
        self.host = address
        self.port = int(free_addresses(1, "0.0.0.0")[0].rsplit(":", 1)[1])
        self.address = f"{address}:{self.port}"
        self.kubeconfig = folder / "admin.kubeconfig"
        self._commands: dict[str, tuple[list[str], dict[str, str]]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> ControlPlane:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.authority = Authority(self.folder / "certificates")
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self._processes)):
            self.stop(name)

    def _start(self) -> None:
        sign, folder = self.authority.sign, self.authority.folder
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", _DOMAIN, "localhost"]
        served = sign("apiserver", names=[*names, "127.0.0.1", self.host])
        tokens = sign("service-accounts")
        admin = sign("admin", ["system:masters"])
        self.api = Api(self.address, self.authority.certificate, admin)
        etcd, peer = (f"http://{each}" for each in free_addresses(2))
        self._run(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )
        self._run(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            f"--secure-port={self.port}",
            "--bind-address=0.0.0.0",
            "--endpoint-reconciler-type=none",
            "--kubelet-preferred-address-types=InternalIP",
            f"--cert-dir={folder}",
            f"--tls-cert-file={served[0]}",
            f"--tls-private-key-file={served[1]}",
            f"--client-ca-file={self.authority.certificate}",
            f"--service-account-issuer=https://{_DOMAIN}",
            f"--service-account-key-file={tokens[1]}",
            f"--service-account-signing-key-file={tokens[1]}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--default-not-ready-toleration-seconds=5",
            "--default-unreachable-toleration-seconds=5",
        )
        self._write_kubeconfig(self.kubeconfig, {n: str(p) for n, p in zip(_FILES, admin, strict=True)})
        self.wait_ready()
        for name, *options in (
            (
                "kube-controller-manager",
                f"--root-ca-file={self.authority.certificate}",
                f"--service-account-private-key-file={tokens[1]}",
                "--use-service-account-credentials",
                "--node-monitor-period=1s",
                "--node-monitor-grace-period=8s",
            ),
            ("kube-scheduler",),
        ):
            user = self.folder / f"{name}.kubeconfig"
            signed = sign(f"system:{name}")
            self._write_kubeconfig(user, {n: str(p) for n, p in zip(_FILES, signed, strict=True)})
            self._run(name, f"--kubeconfig={user}", "--leader-elect=false", "--secure-port=0", *options)
        wait_for(
            lambda: self.exists("/api/v1/namespaces/default/serviceaccounts/default"), why=self.read_logs
        )

    def wait_ready(self) -> None:
        """Wait until the API server answers that it is ready."""

        def ready() -> bool:
            self._check()
            with contextlib.suppress(*NO_ANSWER), self.api.send("GET", "/readyz") as answer:
                return answer.status == 200
            return False

        wait_for(ready, why=self.read_logs)

    def _check(self) -> None:
        for name, process in self._processes.items():
            assert process.poll() is None, f"{name} has ended: {self.read_logs(name)}"

    def read_logs(self, name: str = "") -> str:
        """Return the ends of the logs of a process, or of all."""
        return "\n".join(
            (self.folder / f"{each}.log").read_text()[-3000:]
            for each in ([name] if name else self._processes)
        )

    def _run(self, name: str, *options: str, **environment: str) -> None:
        self._commands[name] = ([str(PROGRAMS[name].path), *options], {**os.environ, **environment})
        self.start(name)

    def start(self, name: str) -> None:
        """Start a process that has been stopped, such as kube-apiserver. It ends with this one."""
        command, environment = self._commands[name]
        if name == "kueue":
            layers = f"lowerdir={self.folder / 'etc'}:/etc"
            script = f'mount -t overlay overlay -o {layers} /etc && exec "$0" "$@"'
            command = ["unshare", "--mount", "sh", "-c", script, *command]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def stop(self, name: str, number: int = signal.SIGKILL) -> None:
        """End one of its processes by a signal: etcd, kube-apiserver, kube-scheduler and so on."""
        process = self._processes.pop(name)
        process.send_signal(number)
        process.wait(SECONDS)

    def _write_kubeconfig(self, path: Path, user: Object, namespace: str = "default") -> Path:
        cluster = {
            "server": f"https://{self.address}",
            "certificate-authority": str(self.authority.certificate),
        }
        context = {"cluster": "test", "user": "user", "namespace": namespace}
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "test", "cluster": cluster}],
                    "users": [{"name": "user", "user": user}],
                    "contexts": [{"name": "test", "context": context}],
                    "current-context": "test",
                }
            )
        )
        path.chmod(0o600)
        return path

    def client(self, kubeconfig: Path | None = None) -> client.ApiClient:
        """Return a client of the maintained library, of the administrator or of a kubeconfig."""
        return config.new_client_from_config(str(kubeconfig or self.kubeconfig))

    def apply(self, *objects: Object) -> None:
        """Apply objects by server-side apply, as an administrator."""
        found = dynamic.DynamicClient(self.client())
        for body in objects:
            resource = found.resources.get(api_version=body["apiVersion"], kind=body["kind"])
            facts = body["metadata"]
            namespace = facts.get("namespace", "default") if resource.namespaced else None
            found.server_side_apply(
                resource, body, facts["name"], namespace, field_manager="tests", force_conflicts=True
            )

    def get(self, path: str) -> Object:
        """Return an object by its path, such as `/api/v1/namespaces/NS/pods/NAME`; {} if there is none."""
        try:
            return self.api.ask("GET", path)
        except ApiException as error:
            if error.status != 404:
                raise
            return {}

    def exists(self, path: str) -> bool:
        return bool(self.get(path))

    def make_account(self, namespace: str, name: str, rules: Sequence[Object]) -> Path:
        """Return a kubeconfig with the token of a new service account, with these rights in a namespace."""
        facts = {"name": name, "namespace": namespace}
        group = "rbac.authorization.k8s.io"
        reference = {"apiGroup": group, "kind": "Role", "name": name}
        subject = {"kind": "ServiceAccount", **facts}
        self.apply(
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": facts},
            {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": facts, "rules": list(rules)},
            {
                "apiVersion": f"{group}/v1",
                "kind": "RoleBinding",
                "metadata": facts,
                "roleRef": reference,
                "subjects": [subject],
            },
        )
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = self.api.ask("POST", path, body)["status"]["token"]
        made = self.folder / f"{namespace}-{name}.kubeconfig"
        return self._write_kubeconfig(made, {"token": token}, namespace)

    def add_jobset(self) -> None:
        """Install JobSet: its definitions, webhooks and controller."""
        self._add_controller("jobset", "config.jobset.x-k8s.io/v1alpha1")

    def add_kueue(self) -> None:
        """Install Kueue for Jobs and JobSets with a queue's name. Needs JobSet's definitions."""
        # It reads this certificate although it serves no metrics, and no option names another place.
        self.authority.sign("kueue-metrics", folder=self.folder / "etc" / "kueue" / "metrics" / "certs")
        certificates = self.folder / "kueue" / "k8s-webhook-server" / "serving-certs"
        self._add_controller(
            "kueue",
            "config.kueue.x-k8s.io/v1beta2",
            {"certDir": str(certificates)},
            manageJobsWithoutQueueName=False,
            integrations={"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]},
            featureGates={"VisibilityOnDemand": False},
        )

    def _add_controller(
        self, name: str, version: str, webhook: Object | None = None, **settings: Any
    ) -> None:
        """Install a controller with webhooks, which the API server finds by an address, not by a service."""
        program = PROGRAMS[name]
        hooks, health = free_addresses(2)
        bundle = b64encode(self.authority.certificate.read_bytes()).decode()
        namespace = f"{name}-system"
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        definitions = list(_read_objects(program.objects / "crd" / "bases"))
        for each in definitions:
            if len(each["spec"]["versions"]) > 1:
                hook = {"url": f"https://{hooks}/convert", "caBundle": bundle}
                converts = {"clientConfig": hook, "conversionReviewVersions": ["v1"]}
                each["spec"]["conversion"] = {"strategy": "Webhook", "webhook": converts}
            self.apply(each)
        for each in definitions:
            where = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{each['metadata']['name']}"
            wait_for(lambda at=where: _has_condition(self.get(at), "Established"), why=self.read_logs)
        folder = self.folder / name
        # Where the library of controllers looks for certificates, under the folder for temporary files.
        certificates = folder / "k8s-webhook-server" / "serving-certs"
        self.authority.sign(f"{name}-webhook", names=["127.0.0.1"], folder=certificates)
        port = int(hooks.rsplit(":", 1)[1])
        configuration = {
            "apiVersion": version,
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": health},
            "metrics": {"bindAddress": "0"},
            "webhook": {"port": port, "host": "127.0.0.1", **(webhook or {})},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            **settings,
        }
        path = folder / "configuration.yaml"
        path.write_text(yaml.safe_dump(configuration))
        environment = {"TMPDIR": str(folder), "KUBECONFIG": str(self.kubeconfig)}
        self._run(name, f"--config={path}", **environment, POD_NAMESPACE=namespace)

        def ready() -> bool:
            self._check()
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                contextlib.closing(http.client.HTTPConnection(health, timeout=5)) as connection,
            ):
                connection.request("GET", "/readyz")
                return connection.getresponse().status == 200
            return False

        wait_for(ready, why=lambda: self.read_logs(name))
        for each in _read_objects(program.objects / "webhook"):
            if "webhooks" in each:
                each["metadata"]["name"] = f"{name}-{each['metadata']['name']}"
                each["webhooks"] = [hook for hook in each["webhooks"] if _is_served(hook, name)]
                for hook in each["webhooks"]:
                    url = f"https://{hooks}{hook['clientConfig']['service']['path']}"
                    hook["clientConfig"] = {"url": url, "caBundle": bundle}
                    if hook["rules"][0]["resources"] == ["pods"]:
                        member = {"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}
                        hook["objectSelector"] = {"matchExpressions": [member]}
                self.apply(each)


def _is_served(hook: Object, name: str) -> bool:
    """Tell whether a controller serves a webhook: Kueue's list has those of all frameworks."""
    groups = {group for rule in hook["rules"] for group in rule["apiGroups"]}
    return name == "jobset" or bool(groups & {"kueue.x-k8s.io", "batch", "jobset.x-k8s.io"})


_FILES = ("client-certificate", "client-key")


def _read_objects(folder: Path) -> Iterator[Object]:
    for path in sorted(folder.glob("*.yaml")):
        for each in yaml.safe_load_all(path.read_text()):
            if each and "metadata" in each:
                yield copy.deepcopy(each)


def _has_condition(found: Object, kind: str) -> bool:
    conditions = found.get("status", {}).get("conditions") or []
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)
