"""Builds the application: the REST interface and the page, behind the guard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from insitu.base._version import __version__
from insitu.base.errors import (
    CacheBusy,
    CacheExists,
    InputError,
    InsituError,
    JobEnded,
    JobRunning,
    StorageFull,
    UnknownCache,
    UnknownJob,
)
from insitu.ui import api, pages, plugin_pages
from insitu.ui.artifacts import UnknownArtifact
from insitu.ui.guard import MAX_BODY, AuditLog, Guard
from insitu.ui.state import UIState
from insitu.ui.uploads import MAX_DATA, MAX_ZIP

_FORM_ROOM = 1 << 20
"""Bytes of a form beside the file in it."""
_STATUSES: tuple[tuple[type[InsituError], int], ...] = (
    (UnknownCache, 404),
    (UnknownJob, 404),
    (UnknownArtifact, 404),
    (JobEnded, 409),
    (JobRunning, 409),
    (CacheExists, 409),
    (CacheBusy, 409),
    (InputError, 400),
    (StorageFull, 507),
    (InsituError, 500),
)
_DESCRIPTION = """Jobs, caches and nodes of one $INSITU_HOME, in the forms of docs/reference/json.md.

Send `Authorization: Bearer TOKEN`; docs/reference/rest.md says where the tokens are. A token with the role
view may read. An error is `{"error": {"kind", "message", "logs"}}`."""


def make_application(state: UIState, audit: AuditLog, origins: frozenset[str]) -> ASGIApp:
    """Return the application. It answers under the given origins only."""
    app = FastAPI(
        title="insitu",
        version=__version__,
        description=_DESCRIPTION,
        openapi_url=f"{api.PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.ui = state
    app.include_router(api.router)
    app.include_router(pages.router)
    app.include_router(plugin_pages.router)
    app.mount("/static", StaticFiles(directory=Path(__file__).parent / "static"))
    app.add_exception_handler(InsituError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.openapi = lambda: _describe(app)
    return Guard(
        app,
        access=state.access,
        audit=audit,
        origins=origins,
        cookie=state.cookie,
        upload_limits={
            api.UPLOADS: MAX_DATA,
            "/start": MAX_ZIP + _FORM_ROOM,
            "/import": MAX_DATA,
            "/login": MAX_BODY // 64,
        },
    )


def _describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description, with how to prove who asks."""
    if app.openapi_schema is None:
        described = FastAPI.openapi(app)
        schemes = described.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes["bearer"] = {"type": "http", "scheme": "bearer"}
        described["security"] = [{"bearer": []}]
        app.openapi_schema = described
    return app.openapi_schema


def find_status(error: InsituError) -> int:
    """Return the status of HTTP that an error is answered with."""
    return next(status for kind, status in _STATUSES if isinstance(error, kind))


def _answer(
    request: Request,
    status: int,
    kind: str,
    message: str,
    logs: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    if not request.url.path.startswith("/api/"):
        return pages.render_error(request, status, message)
    error = {"error": {"kind": kind, "message": message, "logs": logs}}
    return JSONResponse(error, status, headers=dict(headers or {}))


def _answer_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, InsituError):
        raise error
    return _answer(request, find_status(error), type(error).__name__, error.message, error.logs)


def _answer_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    # Such as the allowed methods, if another one was tried.
    return _answer(request, error.status_code, "HTTPException", str(error.detail), headers=error.headers)


def _answer_invalid(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    return _answer(request, 422, "Invalid", pages.format_problems(error.errors()))
