"""Server-sent events: what changes is pushed, as long as the session of the viewer lasts."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from fastapi import HTTPException, Request

from insitu.base.errors import InsituError
from insitu.ui.rules import Facts
from insitu.ui.state import MAX_STREAMS, UIState

T = TypeVar("T")
INTERVAL = 0.5
"""Seconds between two looks of a viewer, while few look."""
_LOOKS = 40
"""Looks a second of all viewers together. With more viewers, each looks less often."""
HEARTBEAT = 15.0
"""Seconds after which an event that says nothing shows whether the viewer is still there."""


@functools.lru_cache(maxsize=32)
def encode_event(name: str, data: str) -> bytes:
    """Return one event. Each line of `data` is a field of its own, so that none can begin another event.
    An event for many viewers is encoded once."""
    lines = data.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "".join([f"event: {name}\n", *(f"data: {line}\n" for line in lines), "\n"]).encode()


def refuse_too_many(state: UIState) -> None:
    """Raise HTTPException if the limit of viewers is reached."""
    if state.streams >= MAX_STREAMS:
        raise HTTPException(503, f"{MAX_STREAMS} viewers follow at a time. Close another page")


async def follow_changes(
    state: UIState, request: Request, read: Callable[[], Awaitable[T]]
) -> AsyncIterator[T | None]:
    """Yield what `read` returns, and again whenever that has changed; None now and then if it hasn't.

    Ends with the viewer, with the viewer's session, and with the server.
    """
    if state.streams >= MAX_STREAMS:
        raise HTTPException(503, f"{MAX_STREAMS} viewers follow at a time. Close another page")
    state.streams += 1
    try:
        last: T | None = None
        spoke = time.monotonic()
        while not state.ends() and _lasts(state, request) and not await request.is_disconnected():
            try:
                value = await read()
            except InsituError:  # a job that was deleted while somebody looked at it
                return
            now = time.monotonic()
            if value != last:
                last, spoke = value, now
                yield value
            elif now - spoke >= HEARTBEAT:
                spoke = now
                yield None
            await asyncio.sleep(max(INTERVAL, state.streams / _LOOKS))
    finally:
        state.streams -= 1


def _lasts(state: UIState, request: Request) -> bool:
    """Return whether the session of a viewer lasts still."""
    headers = {name: request.headers.getlist(name) for name in ("cookie", "authorization")}
    facts = Facts("GET", request.url.path, headers)
    token = facts.bearer()
    if token is not None:
        return state.access.find_bearer(token) is not None
    cookie = facts.cookie(state.cookie)
    return cookie is not None and state.access.find_session(cookie, time.monotonic(), use=False) is not None
