"""Calls an ASGI application in this process, as a browser or a program would over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlencode

HOST = "127.0.0.1:8780"
ORIGIN = f"http://{HOST}"


@dataclass
class Answer:
    """What the application has answered."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


class Client:
    """A caller with headers of its own. `cookie` is what it would send."""

    def __init__(self, app: Any, *, bearer: str | None = None, cookie: str | None = None) -> None:
        self.app = app
        self.bearer = bearer
        self.cookie = cookie

    def get(self, path: str, **headers: str) -> Answer:
        return self.call("GET", path, headers=headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        """Send `body` as JSON; bytes as they are."""
        return self.call("POST", path, body, headers={"content-type": "application/json", **headers})

    def delete(self, path: str) -> Answer:
        return self.call("DELETE", path, headers={})

    def submit(self, path: str, fields: dict[str, str], **headers: str) -> Answer:
        """Send a form, as the page does."""
        given = {"content-type": "application/x-www-form-urlencoded", "origin": ORIGIN, **headers}
        return self.call("POST", path, urlencode(fields).encode(), headers=given)

    def call(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str], chunks: int = 1
    ) -> Answer:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {"host": HOST} | {name.replace("_", "-"): value for name, value in headers.items()}
        if self.bearer:
            given.setdefault("authorization", f"Bearer {self.bearer}")
        if self.cookie:
            given.setdefault("cookie", self.cookie)
        return asyncio.run(call(self.app, method, path, list(given.items()), data, chunks))


async def call(
    app: Any, method: str, target: str, headers: Iterable[tuple[str, str]], body: bytes, chunks: int
) -> Answer:
    """One request, whose body comes in `chunks` messages."""
    path, _, query = target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers],
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8780),
        "state": {},
    }
    size = -(-len(body) // chunks) or 1
    parts = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
    sent = 0
    done = asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent < len(parts):
            sent += 1
            return {"type": "http.request", "body": parts[sent - 1], "more_body": sent < len(parts)}
        await done.wait()
        return {"type": "http.disconnect"}

    answer = Answer(0, [], b"")

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = [(k.decode().lower(), v.decode("latin-1")) for k, v in message["headers"]]
        elif message["type"] == "http.response.body":
            answer.body += message.get("body", b"")
            if not message.get("more_body"):
                done.set()

    await app(scope, receive, send)
    return answer
