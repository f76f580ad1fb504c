"""Pages that installed packages bring, by entry points of `insitu.pages`. They know no web framework."""

from __future__ import annotations

import functools
import shlex
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, cast
from urllib.parse import urlencode

import anyio.to_thread
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse, StreamingResponse
from pydantic import ValidationError

from insitu.base.errors import InputError, InsituError
from insitu.base.paths import JobPaths
from insitu.base.plugins import PAGES, list_plugins, load_plugin
from insitu.options import Declared, options_at
from insitu.ui.access import Session
from insitu.ui.events import encode_event, follow_changes, refuse_too_many
from insitu.ui.forms import make_request, place_problems
from insitu.ui.looks import Look
from insitu.ui.rendering import add_folder, render, render_page, share_value
from insitu.ui.state import UIState, get_session, get_state, record_for_audit

_LONGEST = 300
_KEPT = 300.0
"""Seconds for which it is kept which pages know something about a job: that doesn't change."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a form would do."""

    #: The command that does it, behind `insitu`.
    arguments: Sequence[str]
    #: What that changes, a line for each thing.
    lines: Sequence[str] = ()


class PluginPage(Protocol):
    """A page of a package. Its methods run in threads, may take long, and raise InsituError."""

    #: The name in the navigation.
    title: str
    #: What it reads from, as in `the API server`.
    source: str
    #: The folder with its templates: `page.html`, `live.html`, which is pushed as it changes, and `job.html`.
    templates: Path
    #: Names of texts that choose what it shows. Forms send those alone that they have as options.
    query: Sequence[str]
    #: The options of each form, by the form's name.
    forms: Mapping[str, type[Declared]]

    def is_here(self) -> bool:
        """Return whether the navigation shows it. Reads no more than a file."""

    def read(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Return values for `page.html` and `live.html`. `fields` are those of forms, by the form's name."""

    def plan(self, form: str, request: Any) -> Plan:
        """Return what a form would do with the options that it has sent. Changes nothing."""

    def concerns(self, job: JobPaths) -> bool:
        """Return whether it knows something about a job. Reads the job's folder alone."""

    def read_job(self, job: JobPaths) -> Mapping[str, Any]:
        """Return values for `job.html`, about a job that concerns it."""


router = APIRouter(include_in_schema=False)
State = Annotated[UIState, Depends(get_state)]
Asking = Annotated[Session, Depends(get_session)]


def load_page(name: str) -> PluginPage:
    """Return a page. Raises InputError."""
    page = cast(PluginPage, load_plugin(PAGES, name))
    add_folder(name, page.templates)
    return page


def list_links() -> list[tuple[str, str]]:
    """Return the names and titles of the pages in the navigation. A page that can't be loaded says why."""
    links = []
    for name in list_plugins(PAGES):
        try:
            page = load_page(name)
            if page.is_here():
                links.append((name, page.title))
        except Exception:  # the package's own code runs, and the other pages have these links, too
            links.append((name, name))
    return links


share_value("plugin_links", list_links)


def _choose(page: PluginPage, given: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(given.get(key) or "").strip()[:_LONGEST] for key in page.query}


async def _read(state: UIState, name: str, page: PluginPage, query: Mapping[str, str]) -> Look:
    subject = ("page", name, *query.values())
    return await state.looks.get(subject, lambda: page.read(query), f"{page.source} doesn't answer")


async def _render(
    state: UIState,
    session: Session,
    name: str,
    given: Mapping[str, str],
    form: str = "",
    status: int = 200,
    **shown: Any,
) -> HTMLResponse:
    """Return a page. `form` is the one that has sent what is `given`; else that chooses what is shown."""
    page = load_page(name)
    query = _choose(page, given)
    look = await _read(state, name, page, query)
    known = (look.found or {}).get("fields", {})
    fields = {each: given if each == form else known.get(each, {}) for each in page.forms}
    more: dict[str, Any] = {"plan": None, "command_line": "", "wrong": {}, **shown}
    return render_page(
        f"{name}/page.html",
        status,
        session=session,
        here=name,
        query=query,
        address=urlencode(query),
        look=look,
        form=form,
        given={each: defaultdict(str, query | dict(values)) for each, values in fields.items()},
        declared={each: options_at(page.forms[each], "form") for each in page.forms},
        runs=state.commands.list(name),
        **more,
    )


@router.get("/pages/{name}")
async def show_page(name: str, request: Request, state: State, session: Asking) -> HTMLResponse:
    return await _render(state, session, name, request.query_params)


@router.get("/live/pages/{name}")
async def follow_page(name: str, request: Request, state: State) -> StreamingResponse:
    refuse_too_many(state)
    page = load_page(name)
    query = _choose(page, request.query_params)

    async def read() -> str:
        look = await _read(state, name, page, query)
        return render(f"{name}/live.html", look=look, runs=state.commands.list(name))

    async def events() -> AsyncIterator[bytes]:
        async for shown in follow_changes(state, request, read):
            yield b": alive\n\n" if shown is None else encode_event("live", shown)

    return StreamingResponse(events(), media_type="text/event-stream")


@router.post("/pages/{name}/{form}")
async def send_form(name: str, form: str, request: Request, state: State, session: Asking) -> Response:
    """Show what a form would do, or do it once somebody has seen that."""
    page = load_page(name)
    if form not in page.forms:
        raise InputError(f"{name} has the forms {', '.join(page.forms)}. Received: {form[:50]}")
    sent = await request.form(max_files=0, max_fields=100)
    given = {key: value for key, value in sent.items() if isinstance(value, str)}
    is_confirmed = given.pop("confirmed", "") == "yes"
    try:
        options = make_request(page.forms[form], given)
        plan = await anyio.to_thread.run_sync(page.plan, form, options)
    except (InsituError, ValidationError) as error:
        wrong = place_problems(error, options_at(page.forms[form], "form"))
        return await _render(state, session, name, given, form, 400, wrong=wrong)
    if not is_confirmed:
        command_line = shlex.join(["insitu", *plan.arguments])
        return await _render(state, session, name, given, form, plan=plan, command_line=command_line)
    run = state.commands.start(name, form, plan.arguments, lambda: None)
    record_for_audit(request, command=run["command_line"][:2000])
    return RedirectResponse(f"/pages/{name}?{urlencode(_choose(page, given))}", 303)


async def render_job(state: UIState, job: JobPaths) -> str:
    """Return what pages know about a job."""

    def find() -> list[str]:
        return [name for name, _ in list_links() if _concerns(name, job)]

    parts = []
    for name in await state.snapshots.get(("pages", str(job.root)), find, _KEPT):
        page = load_page(name)
        subject, read = ("job", name, str(job.root)), functools.partial(page.read_job, job)
        look = await state.looks.get(subject, read, f"{page.source} doesn't answer")
        parts.append(render(f"{name}/job.html", look=look))
    return "".join(parts)


def _concerns(name: str, job: JobPaths) -> bool:
    try:
        return load_page(name).concerns(job)
    except Exception:  # as in list_links
        return False
