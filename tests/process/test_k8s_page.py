"""The page against a real control plane: it brings a cluster up, scales it, and shows jobs in pods and in a
queue."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import hosts_lab
import k8s_binaries
import pytest

pytest.importorskip("kubernetes", reason="the library `kubernetes` must be installed: make ready-k8s")
pytest.importorskip("fastapi")

from k8s_insitu import IMAGE, act_as_administrator, head, insitu, wait_for_state, write_input
from k8s_kubelet import Cluster
from k8s_plane import wait_for

_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "jobset", "kueue")
_OBSTACLE = hosts_lab.find_obstacle() or k8s_binaries.find_obstacle(*_PROGRAMS)
pytestmark = [
    pytest.mark.k8s,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(_OBSTACLE), reason=_OBSTACLE),
]
SPACE = "paged"
PAGE = f"/pages/k8s?namespace={SPACE}"
SMALL = {"cpu": "200m", "memory": "1Gi", "image": IMAGE, "namespace": SPACE}
SCRIPT = """
import os, insitu
print("found", insitu.dataset("d", label="y").rows, os.environ["MODE"], os.environ["HUB_KEY"])
"""


class Page:
    """A page that runs, with its programs' tokens."""

    def __init__(self, url: str, tokens: dict[str, str]) -> None:
        self.url, self.tokens = url, tokens

    def ask(self, path: str, fields: dict[str, str] | None = None, role: str = "operate") -> tuple[int, str]:
        """Return the status and the text of an answer, without its markup's escapes."""
        data = None if fields is None else urlencode(fields).encode()
        request = urllib.request.Request(f"{self.url}{path}", data)
        request.add_header("Authorization", f"Bearer {self.tokens[role]}")
        context = ssl._create_unverified_context() if self.url.startswith("https") else None
        try:
            with urllib.request.urlopen(request, timeout=60, context=context) as answer:
                return answer.status, html.unescape(answer.read().decode())
        except urllib.error.HTTPError as error:
            return error.code, html.unescape(error.read().decode())

    def show(self, path: str = PAGE) -> str:
        """Return a page's text."""
        status, text = self.ask(path)
        assert status == 200, text
        return text

    def send(self, form: str, fields: dict[str, str]) -> str:
        """Return what a form would do, and then have it done."""
        status, shown = self.ask(f"/pages/k8s/{form}", fields)
        assert status == 200, shown
        assert self.ask(f"/pages/k8s/{form}", {**fields, "confirmed": "yes"})[0] == 200
        return shown

    def wait(self, text: str, path: str = PAGE) -> None:
        """Wait until a page shows a text, which is a pattern."""
        wait_for(lambda: re.search(text, self.show(path)), 200, lambda: self.show(path))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("k8s"), 3, {}, images=[IMAGE]) as made:
        made.plane.add_jobset()
        made.plane.add_kueue()
        yield made


@pytest.fixture
def own_page(cluster: Cluster, tmp_path: Path) -> Iterator[Page]:
    """The page of a user who has a kubeconfig."""
    home = tmp_path / "home"
    environment = {**os.environ, "INSITU_HOME": str(home), "KUBECONFIG": str(cluster.plane.kubeconfig)}
    environment.pop("DISPLAY", None)
    command = [sys.executable, "-m", "insitu", "ui", "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    try:
        record = home / f"ui-{os.geteuid()}.json"
        wait_for(record.exists, 60)
        found = json.loads(record.read_text())
        yield Page(found["url"], found)
    finally:
        process.terminate()
        process.wait(30)


def find_page_of_head(cluster: Cluster) -> Page:
    record = head(cluster, SPACE, "sh", "-c", "cat $INSITU_HOME/ui-*.json")
    address = cluster.get_pod(SPACE, "head-0")["status"]["podIP"]
    return Page(f"https://{address}:8780", json.loads(record))


def make_queue(cluster: Cluster) -> None:
    """Make a queue that admits nothing."""
    version = "kueue.x-k8s.io/v1beta2"
    quota = [{"name": "cpu", "nominalQuota": 4}, {"name": "memory", "nominalQuota": "64Gi"}]
    group = {
        "coveredResources": ["cpu", "memory"],
        "flavors": [{"name": "any", "resources": quota}],
    }
    behind = {"namespaceSelector": {}, "resourceGroups": [group], "stopPolicy": "Hold"}
    cluster.plane.apply(
        {"apiVersion": version, "kind": "ResourceFlavor", "metadata": {"name": "any"}},
        {"apiVersion": version, "kind": "ClusterQueue", "metadata": {"name": "all"}, "spec": behind},
        {
            "apiVersion": version,
            "kind": "LocalQueue",
            "metadata": {"name": "research", "namespace": SPACE},
            "spec": {"clusterQueue": "all"},
        },
    )


def start_job(page: Page, name: str, **more: str) -> str:
    """Start a job from the form, in pods of its own. Returns its page's path."""
    fields = {"cache": "d", "job_dir": "/tmp/job", "command": "show.py", "workers": "2", "name": name}
    fields |= {"engine": "k8s", "memory_per_worker": "256", "threads": "1", "standby": "0"}
    status, text = page.ask("/start", {**fields, **{key.replace("_", ".", 1): v for key, v in more.items()}})
    assert status == 200, text
    return "/jobs/" + re.findall(r"<h1>(\S+)</h1>", text)[0]


def test_a_cluster_from_the_page_alone(
    cluster: Cluster, own_page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_as_administrator(cluster, monkeypatch)
    assert own_page.ask("/pages/k8s/up", {**SMALL, "confirmed": "yes"}, "view")[0] == 403
    status, text = own_page.ask("/pages/k8s/up", {**SMALL, "confirmed": "yes"})
    assert status == 400 and f"Received: {SPACE}, which isn't" in text
    shown = own_page.send("up", {**SMALL, "nodes": "1", "create_namespace": "on"})
    assert f"Namespace {SPACE}: new" in shown and "StatefulSet store: new" in shown
    own_page.wait("state-finished.*insitu k8s up")
    assert "state-alive" in own_page.show() and "Change the cluster" in own_page.show()

    assert "store-1: new" in own_page.send("scale", {"nodes": "2", "namespace": SPACE})
    own_page.wait("state-finished.*insitu k8s scale")
    assert cluster.get_pod(SPACE, "store-1")["status"]["phase"] == "Running"
    status, text = own_page.ask("/pages/k8s/up", {**SMALL, "nodes": "2", "storage": "60Gi"})
    assert status == 400 and "The size and the class of disks stay" in text
    changed = own_page.ask("/pages/k8s/up", {**SMALL, "nodes": "2", "log_format": "json"})[1]
    assert "StatefulSet store: spec.template" in changed and "Service head: stays as it is" in changed

    write_input(cluster, SPACE)
    head(cluster, SPACE, "sh", "-c", "cat > /tmp/job/show.py", given=SCRIPT.encode())
    head(cluster, SPACE, "insitu", "import", "d", "/tmp/d.jsonl", "--backups", "1")
    secret = {"HUB_KEY": base64.b64encode(b"s3cret").decode()}
    about = {"name": "hub", "namespace": SPACE}
    cluster.plane.apply({"apiVersion": "v1", "kind": "Secret", "metadata": about, "data": secret})
    make_queue(cluster)
    of_head = find_page_of_head(cluster)
    of_head.wait("whose account may only look", "/pages/k8s")
    assert of_head.ask("/pages/k8s/scale", {"nodes": "3", "confirmed": "yes"})[0] == 400

    given = {"pod_env": "MODE=fast", "pod_secret": "hub"}
    job = start_job(of_head, "seen", **given)
    wait_for_state(cluster, SPACE, "seen", "finished")
    of_head.wait("Pods in Kubernetes", job)
    of_head.wait("succeeded", job)
    assert "Job job-seen" in of_head.show(job) and "found 2000 fast s3cret" in of_head.show(job)
    stored = head(cluster, SPACE, "sh", "-c", "grep -rl s3cret $INSITU_HOME || true").split()
    assert not [path for path in stored if "log" not in path]

    queued = start_job(of_head, "queued", pod_queue="research", **given)
    of_head.wait("It waits: place 1 of 1 in queue research", queued)
    own_page.wait(r"job-queued-\w+: 1 of 1 in queue research")
    assert "cpu: 0 of 4" in own_page.show() and "cpu: 0 of ?" in of_head.show("/pages/k8s")
    assert of_head.ask(f"{queued}/stop", {})[0] == 200

    cluster.plane.stop("kube-apiserver")
    try:
        own_page.wait("The API server (doesn't|must) answer")
        assert "Head and stores" in own_page.show() and "<h1>Jobs</h1>" in own_page.show("/")
    finally:
        cluster.plane.start("kube-apiserver")
        cluster.plane.wait_ready()
    insitu("down", "--namespace", SPACE, "--claims", "--yes")
    own_page.wait("without one. `insitu k8s up` makes one")
