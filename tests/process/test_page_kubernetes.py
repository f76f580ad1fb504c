"""The page of Kubernetes in a real browser: readable, narrow, by the keyboard, and without JavaScript."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from k8s_fake import FakeApi
from page_browser import NARROW, Visitor, browsing, sign_in
from page_checks import find_poor_contrast, walk_by_keyboard

pytest.importorskip("fastapi")

from insitu.base.paths import Paths
from insitu.extensions.kubernetes import client as k8s_client
from insitu.extensions.kubernetes.cluster import bring_up
from insitu.extensions.kubernetes.options import ClusterOptions
from insitu.extensions.kubernetes.page import KubernetesPage
from insitu.ui import UIOptions, find_origins, make_config, open_socket, plugin_pages
from insitu.ui.access import Access
from insitu.ui.app import make_application
from insitu.ui.boards import Boards
from insitu.ui.guard import AuditLog
from insitu.ui.started_commands import StartedCommands
from insitu.ui.state import UIState
from insitu.ui.uploads import Uploads

pytestmark = [pytest.mark.ui, pytest.mark.timeout(330)]
PATH = "/pages/k8s"


@pytest.fixture
def pictures() -> Path:
    folder = Path(os.environ.get("TEST_UI_PICTURES", "build/page")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_cluster() -> FakeApi:
    """A cluster of which a store waits, with an event."""
    api = FakeApi()
    bring_up(api.client(), ClusterOptions(nodes=2, namespace="team", gpus=0), print, waits=False)
    api.make_pods()
    said = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"
    waiting = {"type": "PodScheduled", "status": "False", "message": said}
    pod = api.get("Pod", "store-1")
    pod |= {"spec": {}, "status": {"conditions": [waiting]}}
    about = {"kind": "Pod", "name": "store-1"}
    event = {"involvedObject": about, "reason": "FailedScheduling", "message": said, "type": "Warning"}
    api.put("Event", "e", lastTimestamp="2026-11-29T12:00:00Z", **event)
    return api


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A link to a page that reads a cluster in memory."""
    import uvicorn

    api, options = make_cluster(), UIOptions(port=0)
    monkeypatch.setattr(k8s_client, "KubeconfigTransport", lambda context: api)
    monkeypatch.setenv("KUBECONFIG", "some")
    monkeypatch.setattr(plugin_pages, "list_plugins", lambda kind: ("k8s",))
    page = KubernetesPage()
    monkeypatch.setattr(plugin_pages, "load_plugin", lambda kind, name: page)
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    listening = open_socket(options)
    port = listening.getsockname()[1]
    state = UIState(
        paths=Paths(home),
        access=Access(),
        cookie="c",
        secure=False,
        url=f"http://127.0.0.1:{port}",
        uploads=Uploads(),
        commands=StartedCommands({}),
        boards=Boards({}),
    )
    app = make_application(state, AuditLog(home / "audit"), find_origins(options, port))
    server = uvicorn.Server(make_config(app, options, print))
    state.ends = lambda: server.should_exit
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    yield f"{state.url}/login?token={state.access.make_link('operate', time.monotonic())}"
    server.should_exit = True
    thread.join()
    state.uploads.close()


def test_it_is_readable_narrow_by_the_keyboard_and_without_javascript(link: str, pictures: Path) -> None:
    origin = link.partition("/login")[0]
    with browsing() as browser:
        visitor = Visitor(browser, pictures)
        sign_in(visitor, link)
        signed = visitor.context.storage_state()
        visitor.page.get_by_role("link", name="Kubernetes").click()
        visitor.page.get_by_text("3 Insufficient nvidia.com/gpu").first.wait_for()
        visitor.take("kubernetes")
        for scheme in ("light", "dark"):
            plain = Visitor(
                browser, pictures, color_scheme=scheme, storage_state=signed, java_script_enabled=False
            )
            plain.page.set_viewport_size(NARROW)
            plain.page.goto(f"{origin}{PATH}")
            plain.page.get_by_label("Number of stores, each on a node of its own").fill("3")
            plain.page.get_by_role("button", name="Show what this would do").click()
            plain.page.get_by_text("StatefulSet store: spec.replicas: 2 -> 3").wait_for()
            plain.take(f"small-kubernetes-{scheme}")
            plain.page.get_by_label("Storage class of the disks").fill("none")
            plain.page.get_by_role("button", name="Show what this would do").click()
            plain.page.locator("#storage_class-problem").wait_for()

            other = Visitor(browser, pictures, color_scheme=scheme, storage_state=signed)
            other.page.set_viewport_size(NARROW)
            other.page.goto(f"{origin}{PATH}")
            assert other.fits()
            count, poor = find_poor_contrast(other.page)
            assert count > 30 and poor == []
            stops = walk_by_keyboard(other.page)
            assert {"scale-nodes", "nodes", "storage_class"} <= {stop["fields"] for stop in stops}
        assert not visitor.complaints
