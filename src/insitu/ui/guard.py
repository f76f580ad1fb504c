"""Stands before the application: every request passes here, whatever route it is for."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from insitu.base.disk.access import PRIVATE_FILE
from insitu.ui.access import Access, Session
from insitu.ui.rules import (
    CHANGING,
    READING,
    Facts,
    Refusal,
    check_origin,
    check_role,
    counts_as_own,
    is_open,
)

MAX_BODY = 1 << 20
"""Limit of a request's body in bytes, without an upload."""
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
"""Sent with each answer. No script and no style comes from anywhere but the files of the page, none stands in
a document, and none is made of text."""


class AuditLog:
    """A line of JSON for each request that changes something, and for each that isn't let in to do so."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def write(self, **entry: Any) -> None:
        """Append an entry. Raises OSError."""
        line = json.dumps({"at": round(time.time(), 3), **entry}).encode() + b"\n"
        with self._lock:
            descriptor = os.open(
                self._path,
                os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW,
                PRIVATE_FILE,
            )
            with open(descriptor, "wb", buffering=0) as file:
                file.write(line)


class Guard:
    """Lets a request through to `app`, with its session in the state of the request, or refuses it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        audit: AuditLog,
        origins: frozenset[str],
        cookie: str,
        upload_limits: dict[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._access = access
        self._audit = audit
        self._origins = origins
        self._cookie = cookie
        #: Limits of a body in bytes, by path, if above MAX_BODY.
        self._upload_limits = upload_limits
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # the page uses none
            return
        facts = read_facts(scope)
        session = None
        refusal = check_origin(facts, self._origins)
        if refusal is None:
            session = self._find_session(facts)
            refusal = check_role(facts, session)
        limit = self._upload_limits.get(facts.path, MAX_BODY)
        if refusal is None:
            refusal = _check_length(facts, limit)
        scope.setdefault("state", {})["session"] = session
        answer = _Answer(send, static=is_open(facts.path) and facts.path != "/login")
        try:
            if refusal is not None:
                await _refuse(facts, refusal)(scope, receive, answer.send)
            else:
                await self._app(scope, _bounded(receive, limit), answer.send)
        finally:
            if facts.method in CHANGING:
                self._write_audit(scope, facts, session, answer.status)

    def _find_session(self, facts: Facts) -> Session | None:
        token = facts.bearer()
        if token is not None:
            return self._access.find_bearer(token)
        cookie = facts.cookie(self._cookie)
        if cookie is None or not counts_as_own(facts):
            return None
        # Pushed updates of the page don't prolong a session: nobody may be there.
        return self._access.find_session(cookie, self._clock(), use=not facts.path.startswith("/live/"))

    def _write_audit(self, scope: Scope, facts: Facts, session: Session | None, status: int) -> None:
        client = scope.get("client")
        self._audit.write(
            client=client[0] if client else None,
            session=session.name if session else None,
            role=session.role if session else None,
            method=facts.method,
            path=facts.path[:500],
            status=status,
            **scope["state"].get("audit", {}),
        )


class _Answer:
    """Adds the headers to an answer, and notes its status; 500 if none began."""

    def __init__(self, send: Send, *, static: bool) -> None:
        self._send = send
        self._static = static
        self.status = 500

    async def send(self, message: Message) -> None:
        """Send a message of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [(k, v) for k, v in message.get("headers", []) if k.lower().decode() not in _HEADERS]
            headers += [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
            if not any(k.lower() == b"cache-control" for k, _ in headers):
                headers.append((b"cache-control", b"max-age=300" if self._static else b"no-store"))
            message = {**message, "headers": headers}
        await self._send(message)


def read_facts(scope: Scope) -> Facts:
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return Facts(scope["method"].upper(), scope["path"], headers)


def _check_length(facts: Facts, limit: int) -> Refusal | None:
    for value in facts.headers.get("content-length", []):
        if not value.isdecimal() or len(value) > 20 or int(value) > limit:
            return Refusal(
                413, f"A request to {facts.path} has {limit} bytes at most. Received: {value[:30]}"
            )
    return None


def _bounded(receive: Receive, limit: int) -> Receive:
    """Return `receive` for a body of `limit` bytes at most, whatever length it announces."""
    received = 0

    async def bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise HTTPException(413, f"The body has {limit} bytes at most")
        return message

    return bounded


def _refuse(facts: Facts, refusal: Refusal) -> Response:
    wants_page = "text/html" in ",".join(facts.headers.get("accept", []))
    if refusal.status == 401 and wants_page and not facts.path.startswith("/api/"):
        return RedirectResponse("/login", 303)
    error = {"kind": "Refused", "message": refusal.text, "logs": None}
    more = {401: {"www-authenticate": "Bearer"}, 405: {"allow": ", ".join(sorted(READING | CHANGING))}}
    headers = more.get(refusal.status, {})
    return JSONResponse({"error": error}, refusal.status, headers=headers)
