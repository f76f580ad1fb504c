"""The page: documents for browsers. It shows what the REST interface has, and changes the same."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import anyio.to_thread
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse, StreamingResponse
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile

from insitu.base.errors import InputError, InsituError
from insitu.base.measure.task_samples import read_samples
from insitu.base.paths import JobPaths, Paths
from insitu.base.spec import NO_CACHE, TaskId
from insitu.cluster import find_job, read_curve, read_options, read_spec
from insitu.grid import count_rows, list_epochs
from insitu.options import ImportOptions, JobOptions, options_at
from insitu.service import (
    IMPORT_OPTIONS,
    audit_epochs,
    describe_columns,
    find_example,
    has_summaries,
    list_examples,
    preview_rows,
    read_log,
)
from insitu.ui import actions
from insitu.ui.access import Role, Session
from insitu.ui.artifacts import list_artifacts
from insitu.ui.charts import draw_histogram
from insitu.ui.events import encode_event, follow_changes, refuse_too_many
from insitu.ui.forms import ImportForm, StartForm, place_problems, read_fields, write_fields
from insitu.ui.numbers_view import draw_comparison, read_numbers
from insitu.ui.pictures import show_rows
from insitu.ui.plugin_pages import render_job
from insitu.ui.rendering import render, render_page
from insitu.ui.state import UIState, get_session, get_state, record_for_audit

# Parts of a job's page: fragments that are pushed when they change


FRAGMENTS = ("head", "actions", "curves", "tasks", "log", "history", "goodput", "data")
"""Names of the fragments, which are those of events and of templates."""
_LINES = 300
_EPOCHS = 8
"""Epochs whose audit is shown."""
_ENDED = ("finished", "failed", "stopped")


def render_fragments(
    job: JobPaths,
    report: dict[str, Any],
    numbers: dict[str, Any],
    role: Role,
    log: dict[str, Any],
    board: str | None = None,
) -> dict[str, str]:
    """Return each fragment of a job's page. `report` and `numbers` are what `build_job_report` and
    `read_numbers` have returned a moment ago. `log` holds `task`, `attempt`, `search` and `before`, `board`
    the address of its TensorBoard. Reads files."""
    epochs = list_epochs(job)
    values = {
        "job": report,
        "ledger": audit_epochs(job, epochs[-_EPOCHS:][0]) if epochs else [],
        "epochs": len(epochs),
        "command": shlex.join(report["command"]),
        "role": role,
        "numbers": numbers,
        "ended": report["state"] in _ENDED,
        "rows": count_rows(job) if epochs else _count_fed(job, report),
        "artifacts": list_artifacts(job),
        "page": read_log(
            job,
            log["task"] or None,
            attempt=log["attempt"],
            lines=_LINES,
            before=log["before"],
            search=log["search"],
        ),
        "log": log,
        "timeline": list_events(report),
        "board": board,
        "has_summaries": has_summaries(job),
    }
    return {name: render(f"_{name}.html", **values) for name in FRAGMENTS}


def _count_fed(job: JobPaths, report: Mapping[str, Any]) -> int:
    """Return the rows that tasks have fed to the model by their samples, in all incarnations: those of a
    job without a ledger, or before its first epoch is over."""
    total = 0
    for task in report["task_list"]:
        samples = read_samples(job.samples(TaskId.parse(task["task"])))
        total += sum({sample.attempt: sample.rows for sample in samples}.values())
    return total


def list_events(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what happened to a job, in order: `{"at", "kind", "title", "text"}`. Failures are `bad`."""
    events: list[dict[str, Any]] = [
        {"at": report["created"], "kind": "plain", "title": "Job submitted", "text": ""}
    ]
    for attempt in report["attempts"]:
        events.append(
            {
                "at": attempt["started"],
                "kind": "plain",
                "title": f"Attempt {attempt['number']} started",
                "text": "",
            }
        )
        if attempt["ended"]:
            cause = attempt["cause"]
            events.append(
                {
                    "at": attempt["ended"],
                    "kind": "bad" if cause else "good",
                    "title": f"Attempt {attempt['number']} ended",
                    "text": cause["text"] if cause else "all tasks have ended well",
                }
            )
    for recovery in report["recoveries"]:
        took = (
            ""
            if recovery["seconds"] is None
            else f" The next step came {recovery['seconds']:.2f} s after it."
        )
        events.append(
            {
                "at": recovery["at"],
                "kind": "bad" if recovery["how"] in ("replaced", "adopted") else "plain",
                "title": f"{', '.join(recovery['tasks'])} {recovery['how']}",
                "text": f"{recovery['text']}.{took}",
            }
        )
    return sorted(events, key=lambda event: event["at"])


def count_changed(before: Mapping[str, str], after: Mapping[str, str]) -> Sequence[str]:
    """Return the names of the fragments that differ."""
    return [name for name in after if before.get(name) != after[name]]


# Fills the form of a job that is started like one that there is


def read_clone(paths: Paths, job_id: str) -> dict[str, Any]:
    """Return the fields that start a job like one that there is, with its copy of the code. Raises
    UnknownJob."""
    job = find_job(paths, job_id)
    options = read_options(job)
    fields = write_fields(options)
    return fields | {"cache": options.cache, "job_dir": str(job.code), "command": shlex.join(options.command)}


router = APIRouter(include_in_schema=False)
State = Annotated[UIState, Depends(get_state)]
Asking = Annotated[Session, Depends(get_session)]
Text = Annotated[str, Query(max_length=300)]
_PER_PAGE = 50
_COPY = 1 << 20
_MOST_COMPARED = 8
"""Jobs in one chart, which has as many colours."""
_MINUTES = 300.0
"""Seconds for which statistics of a version, which doesn't change, are kept."""
_SLOWER = 2.0
"""Seconds for which charts are shown before they are drawn again."""


def format_problems(errors: Any) -> str:
    """Return what is wrong with the fields of a request, a sentence for each."""
    return ". ".join(
        f"{'.'.join(str(part) for part in error['loc'] if part != 'body') or 'The body'}: {error['msg']}"
        for error in errors
    )


def render_error(request: Request, status: int, message: str) -> Response:
    """Return a page that says what went wrong."""
    session = getattr(request.state, "session", None)
    return render_page("error.html", status, session=session, message=message, here="")


@router.get("/login")
async def show_login(token: Text = "") -> HTMLResponse:
    return render_page("login.html", token=token, wrong=False)


@router.post("/login")
async def sign_in(request: Request, state: State) -> Response:
    form = await request.form(max_files=0, max_fields=4)
    token = form.get("token")
    signed = state.access.sign_in(token.strip() if isinstance(token, str) else "", time.monotonic())
    record_for_audit(request, signed_in=signed is not None)
    if signed is None:
        return render_page("login.html", 403, token="", wrong=True)
    record_for_audit(request, new_session=signed[1].name, new_role=signed[1].role)
    answer = RedirectResponse("/", 303)
    answer.set_cookie(
        state.cookie, signed[0], httponly=True, samesite="strict", secure=state.secure, path="/"
    )
    return answer


@router.post("/logout")
async def sign_out(request: Request, state: State) -> Response:
    state.access.sign_out(request.cookies.get(state.cookie, ""))
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(state.cookie, path="/", httponly=True, samesite="strict", secure=state.secure)
    return answer


async def _list_page(state: UIState, job_state: str, find: str, page: int) -> dict[str, Any]:
    jobs = await state.list_jobs()
    counts: dict[str, int] = {}
    for job in jobs:
        counts[job["state"]] = counts.get(job["state"], 0) + 1
    chosen = [
        job
        for job in jobs
        if job_state in ("", job["state"])
        and (not find or find in job["job_id"] or find in job.get("cache", ""))
    ]
    first = _PER_PAGE * page
    return {
        "jobs": chosen[first : first + _PER_PAGE],
        "counts": counts,
        "total": len(chosen),
        "all": len(jobs),
        "first": first,
        "job_state": job_state,
        "find": find,
        "page": page,
        "pages": -(-len(chosen) // _PER_PAGE),
    }


PageNumber = Annotated[int, Query(ge=0, le=1_000_000)]


@router.get("/")
async def show_jobs(
    state: State, session: Asking, job_state: Text = "", find: Text = "", page: PageNumber = 0
) -> HTMLResponse:
    listed = await _list_page(state, job_state, find, page)
    return render_page("jobs.html", session=session, here="jobs", **listed)


@router.get("/live/jobs")
async def follow_jobs(
    request: Request, state: State, job_state: Text = "", find: Text = "", page: PageNumber = 0
) -> StreamingResponse:
    refuse_too_many(state)

    async def read() -> str:
        return render("_jobs.html", **await _list_page(state, job_state, find, page))

    async def events() -> AsyncIterator[bytes]:
        async for shown in follow_changes(state, request, read):
            yield b": alive\n\n" if shown is None else encode_event("jobs", shown)

    return StreamingResponse(events(), media_type="text/event-stream")


def _choose_log(
    task: Text = "",
    attempt: Annotated[str, Query(pattern=r"^\d{0,6}$")] = "",
    search: Text = "",
    before: Annotated[str, Query(pattern=r"^\d{0,18}$")] = "",
) -> dict[str, Any]:
    """Return which log a page shows. A form sends its empty fields, too."""
    return {
        "task": task,
        "attempt": int(attempt or 0) or None,
        "search": search,
        "before": int(before or 0) or None,
    }


Log = Annotated[dict[str, Any], Depends(_choose_log)]


@router.get("/jobs/{job_id}")
async def show_job(
    job_id: str,
    state: State,
    session: Asking,
    log: Log,
) -> HTMLResponse:
    job = await anyio.to_thread.run_sync(find_job, state.paths, job_id)
    fragments = await _read_fragments(state, job, session.role, log)
    return render_page(
        "job.html", session=session, here="jobs", job_id=job.root.name, log=log, fragments=fragments
    )


async def _read_fragments(
    state: UIState, job: JobPaths, role: Role, log: dict[str, Any]
) -> Mapping[str, str]:
    """Return the fragments of a job's page, which are made once for all who look at them at a time."""
    report = await state.describe_job(job)
    name = str(job.root)
    numbers = await state.snapshots.get(
        ("numbers", name), lambda: read_numbers(job, report["evaluations"]), _SLOWER
    )
    board = state.boards.find(job.root.name)
    fragments = await state.snapshots.get(
        ("fragments", name, role, *log.values(), board),
        lambda: render_fragments(job, report, numbers, role, log, board),
    )
    return {**fragments, "plugins": await render_job(state, job)}


@router.get("/live/jobs/{job_id}")
async def follow_job(
    job_id: str,
    request: Request,
    state: State,
    session: Asking,
    log: Log,
) -> StreamingResponse:
    refuse_too_many(state)
    job = await anyio.to_thread.run_sync(find_job, state.paths, job_id)

    async def read() -> Mapping[str, str]:
        return await _read_fragments(state, job, session.role, log)

    async def events() -> AsyncIterator[bytes]:
        shown: Mapping[str, str] = {}
        async for fragments in follow_changes(state, request, read):
            if fragments is None:
                yield b": alive\n\n"
                continue
            for name in count_changed(shown, fragments):
                yield encode_event(name, fragments[name])
            shown = fragments

    return StreamingResponse(events(), media_type="text/event-stream")


async def _change(
    request: Request, session: Session, job_id: str, act: Callable[[], dict[str, Any]], **facts: Any
) -> Response:
    record_for_audit(request, job=job_id, **facts)
    done = await anyio.to_thread.run_sync(act)
    return RedirectResponse(f"/jobs/{done['job_id']}", 303)


@router.post("/jobs/{job_id}/stop")
async def stop_job(job_id: str, request: Request, state: State, session: Asking) -> Response:
    return await _change(request, session, job_id, lambda: actions.stop(state, job_id))


@router.post("/jobs/{job_id}/resume")
async def resume_job(job_id: str, request: Request, state: State, session: Asking) -> Response:
    return await _change(request, session, job_id, lambda: actions.resume(state, job_id, {}))


@router.post("/jobs/{job_id}/tensorboard")
async def start_board(job_id: str, request: Request, state: State, session: Asking) -> Response:
    return await _change(request, session, job_id, lambda: actions.start_board(state, job_id))


@router.post("/jobs/{job_id}/scale")
async def scale_job(job_id: str, request: Request, state: State, session: Asking) -> Response:
    text = (await request.form(max_files=0, max_fields=4)).get("workers")
    if not isinstance(text, str) or not text.isdecimal() or len(text) > 6:
        raise InputError(f"The number of workers is a whole number. Received: {str(text)[:50]!r}")
    return await _change(
        request, session, job_id, lambda: actions.scale(state, job_id, int(text)), workers=int(text)
    )


@router.get("/data")
async def show_caches(state: State, session: Asking, example: Text = "") -> HTMLResponse:
    caches = await state.snapshots.get("caches", lambda: actions.list_caches(state))
    given = {"cache": find_example(example)["data"], **IMPORT_OPTIONS} if example else {}
    return render_page(
        "caches.html",
        session=session,
        here="data",
        caches=caches,
        imports=state.commands.list(),
        problem="",
        fields=defaultdict(str, given),
        options=options_at(ImportOptions, "form"),
    )


@router.get("/live/imports")
async def follow_imports(request: Request, state: State) -> StreamingResponse:
    refuse_too_many(state)

    async def read() -> str:
        return render("_imports.html", imports=state.commands.list())

    async def events() -> AsyncIterator[bytes]:
        async for shown in follow_changes(state, request, read):
            yield b": alive\n\n" if shown is None else encode_event("imports", shown)

    return StreamingResponse(events(), media_type="text/event-stream")


@router.get("/data/{name:path}")
async def show_cache(
    name: str, state: State, session: Asking, seed: Annotated[int, Query(ge=0, lt=1 << 31)] = 0
) -> HTMLResponse:
    def read() -> dict[str, Any]:
        cache = actions.describe_cache(state, name)
        problem, rows = "", []
        try:
            rows = show_rows(cache["columns"], preview_rows(state.paths, name, 24, seed))
        except InsituError as error:  # the rest of the page still says what there is
            problem = error.message
        owners = {owner for p in cache["partition_list"] for owner in (p["primary"], *p["backups"])}
        return {"cache": cache, "rows": rows, "problem": problem, "nodes": sorted(owners)}

    found = await anyio.to_thread.run_sync(read)
    return render_page("cache.html", session=session, here="data", seed=seed, **found)


@router.get("/statistics/{name:path}")
async def show_statistics(name: str, state: State, version: Text = "") -> HTMLResponse:
    subject = ("statistics", name, version)
    found = await state.snapshots.get(subject, lambda: describe_columns(state.paths, name), _MINUTES)
    return render_page("_statistics.html", statistics=found, draw=draw_histogram)


@router.post("/import")
async def start_import(request: Request, state: State, session: Asking) -> Response:
    form = await request.form(max_files=1000, max_fields=100)
    fields = {name: value for name, value in form.items() if isinstance(value, str)}
    try:
        upload = await _keep_upload(state, form, "file")
        values = read_fields(ImportOptions, fields) | ({"upload": upload} if upload else {})
        started = await anyio.to_thread.run_sync(
            actions.start_import, state, ImportForm.model_validate(values)
        )
    except (InputError, ValidationError) as error:
        caches = await state.snapshots.get("caches", lambda: actions.list_caches(state))
        return render_page(
            "caches.html",
            400,
            session=session,
            here="data",
            caches=caches,
            imports=state.commands.list(),
            problem=_explain(error),
            fields=defaultdict(str, fields),
            options=options_at(ImportOptions, "form"),
        )
    record_for_audit(request, command=started["command_line"][:2000])
    return RedirectResponse("/data#imports", 303)


def _explain(error: InputError | ValidationError) -> str:
    return error.message if isinstance(error, InputError) else format_problems(error.errors())


async def _keep_upload(state: UIState, form: FormData, field: str) -> str | None:
    """Keep the files that a form has sent, and return their token; None if there are none."""
    token = None
    for sent in form.getlist(field):
        if isinstance(sent, UploadFile) and sent.filename:
            token, _, file = state.uploads.open(sent.filename, token)
            state.uploads.use(token)
            try:
                with file:
                    while chunk := await sent.read(_COPY):
                        await anyio.to_thread.run_sync(file.write, chunk)
            finally:
                state.uploads.end_use(token)
    return token


@router.get("/compare")
async def show_comparison(
    state: State,
    session: Asking,
    job: Annotated[list[str] | None, Query(max_length=_MOST_COMPARED)] = None,
    over: Literal["updates", "seconds"] = "updates",
) -> HTMLResponse:
    chosen = list(dict.fromkeys(job or []))

    def read() -> list[Any]:
        found = [find_job(state.paths, each) for each in chosen]
        return draw_comparison({f.root.name: (read_spec(f).created, read_curve(f)) for f in found}, over)

    charts = await anyio.to_thread.run_sync(read)
    jobs = (await state.list_jobs())[:200]
    return render_page(
        "compare.html",
        session=session,
        here="compare",
        jobs=jobs,
        chosen=chosen,
        over=over,
        charts=charts,
        most=_MOST_COMPARED,
    )


@router.get("/nodes")
async def show_nodes(state: State, session: Asking) -> HTMLResponse:
    nodes = await state.list_nodes()
    return render_page("nodes.html", session=session, here="nodes", nodes=nodes)


async def _render_start(
    state: UIState,
    session: Session,
    fields: dict[str, Any],
    problems: list[str],
    status: int = 200,
    example: dict[str, Any] | None = None,
    wrong: Mapping[str, str] | None = None,
) -> HTMLResponse:
    caches = await state.snapshots.get("caches", lambda: actions.list_caches(state))
    nodes = await state.list_nodes()
    return render_page(
        "start.html",
        status,
        session=session,
        here="start",
        caches=caches,
        fields=defaultdict(str, fields),
        preview=await anyio.to_thread.run_sync(_preview, state, fields),
        problems=problems,
        no_cache=NO_CACHE,
        examples=list_examples(),
        example=example,
        nodes=[each["node"] for each in nodes],
        options=options_at(JobOptions, "form"),
        wrong=wrong or {},
    )


def _preview(state: UIState, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the command line of what a form holds, and its problems."""
    if not any(fields.get(name) for name in ("command", "job_dir")):
        return {"command_line": "", "problems": []}
    try:
        return actions.check_start(state, StartForm.model_validate(read_fields(JobOptions, fields)))
    except (InputError, ValidationError) as error:
        return {"command_line": "", "problems": [_explain(error)]}


@router.get("/start")
async def show_start(
    state: State, session: Asking, clone: Text = "", cache: Text = "", example: Text = ""
) -> HTMLResponse:
    fields: dict[str, Any] = {"cache": cache} if cache else {}
    chosen = find_example(example) if example else None
    if chosen:
        fields = {name: str(chosen[name]) for name in ("cache", "workers", "job_dir")}
        fields |= {"command": shlex.join(chosen["command"]), "ps": str(chosen["ps"] or "")}
    elif clone:
        fields = await anyio.to_thread.run_sync(read_clone, state.paths, clone)
    return await _render_start(state, session, fields, [], example=chosen)


@router.post("/start/preview")
async def preview_start(request: Request, state: State) -> HTMLResponse:
    form = await request.form(max_files=0, max_fields=100)
    preview = await anyio.to_thread.run_sync(_preview, state, dict(form))
    return render_page("_preview.html", preview=preview)


@router.post("/start")
async def start_job(request: Request, state: State, session: Asking) -> Response:
    form = await request.form(max_files=1, max_fields=100)
    fields = {name: value for name, value in form.items() if isinstance(value, str)}
    try:
        upload = await _keep_upload(state, form, "zip")
        values = read_fields(JobOptions, fields) | ({"upload": upload} if upload else {})
        checked = StartForm.model_validate(values)
        started = await anyio.to_thread.run_sync(actions.start_job, state, checked)
    except (InsituError, ValidationError) as error:
        text = error.message if isinstance(error, InsituError) else format_problems(error.errors())
        wrong = place_problems(error, options_at(JobOptions, "form"))
        return await _render_start(state, session, fields, [text], 400, wrong=wrong)
    record_for_audit(request, job=started["job_id"], command=started["command_line"][:2000])
    return RedirectResponse(f"/jobs/{started['job_id']}", 303)
