"""The REST interface: `/api/v1/...`, in the forms of docs/reference/json.md."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi import Path as PathField
from fastapi.responses import FileResponse, StreamingResponse

from insitu.base.errors import InputError
from insitu.cluster import find_job
from insitu.service import describe_columns, list_examples, preview_rows, read_log
from insitu.ui import actions
from insitu.ui.access import Session
from insitu.ui.artifacts import find_artifact, list_artifacts
from insitu.ui.events import encode_event, follow_changes
from insitu.ui.forms import ImportForm, LinkForm, ResumeForm, ScaleForm, StartForm
from insitu.ui.numbers_view import read_curve_points
from insitu.ui.state import UIState, get_session, get_state, record_for_audit

PREFIX = "/api/v1"
UPLOADS = f"{PREFIX}/uploads"
Json = dict[str, Any]
State = Annotated[UIState, Depends(get_state)]
Asking = Annotated[Session, Depends(get_session)]
JobId = Annotated[str, PathField(max_length=200, description="The job's id, or enough of its beginning.")]

_ERROR = {"description": "`{error: {kind, message, logs}}`"}
_ERRORS: dict[int | str, Json] = dict.fromkeys((400, 401, 403, 404, 409, 413, 500, 507), _ERROR)
router = APIRouter(prefix=PREFIX, responses=_ERRORS)


@router.get("/session", summary="Who asks")
async def read_session(session: Asking) -> Json:
    return {"role": session.role, "name": session.name}


@router.post("/links", summary="Make a link that signs somebody in once", status_code=201)
async def make_link(form: LinkForm, state: State, request: Request) -> Json:
    import time

    record_for_audit(request, link=form.role)
    return {"url": f"{state.url}/login?token={state.access.make_link(form.role, time.monotonic())}"}


@router.get("/jobs", summary="Jobs, the newest first, as `insitu ps --all --json` lists them")
async def list_jobs(
    state: State,
    response: Response,
    job_state: Annotated[str | None, Query(alias="state", max_length=20)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
) -> list[Json]:
    jobs = [job for job in await state.list_jobs() if job_state in (None, job["state"])]
    response.headers["X-Total-Count"] = str(len(jobs))
    return jobs[offset : offset + limit]


@router.post("/jobs", summary="Start a job", status_code=201)
async def start_job(form: StartForm, state: State, request: Request) -> Json:
    started = await anyio.to_thread.run_sync(actions.start_job, state, form)
    record_for_audit(request, job=started["job_id"], command=started["command_line"][:2000])
    return started


@router.post("/jobs/check", summary="What a job would be started with, and what is wrong with that")
async def check_start(form: StartForm, state: State) -> Json:
    return await anyio.to_thread.run_sync(actions.check_start, state, form)


@router.get("/jobs/{job_id}/curve", summary="Metrics over the updates of the model")
async def read_curve(job_id: JobId, state: State) -> list[Json]:
    return await anyio.to_thread.run_sync(lambda: read_curve_points(find_job(state.paths, job_id)))


@router.get("/jobs/{job_id}", summary="All about a job, as `insitu describe JOB --json` has it")
async def describe_job(
    job_id: JobId, state: State, ledger: bool = False, events: bool = False, goodput: bool = False
) -> Json:
    job = await anyio.to_thread.run_sync(find_job, state.paths, job_id)
    return await state.describe_job(job, ledger=ledger, events=events, goodput=goodput)


@router.post("/jobs/{job_id}/stop", summary="Stop a job; asked again, kill it", status_code=202)
async def stop_job(job_id: JobId, state: State, request: Request) -> Json:
    record_for_audit(request, job=job_id)
    return await anyio.to_thread.run_sync(actions.stop, state, job_id)


@router.post("/jobs/{job_id}/resume", summary="Let a job continue from its last checkpoint", status_code=202)
async def resume_job(job_id: JobId, state: State, request: Request, form: ResumeForm | None = None) -> Json:
    given = form.env if form is not None else {}
    record_for_audit(request, job=job_id, env=sorted(given))
    return await anyio.to_thread.run_sync(actions.resume, state, job_id, given)


@router.post("/jobs/{job_id}/scale", summary="Give a job another number of workers", status_code=202)
async def scale_job(job_id: JobId, form: ScaleForm, state: State, request: Request) -> Json:
    record_for_audit(request, job=job_id, workers=form.workers)
    return await anyio.to_thread.run_sync(actions.scale, state, job_id, form.workers)


@router.post(
    "/jobs/{job_id}/tensorboard", summary="Start TensorBoard for the machine of the server", status_code=201
)
async def start_board(job_id: JobId, state: State, request: Request) -> Json:
    record_for_audit(request, job=job_id)
    return await anyio.to_thread.run_sync(actions.start_board, state, job_id)


@router.get("/jobs/{job_id}/logs", summary="The last lines of a log; others with `before` and `after`")
async def read_logs(
    job_id: JobId,
    state: State,
    task: Annotated[str | None, Query(max_length=100)] = None,
    attempt: Annotated[int | None, Query(ge=1, le=1_000_000)] = None,
    lines: Annotated[int, Query(ge=1, le=2000)] = 200,
    before: Annotated[int | None, Query(ge=0, lt=1 << 62)] = None,
    after: Annotated[int | None, Query(ge=0, lt=1 << 62)] = None,
    search: Annotated[str, Query(max_length=200)] = "",
) -> Json:
    def read() -> Json:
        job = find_job(state.paths, job_id)
        return read_log(job, task, attempt=attempt, lines=lines, before=before, after=after, search=search)

    return await anyio.to_thread.run_sync(read)


@router.get(
    "/jobs/{job_id}/live",
    summary="The report of a job whenever it changes, as server-sent events `job`, then `end`",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def follow_job(job_id: JobId, state: State, request: Request) -> StreamingResponse:
    import json

    job = await anyio.to_thread.run_sync(find_job, state.paths, job_id)

    async def events() -> AsyncIterator[bytes]:
        async for report in follow_changes(state, request, lambda: state.describe_job(job)):
            yield b": alive\n\n" if report is None else encode_event("job", json.dumps(report))
            if report is not None and report["exit_code"] is not None:
                yield encode_event("end", report["state"])
                return

    return StreamingResponse(events(), media_type="text/event-stream")


@router.get("/jobs/{job_id}/artifacts", summary="Checkpoints and exported models of a job")
async def list_files(job_id: JobId, state: State) -> list[Json]:
    return await anyio.to_thread.run_sync(lambda: list_artifacts(find_job(state.paths, job_id)))


@router.get(
    "/jobs/{job_id}/artifacts/{path:path}",
    summary="One of these files",
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
async def read_file(job_id: JobId, path: str, state: State) -> FileResponse:
    found = await anyio.to_thread.run_sync(lambda: find_artifact(find_job(state.paths, job_id), path))
    return FileResponse(found, media_type="application/octet-stream", filename=found.name)


@router.get("/caches", summary="Caches, as `insitu caches --json` lists them")
async def list_caches(state: State) -> list[Json]:
    return await state.snapshots.get("caches", lambda: actions.list_caches(state))


@router.get("/caches/{name:path}", summary="All about a cache, as `insitu describe CACHE --json` has it")
async def describe_cache(name: str, state: State) -> Json:
    return await anyio.to_thread.run_sync(actions.describe_cache, state, name)


@router.get("/previews/{name:path}", summary="Some rows of a cache, drawn at random by `seed`")
async def preview_cache(
    name: str,
    state: State,
    rows: Annotated[int, Query(ge=1, le=200)] = 24,
    seed: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
) -> Json:
    return await anyio.to_thread.run_sync(preview_rows, state.paths, name, rows, seed)


@router.get("/statistics/{name:path}", summary="What the columns of a cache hold, by a sample of rows")
async def read_statistics(
    name: str,
    state: State,
    rows: Annotated[int, Query(ge=1, le=20_000)] = 4096,
    seed: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
) -> Json:
    return await anyio.to_thread.run_sync(describe_columns, state.paths, name, rows, seed)


@router.get("/imports", summary="Imports that were started here, the latest first")
async def list_imports(state: State) -> list[Json]:
    return state.commands.list()


@router.post("/imports", summary="Start an import", status_code=202)
async def start_import(form: ImportForm, state: State, request: Request) -> Json:
    started = await anyio.to_thread.run_sync(actions.start_import, state, form)
    record_for_audit(request, command=started["command_line"][:2000])
    return started


@router.get("/imports/{token}", summary="How an import is")
async def read_import(token: str, state: State) -> Json:
    found = state.commands.find_import(token)
    if found is None:
        raise HTTPException(404, "No import has this number. GET /api/v1/imports lists them")
    return found


@router.post(
    "/uploads",
    summary="Send a .zip with a job, or a file to import, as the body",
    status_code=201,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def upload(
    request: Request,
    state: State,
    name: Annotated[str, Query(min_length=1, max_length=200)],
    beside: Annotated[
        str | None,
        Query(alias="upload", pattern=r"^[0-9a-f]{32}$", description="An upload that the file is added to."),
    ] = None,
) -> Json:
    token, path, file = state.uploads.open(name, beside)
    state.uploads.use(token)
    try:
        with file:
            async for chunk in request.stream():
                await anyio.to_thread.run_sync(file.write, chunk)
            size = file.tell()
        if not size:
            raise InputError("A file that is sent isn't empty. Received: no bytes")
    except BaseException:
        state.uploads.remove(token)
        raise
    finally:
        state.uploads.end_use(token)
    record_for_audit(request, upload=path.name, bytes=size)
    return {"upload": token, "name": path.name, "bytes": size}


@router.delete("/uploads/{token}", summary="Remove an upload that nobody has used")
async def remove_upload(token: Annotated[str, PathField(pattern=r"^[0-9a-f]{32}$")], state: State) -> Json:
    state.uploads.list_files(token)  # raises if there is none
    await anyio.to_thread.run_sync(state.uploads.remove, token)
    return {"upload": token}


@router.get("/examples", summary="Examples, as `insitu examples --json` lists them")
async def read_examples() -> list[Json]:
    return await anyio.to_thread.run_sync(list_examples)


@router.get("/nodes", summary="Nodes, as `insitu nodes --json` lists them")
async def read_nodes(state: State) -> list[Json]:
    return await state.list_nodes()
