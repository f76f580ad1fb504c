"""Pages of plug-ins, behind the guard."""

# Types of options are read as they are, so annotations stay evaluated.

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from asgi_client import ORIGIN, Client

pytest.importorskip("fastapi")

from insitu.base.errors import InputError
from insitu.base.paths import JobPaths, Paths
from insitu.options import Declared, option
from insitu.ui import looks, plugin_pages
from insitu.ui.access import Access
from insitu.ui.app import make_application
from insitu.ui.boards import Boards
from insitu.ui.guard import AuditLog
from insitu.ui.plugin_pages import Plan
from insitu.ui.started_commands import StartedCommands
from insitu.ui.state import UIState
from insitu.ui.uploads import Uploads

TEMPLATE = """{% extends "base.html" %}{% block content %}{{ look.problem }}
{% if plan %}{% include "_plan.html" %}{% endif %}
{% set options, fields = declared.pour, given.pour %}{% include "_options.html" %}{% endblock %}"""


@dataclass(frozen=True, slots=True)
class Pour(Declared):
    cups: int = option(1, "Number of cups.", least=1, most=9, common=True)
    kind: str = option("", "Kind of tea.", common=True)


class Tea:
    title, source, query, forms = "Tea <house>", "The kettle", ("pot",), {"pour": Pour}
    shown = True

    def __init__(self, folder: Path) -> None:
        self.templates = folder
        self.boils = threading.Event()
        self.boils.set()

    def is_here(self) -> bool:
        return self.shown

    def read(self, query: Mapping[str, str]) -> dict[str, Any]:
        self.boils.wait()
        return {"pot": query["pot"]}

    def plan(self, form: str, request: Pour) -> Plan:
        if request.kind == "<coffee>":
            raise InputError(f"--kind is tea. Received: {request.kind}. Choose another")
        return Plan(["k8s", "status", "--namespace", "a b"], [f"{request.cups} cups of <tea>"])

    def concerns(self, job: JobPaths) -> bool:
        return False

    def read_job(self, job: JobPaths) -> dict[str, Any]:
        return {}


class Server:
    def __init__(self, home: Path, tea: Tea) -> None:
        paths, environment = Paths(home), {"INSITU_HOME": str(home)}
        self.tea, self.access, self.audit = tea, Access(), home / "audit"
        self.started: list[tuple[Any, ...]] = []
        self.state = UIState(
            paths=paths,
            access=self.access,
            cookie="c",
            secure=False,
            url=ORIGIN,
            uploads=Uploads(),
            commands=StartedCommands(environment),
            boards=Boards(environment),
        )
        app = make_application(self.state, AuditLog(self.audit), frozenset({ORIGIN}))
        self.operator = Client(app, bearer=self.access.make_bearer("operate"))
        self.viewer = Client(app, bearer=self.access.make_bearer("view"))
        self.stranger = Client(app)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    home, folder = tmp_path / "home", tmp_path / "templates"
    home.mkdir(mode=0o700)
    folder.mkdir()
    (folder / "page.html").write_text(TEMPLATE)
    (folder / "live.html").write_text("{{ look.problem }}")
    name = f"tea{tmp_path.name.replace('-', '').replace('_', '')}"  # folders of templates are kept by name
    made = Server(home, Tea(folder))
    made.name = name  # type: ignore[attr-defined]

    def load(kind: str, wanted: str) -> Tea:
        if wanted != name:
            raise InputError(f"A plug-in is registered. Received: {wanted}")
        return made.tea

    monkeypatch.setattr(plugin_pages, "list_plugins", lambda kind: (name,))
    monkeypatch.setattr(plugin_pages, "load_plugin", load)
    monkeypatch.setattr(
        StartedCommands,
        "start",
        lambda self, *given: made.started.append(given[:3]) or {"command_line": "insitu k8s"},
    )
    yield made
    made.tea.boils.set()
    made.state.uploads.close()


def path_of(server: Server, rest: str = "") -> str:
    return f"/pages/{server.name}{rest}"  # type: ignore[attr-defined]


def test_a_page_is_in_the_navigation_if_it_is_here(server: Server) -> None:
    link = f'<a href="{path_of(server)}"'
    assert link in server.viewer.get("/").text and "Tea &lt;house&gt;" in server.viewer.get("/").text
    server.tea.shown = False
    assert link not in server.viewer.get("/").text
    assert server.viewer.get(path_of(server)).status == 200


def test_a_page_that_can_not_be_loaded_leaves_the_others_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_pages, "list_plugins", lambda kind: ("broken",))
    assert server.viewer.get("/").status == 200
    answer = server.viewer.get("/pages/broken")
    assert answer.status == 400 and "A plug-in is registered" in answer.text


def test_a_page_whose_own_code_fails_leaves_the_others_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> bool:
        raise RuntimeError("no water")

    monkeypatch.setattr(server.tea, "is_here", fail)
    answer = server.viewer.get("/")
    assert answer.status == 200 and f'<a href="{path_of(server)}"' in answer.text


def test_a_silent_system_leaves_the_page_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "WAIT_SECONDS", 0.01)
    server.tea.boils.clear()
    answer = server.viewer.get(path_of(server))
    assert answer.status == 200 and "The kettle doesn&#39;t answer" in answer.text
    assert server.viewer.get("/").status == 200


def test_a_form_shows_what_it_would_do_and_then_does_it(server: Server) -> None:
    shown = server.operator.submit(path_of(server, "/pour"), {"cups": "3"})
    assert shown.status == 200 and "3 cups of &lt;tea&gt;" in shown.text and not server.started
    assert "insitu k8s status --namespace &#39;a b&#39;" in shown.text
    assert '<input type="hidden" name="cups" value="3">' in shown.text
    done = server.operator.submit(path_of(server, "/pour"), {"cups": "3", "confirmed": "yes"})
    assert done.status == 303
    assert [each[1:] for each in server.started] == [("pour", ["k8s", "status", "--namespace", "a b"])]


@pytest.mark.parametrize(
    ("sent", "field", "said"),
    [
        ({"cups": "12"}, "cups", "less than or equal to 9"),
        ({"cups": "many"}, "cups", "valid integer"),
        ({"kind": "<coffee>"}, "kind", "Received: &lt;coffee&gt;"),
    ],
)
def test_an_error_is_at_its_field(server: Server, sent: dict[str, str], field: str, said: str) -> None:
    answer = server.operator.submit(path_of(server, "/pour"), {**sent, "confirmed": "yes"})
    assert answer.status == 400 and not server.started
    problem = answer.text.split(f'id="{field}-problem">')[1].partition("</p>")[0]
    assert said in problem and f'aria-describedby="{field}-problem"' in answer.text


def test_who_may_not_change_anything_is_refused(server: Server) -> None:
    fields = {"cups": "3", "confirmed": "yes"}
    assert server.stranger.submit(path_of(server, "/pour"), fields).status == 401
    assert server.viewer.submit(path_of(server, "/pour"), fields).status == 403
    elsewhere = server.operator.submit(path_of(server, "/pour"), fields, origin="https://evil.example")
    assert elsewhere.status == 403 and not server.started
    assert server.stranger.get(path_of(server)).status == 401
    assert server.operator.submit(path_of(server, "/other"), fields).status == 400


def test_a_cookie_changes_something_for_the_page_itself_alone(server: Server) -> None:
    link = server.access.make_link("operate", 0.0)
    signed = server.access.sign_in(link, 0.0)
    assert signed is not None
    browser = Client(server.stranger.app, cookie=f"c={signed[0]}")
    body = b"cups=3&confirmed=yes"
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert browser.call("POST", path_of(server, "/pour"), body, headers=form).status == 401
    assert not server.started
