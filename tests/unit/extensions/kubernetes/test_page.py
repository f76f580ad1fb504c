"""The page of a cluster, with an API server in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from asgi_client import ORIGIN, Client
from k8s_fake import FakeApi, status_of

pytest.importorskip("fastapi")

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.extensions.kubernetes import client as k8s_client
from insitu.extensions.kubernetes import page as k8s_page
from insitu.extensions.kubernetes.cluster import bring_up, list_changes, preview
from insitu.extensions.kubernetes.options import ClusterOptions, UpRequest
from insitu.extensions.kubernetes.page import KubernetesPage
from insitu.ui import looks, plugin_pages
from insitu.ui.access import Access
from insitu.ui.app import make_application
from insitu.ui.boards import Boards
from insitu.ui.guard import AuditLog
from insitu.ui.rendering import render
from insitu.ui.started_commands import StartedCommands
from insitu.ui.state import UIState
from insitu.ui.uploads import Uploads

READ = {"namespace": "", "context": ""}


@pytest.fixture
def page(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> KubernetesPage:
    """The page, whose kubeconfig leads to the server in memory."""
    monkeypatch.setattr(k8s_client, "KubeconfigTransport", lambda context: api)
    monkeypatch.setenv("KUBECONFIG", "some")
    return KubernetesPage()


@pytest.fixture
def started() -> list[Any]:
    """Commands that the page has started."""
    return []


@pytest.fixture
def app(page: KubernetesPage, tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(looks, "FRESH", -1.0)
    monkeypatch.setattr(plugin_pages, "list_plugins", lambda kind: ("k8s",))
    monkeypatch.setattr(plugin_pages, "load_plugin", lambda kind, name: page)
    monkeypatch.setattr(
        StartedCommands, "start", lambda self, *given: started.append(given[2]) or {"command_line": "insitu"}
    )
    state = UIState(
        paths=Paths(tmp_path),
        access=Access(),
        cookie="c",
        secure=False,
        url=ORIGIN,
        uploads=Uploads(),
        commands=StartedCommands({}),
        boards=Boards({}),
    )
    made = make_application(state, AuditLog(tmp_path / "audit"), frozenset({ORIGIN}))
    return lambda role: Client(made, bearer=state.access.make_bearer(role))


def make_cluster(api: FakeApi, *, nodes: int = 2, **more: Any) -> None:
    options = ClusterOptions(nodes=nodes, namespace="team", **more)
    bring_up(api.client(), options, print, waits=False)
    api.make_pods()


def test_pods_events_and_the_form_of_what_is_there_are_shown(api: FakeApi, app: Any) -> None:
    make_cluster(api, image="insitu:7", storage="9Gi")
    api.get("Pod", "store-1")["status"] = {"conditions": []}
    about = {"kind": "Pod", "name": "store-1"}
    api.put("Event", "e", involvedObject=about, reason="Pulling", message="an <image>", lastTimestamp="2026")
    shown = app("operate").get("/pages/k8s").text
    assert "Head and stores in team" in shown and "its node to start it" in shown
    assert "Pod store-1: Pulling" in shown and "an &lt;image&gt;" in shown
    assert "Change the cluster" in shown and 'name="image" placeholder' in shown and "insitu:7" in shown
    assert 'name="nodes" type="number" min="1" required value="2"' in shown
    viewed = app("view").get("/pages/k8s").text
    assert "Head and stores in team" in viewed and "<button>Show what" not in viewed


def test_a_namespace_without_a_cluster_has_the_form_alone(app: Any) -> None:
    shown = app("operate").get("/pages/k8s?namespace=team").text
    assert "Received: team without one" in shown and "Bring up a cluster" in shown


def test_a_cluster_comes_up_once_its_objects_were_shown(api: FakeApi, app: Any, started: list[Any]) -> None:
    fields = {"nodes": "3", "namespace": "team", "image": "insitu:7"}
    shown = app("operate").submit("/pages/k8s/up", fields)
    assert shown.status == 200 and "StatefulSet store: new" in shown.text and not api.changes
    assert "insitu k8s up --nodes 3 --image insitu:7 --namespace team" in shown.text
    done = app("operate").submit("/pages/k8s/up", {**fields, "confirmed": "yes"})
    assert done.status == 303 and done.header("location") == "/pages/k8s?namespace=team&context="
    assert started == [["k8s", "up", "--nodes", "3", "--image", "insitu:7", "--namespace", "team"]]


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"storage_class": "none"}, "storage_class", "names one that is there: fast"),
        ({"nodes": "0"}, "nodes", "greater than or equal to 1"),
        ({"gpus": "2"}, "gpus", "the most that one of 1 node has is 0"),
        ({"queue": "q"}, "queue", "Have an administrator install Kueue"),
        ({"storage": "lots"}, "storage", "is a quantity of Kubernetes"),
        ({"namespace": "Team"}, "namespace", "at most 63 small letters"),
    ],
)
def test_what_can_not_be_is_said_at_its_field(
    app: Any, api: FakeApi, started: list[Any], fields: dict[str, str], field: str, said: str
) -> None:
    answer = app("operate").submit("/pages/k8s/up", {"namespace": "team", **fields, "confirmed": "yes"})
    assert answer.status == 400 and not started and not api.changes
    assert said in answer.text.split(f'id="{field}-problem">')[1].partition("</p>")[0]


def test_a_disk_that_can_not_change_is_refused_at_its_field(api: FakeApi, app: Any) -> None:
    make_cluster(api)
    fixed = "updates to statefulset spec for fields other than 'replicas' are forbidden"
    api.answers["PATCH .*statefulsets/store.*dryRun"] = status_of(422, "Invalid", fixed)
    answer = app("operate").submit("/pages/k8s/up", {"nodes": "2", "storage": "60Gi"})
    problem = answer.text.split('id="storage-problem">')[1].partition("</p>")[0]
    assert "The size and the class of disks stay as a set was made" in problem


def test_scaling_says_which_stores_come_and_go(api: FakeApi, app: Any, started: list[Any]) -> None:
    make_cluster(api)
    client = app("operate")
    assert "store-2: new" in client.submit("/pages/k8s/scale", {"nodes": "3"}).text
    assert (
        "store-1: drained, then removed; its disk stays"
        in client.submit("/pages/k8s/scale", {"nodes": "1"}).text
    )
    same = client.submit("/pages/k8s/scale", {"nodes": "2", "confirmed": "yes"})
    assert same.status == 400 and 'id="scale-problem">--nodes is another number than now' in same.text
    assert "needs" not in same.text and not started
    assert client.submit("/pages/k8s/scale", {"nodes": "3", "confirmed": "yes"}).status == 303
    assert started == [["k8s", "scale", "--nodes", "3"]]


def test_a_cluster_without_stores_is_not_scaled(api: FakeApi, app: Any) -> None:
    make_cluster(api)
    del api.objects[k8s_client.path_of("StatefulSet", "team", "store")]
    answer = app("operate").submit("/pages/k8s/scale", {"nodes": "3"})
    assert answer.status == 400 and "A cluster has stores. Received: none in team" in answer.text


def test_who_may_only_view_changes_nothing(api: FakeApi, app: Any, started: list[Any]) -> None:
    for form in ("up", "scale"):
        assert app("view").submit(f"/pages/k8s/{form}", {"nodes": "3", "confirmed": "yes"}).status == 403
    assert not started and not api.changes


def test_a_server_that_is_away_is_said_and_what_was_known_stays(api: FakeApi, app: Any) -> None:
    make_cluster(api)
    client = app("view")
    client.get("/pages/k8s")
    api.answers["GET"] = OSError("timed out")
    shown = client.get("/pages/k8s").text
    assert "The API server must answer. Received: https://fake:6443: timed out" in shown
    assert "Head and stores in team" in shown and "This is how it was at" in shown
    assert client.get("/").status == 200


def test_a_server_that_was_never_there_leaves_a_page_too(api: FakeApi, app: Any) -> None:
    api.answers["GET"] = OSError("timed out")
    shown = app("operate").get("/pages/k8s").text
    assert "The API server must answer" in shown and "Bring up a cluster" in shown


def make_job(api: FakeApi, job: str) -> None:
    api.groups |= {"kueue.x-k8s.io/v1beta1", "jobset.x-k8s.io/v1alpha2"}
    owner = [{"kind": "JobSet", "name": "job-digits-1"}]
    labels = {"insitu.dev/job": job}
    api.put("JobSet", "job-digits-1", spec={"suspend": True})["metadata"]["labels"] = labels
    pod = api.put("Pod", "job-digits-1-store-0", spec={"nodeName": "n1"}, status={"phase": "Running"})
    pod["metadata"]["labels"] = labels
    waiting = api.put("Workload", "jobset-digits", spec={"queueName": "q"})
    waiting["metadata"] |= {"creationTimestamp": "1", "ownerReferences": owner}
    api.put("LocalQueue", "q", spec={"clusterQueue": "all"}, status={"pendingWorkloads": 1})
    for kind, name in (("Workload", "jobset-digits"), ("Pod", "store-0"), ("Job", "another")):
        about = {"kind": kind, "name": name}
        api.put(
            "Event", name, involvedObject=about, reason="Pending", message=f"about {name}", lastTimestamp="2"
        )


def test_a_job_shows_its_pods_its_place_and_its_events(
    api: FakeApi, page: KubernetesPage, app: Any, tmp_path: Path
) -> None:
    make_job(api, "digits-1")
    plugin_pages.load_page("k8s")
    found = page.read_job(Paths(tmp_path).job("digits-1"))
    shown = render("k8s/job.html", look=looks.Look(found, at=1.0))
    assert "job-digits-1-store-0" in shown and "running" in shown and "n1" in shown
    assert "It waits: place 1 of 1 in queue q" in shown and "about jobset-digits" in shown
    assert "about another" not in shown
    silent = render("k8s/job.html", look=looks.Look(problem="The API server doesn't answer"))
    assert "The API server doesn&#39;t answer" in silent and "no pods" not in silent


def test_who_may_not_read_queues_sees_the_rest(api: FakeApi, page: KubernetesPage) -> None:
    make_cluster(api)
    make_job(api, "digits-1")
    (queue,) = page.read(READ)["queues"]
    assert (queue["name"], queue["quotas"], page.read(READ)["jobs"][0]["state"]) == ("q", (), "running")
    api.answers["GET .*workloads"] = status_of(403, "Forbidden", "no")
    assert page.read(READ)["queues"] == [] and page.read(READ)["pods"]


def test_the_page_of_the_heads_pod_may_only_look(
    page: KubernetesPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setattr(k8s_page, "_KUBECONFIG", Path("/nowhere"))
    assert page.is_here()
    with pytest.raises(InputError, match="whose account may only look"):
        page.plan("up", UpRequest())


def test_it_is_there_for_who_has_kubernetes(page: KubernetesPage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page.is_here()
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setattr(k8s_page, "_KUBECONFIG", Path("/nowhere"))
    assert not page.is_here()


def test_a_dry_run_names_the_values_that_change(api: FakeApi) -> None:
    make_cluster(api)
    before = [*api.changes]
    lines = preview(api.client(), ClusterOptions(nodes=3, namespace="team"), print, waits=False)
    assert "StatefulSet store: spec.replicas: 2 -> 3" in lines and "Service head: stays as it is" in lines
    there = ClusterOptions(namespace="other", create_namespace=True)
    elsewhere = k8s_client.Client(api, "other")
    assert preview(elsewhere, there, print, waits=False)[0] == "Namespace other: new"
    assert api.changes == before


def test_values_that_change_are_found_in_lists_too() -> None:
    old = {"a": [{"b": 1}, {"b": 2}], "status": 1, "metadata": {"generation": 1, "name": "x"}}
    new = {"a": [{"b": 1}, {"b": 3, "c": "d"}], "metadata": {"generation": 2, "name": "x"}}
    assert list_changes(old, new) == ["a[1].b: 2 -> 3", "a[1].c: none -> d"]
