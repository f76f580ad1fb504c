"""A pod of `k8s_kubelet.py`: its containers as processes, their probes, ends and restarts."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from k8s_plane import NO_ANSWER, Object, now
from k8s_volumes import Contents, NotPossible, expand
from kubernetes.client.exceptions import ApiException

if TYPE_CHECKING:
    from k8s_kubelet import Node

_SHIM = Path(__file__).with_name("k8s_container.py")
_CHECKOUT = _SHIM.parents[2]
_TICK = 0.1


class Gone(Exception):
    """The pod is to have no more processes here: its node is off, or it was deleted."""


class _Container:
    """A container of a pod, through its restarts."""

    def __init__(self, pod: Pod, spec: Object, restarts: int = 0) -> None:
        self.pod, self.spec, self.name = pod, spec, spec["name"]
        self.restarts = restarts
        self.state: Object = {"waiting": {"reason": "ContainerCreating"}}
        self.last: Object = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.pid = 0
        self._mounts = ""
        self.next_start = 0.0
        self.unhealthy = ""
        self.probes: dict[str, _Probe] = {}
        self.environment: dict[str, str] = {}

    @property
    def log(self) -> Path:
        return self.pod.logs / self.name / f"{self.restarts}.log"

    @property
    def ended(self) -> bool:
        return "terminated" in self.state

    @property
    def started(self) -> bool:
        return "running" in self.state and self._passes("startup")

    @property
    def ready(self) -> bool:
        return self.started and self._passes("readiness")

    def _passes(self, kind: str) -> bool:
        return kind not in self.probes or self.probes[kind].passed

    def start(self) -> None:
        """Start its command. Raises NotPossible if its image, user or environment isn't there."""
        pod, spec = self.pod, self.spec
        images = pod.node.cluster.images
        if images is not None and spec["image"] not in images:
            raise NotPossible("ImagePullBackOff", f'Back-off pulling image "{spec["image"]}": not found')
        security = {**pod.security, **spec.get("securityContext", {})}
        user = security.get("runAsUser", 0)
        if security.get("runAsNonRoot") and user == 0:
            why = "container has runAsNonRoot and image will run as root"
            raise NotPossible("CreateContainerConfigError", why)
        self.environment = pod.make_environment(spec, user)
        command = [*spec.get("command", []), *spec.get("args", [])]
        if not spec.get("command"):
            command = [*pod.node.cluster.entrypoint, *command]
        folder = pod.folder / "containers" / f"{self.name}-{self.restarts}"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "layers").mkdir(parents=True)
        self._message = folder / "message"
        self._message.touch()
        self._message.chmod(0o666)
        self._error = folder / "error"
        place = spec.get("terminationMessagePath", "/dev/termination-log")
        mounts = [{"source": str(self._message), "target": place, "read_only": False}]
        for each in spec.get("volumeMounts", []):
            source = pod.volumes[each["name"]] / expand(
                each.get("subPathExpr", each.get("subPath", "")), self.environment
            )
            if not source.exists():
                source.mkdir(parents=True)
            mounts.append(
                {
                    "source": str(source),
                    "target": each["mountPath"].rstrip("/"),
                    "read_only": each.get("readOnly", False),
                }
            )
        description = {
            "layers": str(folder / "layers"),
            "error": str(self._error),
            "files": pod.make_files(),
            "checkout": str(_CHECKOUT),
            "shares_processes": pod.spec.get("shareProcessNamespace", False),
            "mounts": mounts,
            "read_only_root": security.get("readOnlyRootFilesystem", False),
            "user": user,
            "group": security.get("runAsGroup", 0),
            "groups": [*security.get("supplementalGroups", []), *pod.group],
            "no_new_privileges": security.get("allowPrivilegeEscalation") is False,
            "folder": spec.get("workingDir", "/"),
            "command": [expand(word, self.environment) for word in command],
            "environment": self.environment,
        }
        (folder / "description.json").write_text(json.dumps(description))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        enter = ["nsenter", "-t", str(pod.sandbox.pid), "-m", "-p", "-u", "-i", "-n"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*enter, sys.executable, "-S", "-E", str(_SHIM), str(folder / "description.json")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_command()
        self.began = now()
        self.unhealthy = ""
        self.state = {"running": {"startedAt": self.began}}
        self.probes = {
            kind: _Probe(self, kind, spec[f"{kind}Probe"])
            for kind in ("startup", "readiness", "liveness")
            if f"{kind}Probe" in spec
        }
        for probe in self.probes.values():
            probe.start()

    def _wait_command(self) -> None:
        """Wait until the command runs, so that signals reach it, or the process has ended."""
        assert self.process is not None
        parent = self.process.pid
        with contextlib.suppress(OSError, IndexError):
            # nsenter, what waits for the container, and its first process, one the parent of the next.
            for _ in range(2):
                while not (found := Path(f"/proc/{parent}/task/{parent}/children").read_text().split()):
                    if self.process.poll() is not None:
                        return
                    time.sleep(0.005)
                parent = int(found[0])
            self.pid = parent
            while _SHIM.name.encode() in Path(f"/proc/{parent}/cmdline").read_bytes():
                time.sleep(0.005)
            self._mounts = os.readlink(f"/proc/{parent}/ns/mnt")

    def check(self) -> None:
        """Note that it has ended, if so."""
        if self.process is None or self.process.poll() is None:
            return
        code = self.process.returncode
        self.process = None
        self._kill_others()
        message = self._message.read_text(errors="replace")[-4096:]
        reason = "Completed" if code == 0 else "Error"
        with contextlib.suppress(OSError):
            if error := self._error.read_text():
                reason, message = "StartError", error
        if code and not message and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            message = self.log.read_text(errors="replace")[-2048:]
        self.state = {
            "terminated": {
                "exitCode": 128 - code if code < 0 else code,
                "reason": reason,
                "startedAt": self.began,
                "finishedAt": now(),
                **({"message": message} if message else {}),
            }
        }

    def kill(self, number: int) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _kill_others(self) -> None:
        """End what a container has left that shares its processes with others of its pod."""
        if self.pod.spec.get("shareProcessNamespace"):
            for each in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if os.readlink(each / "ns/mnt") == self._mounts:
                        os.kill(int(each.name), signal.SIGKILL)

    def restart(self) -> None:
        """Start it once more, as soon as its pause has passed."""
        if not self.next_start:
            self.last = self.state
            pause = min(5.0, 0.2 * 2**self.restarts)
            self.next_start = time.monotonic() + pause
            text = f"back-off {pause:g}s restarting failed container={self.name} pod={self.pod.name}"
            self.state = {"waiting": {"reason": "CrashLoopBackOff", "message": text}}
            self.restarts += 1
        if time.monotonic() >= self.next_start:
            self.start()
            self.next_start = 0.0

    def status(self) -> Object:
        return {
            "name": self.name,
            "image": self.spec["image"],
            "imageID": f"test://{self.spec['image']}",
            "containerID": f"test://{self.pod.uid}/{self.name}/{self.restarts}",
            "restartCount": self.restarts,
            "ready": self.ready,
            "started": self.started,
            "state": self.state,
            "lastState": self.last,
        }


class _Probe(threading.Thread):
    """A probe of a container, until this ends."""

    def __init__(self, container: _Container, kind: str, spec: Object) -> None:
        super().__init__(daemon=True)
        self._container, self._kind, self._spec = container, kind, spec
        self._process = container.process
        self.passed = kind == "liveness"
        self.why = ""

    def run(self) -> None:
        spec, container = self._spec, self._container
        failures = successes = 0
        while (
            self._kind != "startup"
            and "startup" in container.probes
            and not container.probes["startup"].passed
        ):
            time.sleep(_TICK)
        time.sleep(spec.get("initialDelaySeconds", 0))
        while self._process is container.process is not None:
            if self._check():
                successes, failures = successes + 1, 0
                if successes >= spec.get("successThreshold", 1):
                    self.passed = True
                    if self._kind == "startup":
                        return
            else:
                successes, failures = 0, failures + 1
                if failures >= spec.get("failureThreshold", 3):
                    if self._kind == "readiness":
                        self.passed = False
                    else:
                        container.unhealthy = f"{self._kind} probe failed: {self.why}"
                        return
            time.sleep(spec.get("periodSeconds", 10))

    def _check(self) -> bool:
        seconds = self._spec.get("timeoutSeconds", 1)
        container = self._container
        address = container.pod.sandbox.address
        try:
            if "tcpSocket" in self._spec:
                port = container.pod.find_port(container.spec, self._spec["tcpSocket"]["port"])
                socket.create_connection((address, port), seconds).close()
            elif "httpGet" in self._spec:
                get = self._spec["httpGet"]
                port = container.pod.find_port(container.spec, get["port"])
                if get.get("scheme") == "HTTPS":
                    unchecked = ssl._create_unverified_context()
                    asked: http.client.HTTPConnection = http.client.HTTPSConnection(
                        address, port, timeout=seconds, context=unchecked
                    )
                else:
                    asked = http.client.HTTPConnection(address, port, timeout=seconds)
                with contextlib.closing(asked):
                    headers = {each["name"]: each["value"] for each in get.get("httpHeaders", [])}
                    asked.request("GET", get.get("path", "/"), headers=headers)
                    status = asked.getresponse().status
                    assert 200 <= status < 400, f"HTTP {status}"
            else:
                self._execute(self._spec["exec"]["command"], seconds)
        except (*NO_ANSWER, AssertionError, subprocess.SubprocessError) as error:
            self.why = str(error)
            container.pod.say("Warning", "Unhealthy", f"{self._kind} probe failed: {error}")
            return False
        return True

    def _execute(self, command: Sequence[str], seconds: float) -> None:
        enter = [
            "/usr/bin/nsenter",
            "-t",
            str(self._container.pid),
            "-m",
            "-p",
            "-u",
            "-i",
            "-n",
            "--root",
            "--wd",
        ]
        done = subprocess.run(
            [*enter, *command],
            env=self._container.environment,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, done.stdout.decode(errors="replace")[-1000:]


class Pod(Contents):
    """A pod that is bound to a node: what the API server wants of it, and its processes."""

    def __init__(self, node: Node, found: Object) -> None:
        super().__init__(node, found)
        self.path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        self.logs = node.host.disk / "logs" / f"{self.namespace}_{self.name}_{self.uid}"
        self.removed = False
        before = {each["name"]: each for each in found.get("status", {}).get("containerStatuses", [])}
        #: Its processes ran here before the node was switched off.
        self._resumed = any("containerID" in each for each in before.values())
        self.first = [_Container(self, each) for each in self.spec.get("initContainers", [])]
        self.containers = [
            _Container(self, each, before.get(each["name"], {}).get("restartCount", 0) + self._resumed)
            for each in self.spec["containers"]
        ]
        self._began = found.get("status", {}).get("startTime") or now()
        self._conditions: dict[str, Object] = {}
        self._said = ""
        self._quiet = False
        self._events: set[tuple[str, str]] = set()
        self._initialized = False
        self._phase: Object = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(30)

    @property
    def _deleted(self) -> bool:
        return self.removed or "deletionTimestamp" in self.found["metadata"]

    def _run(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.sandbox.attach()
            self.sandbox.start()
            with contextlib.suppress(Gone):
                self._live()
            # The processes of a node that is switched off aren't asked to end.
            if self.node.on:
                self._finish()
        except Gone:
            pass
        except Exception:
            if self.node.on:
                self.node.cluster.errors.append(f"{self.name}: {traceback.format_exc()}")
        finally:
            if self.sandbox.pid:
                with contextlib.suppress(AssertionError, OSError):
                    self.sandbox.kill()
            for each in (*self.first, *self.containers):
                if each.process:
                    each.process.wait(30)
            self.sandbox.detach()
            self.node.cluster.numbers.append(self.sandbox.number)

    def _pause(self) -> None:
        """Note what has ended, tell the API server, and wait a little. Raises Gone if the node is off."""
        if not self.node.on:
            raise Gone
        for each in (*self.first, *self.containers):
            each.check()
        self._report()
        time.sleep(_TICK)

    def _wait(self) -> None:
        """As `_pause`. Raises Gone if the pod is to be deleted, too."""
        if self._deleted:
            raise Gone
        self._pause()

    def _live(self) -> None:
        """Run its containers. Returns once they have ended and aren't to be started again."""
        status = self.found.get("status", {})
        if status.get("phase") in ("Succeeded", "Failed"):
            self._phase = {"phase": status["phase"]}
            self._quiet = True
            return
        if self._resumed and self.spec["restartPolicy"] == "Never":
            self._phase = {
                "phase": "Failed",
                "reason": "NodeRebooted",
                "message": "The node was switched off.",
            }
            for each in self.containers:
                each.restarts = 0
                each.state = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}
            return
        self._refuse_unknown()
        self._until_possible(None, self.make_volumes)
        for each in self.first:
            self._until_possible(each, each.start)
            while not each.ended or each.state["terminated"]["exitCode"]:
                if each.ended and self.spec["restartPolicy"] == "Never":
                    self._phase = {"phase": "Failed"}
                    return
                if each.ended or each.next_start:
                    self._until_possible(each, each.restart)
                self._wait()
        self._initialized = True
        for each in self.containers:
            self._until_possible(each, each.start)
        while not self._is_over():
            self._wait()

    def _refuse_unknown(self) -> None:
        """Raise NotImplementedError for fields that would mean something else here."""
        parts = [self.spec, *self.spec["containers"], *self.spec.get("initContainers", [])]
        probes = [part[each] for part in parts for each in part if each.endswith("Probe")]
        unknown = ("hostNetwork", "hostPID", "hostIPC", "lifecycle", "grpc")
        found = [each for each in unknown if any(part.get(each) for part in (*parts, *probes))]
        if found or any("restartPolicy" in part for part in parts[1:]):
            raise NotImplementedError(f"this kubelet knows no {', '.join(found) or 'sidecars'}")

    def _until_possible(self, container: _Container | None, act: Callable[[], None]) -> None:
        while True:
            try:
                return act()
            except NotPossible as error:
                reason, message = error.args
                self.say("Warning", reason, message)
                if container:
                    container.state = {"waiting": {"reason": reason, "message": message}}
            except NO_ANSWER:
                pass
            self._wait()

    def _is_over(self) -> bool:
        """Start again what is to be; return whether nothing more will run."""
        limit = self.spec.get("activeDeadlineSeconds")
        began = datetime.datetime.fromisoformat(self._began)
        if limit and (datetime.datetime.now(datetime.UTC) - began).total_seconds() > limit:
            self._phase = {"phase": "Failed", "reason": "DeadlineExceeded"}
            return True
        policy = self.spec["restartPolicy"]
        for each in self.containers:
            if each.unhealthy and each.process:
                self.say("Warning", "Killing", f"Container {each.name}: {each.unhealthy}")
                self._end([each], self.spec.get("terminationGracePeriodSeconds", 30))
            if each.next_start or (
                each.ended
                and (policy == "Always" or (policy == "OnFailure" and each.state["terminated"]["exitCode"]))
            ):
                self._until_possible(each, each.restart)
        if not all(each.ended for each in self.containers):
            return False
        failed = any(each.state["terminated"]["exitCode"] for each in self.containers)
        self._phase = {"phase": "Failed" if failed else "Succeeded"}
        return True

    def _end(self, containers: Sequence[_Container], grace: float) -> None:
        """Ask containers to end, and end them once their time is over."""
        began = time.monotonic()
        for each in containers:
            each.kill(signal.SIGTERM)
        while any(each.process for each in containers):
            # Somebody can want it sooner meanwhile.
            grace = min(grace, self.found["metadata"].get("deletionGracePeriodSeconds", grace))
            if time.monotonic() >= began + (2 if self.removed else grace):
                for each in containers:
                    each.kill(signal.SIGKILL)
            self._pause()

    def _finish(self) -> None:
        """Wait until it is deleted, end its processes, say so, and let the API server forget it."""
        if not self._deleted:
            self._end(self.containers, self.spec.get("terminationGracePeriodSeconds", 30))
            self.sandbox.kill()
        while not self._deleted:
            self._pause()
        self._end(
            [*self.first, *self.containers], self.found["metadata"].get("deletionGracePeriodSeconds", 0)
        )
        for each in self.containers:
            if "waiting" in each.state:
                each.state = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}
        failed = any(each.state["terminated"]["exitCode"] for each in self.containers)
        self._phase = self._phase or {"phase": "Failed" if failed else "Succeeded"}
        if self.sandbox._init is not None:
            self.sandbox.kill()
        while not self.removed:
            self._pause()
            with contextlib.suppress(*NO_ANSWER):
                body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
                with contextlib.suppress(ApiException):
                    self.node.ask("DELETE", self.path, body)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _report(self) -> None:
        """Write its status, if that has changed and can be written."""
        running = any("running" in each.state or each.last for each in self.containers)
        every = all(each.ready for each in self.containers) and not self._phase
        self._condition("Initialized", self._initialized)
        self._condition("ContainersReady", every)
        self._condition("Ready", every)
        replaced = {"$patch": "replace"}  # addresses of before, which a patch would keep
        status = {
            "phase": "Running" if running and self._initialized else "Pending",
            "hostIP": self.node.host.address,
            "hostIPs": [{"ip": self.node.host.address}, replaced],
            "podIP": self.sandbox.address,
            "podIPs": [{"ip": self.sandbox.address}, replaced],
            "startTime": self._began,
            "conditions": list(self._conditions.values()),
            "initContainerStatuses": [each.status() for each in self.first],
            "containerStatuses": [each.status() for each in self.containers],
            **self._phase,
        }
        text = json.dumps(status)
        if self.removed or self._quiet or self._said == text:
            return
        with contextlib.suppress(*NO_ANSWER):
            try:
                self.node.ask(
                    "PATCH", f"{self.path}/status", {"metadata": {"uid": self.uid}, "status": status}
                )
            except ApiException as error:
                if error.status not in (404, 409):
                    raise
            self._said = text

    def _condition(self, kind: str, value: bool) -> None:
        before = self._conditions.get(kind)
        if before is None or (before["status"] == "True") != value:
            self._conditions[kind] = {"type": kind, "status": str(value), "lastTransitionTime": now()}

    def say(self, kind: str, reason: str, message: str) -> None:
        """Make an event, once for each text."""
        if (reason, message) in self._events:
            return
        self._events.add((reason, message))
        about = {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": self.name,
            "namespace": self.namespace,
            "uid": self.uid,
        }
        event = {
            "metadata": {"generateName": f"{self.name}.", "namespace": self.namespace},
            "involvedObject": about,
            "type": kind,
            "reason": reason,
            "message": message,
            "source": {"component": "kubelet", "host": self.node.name},
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "count": 1,
        }
        with contextlib.suppress(*NO_ANSWER, ApiException):
            self.node.ask("POST", f"/api/v1/namespaces/{self.namespace}/events", event)

    def find_port(self, spec: Object, port: int | str) -> int:
        """Return the number of a port that may be a name of the container's."""
        named = {each.get("name"): each["containerPort"] for each in spec.get("ports", [])}
        return port if isinstance(port, int) else int(named.get(port, port))
