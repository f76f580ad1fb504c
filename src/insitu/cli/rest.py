"""Asks the REST interface of a page, over HTTP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode, urlsplit

from insitu.base import errors
from insitu.base.errors import ClusterError, InputError, InsituError
from insitu.base.net.unauthenticated import is_loopback

URL_ENV = "INSITU_URL"
TOKEN_FILE_ENV = "INSITU_UI_TOKEN_FILE"
_PREFIX = "/api/v1"
_SECONDS = 60.0
_MOST_TOKEN = 4096
_BLOCK = 1 << 18
"""Bytes that are sent at a time."""
_MOST = 256 << 20
"""Bytes of an answer."""


class RestClient:
    """One page."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self._token = token

    def get(self, *path: str, **query: Any) -> Any:
        """Return the answer to a GET. Raises InsituError."""
        given = {name: value for name, value in query.items() if value not in (None, "", False)}
        return self._ask(
            "GET", path, urlencode({n: str(v).lower() if v is True else v for n, v in given.items()})
        )

    def post(self, *path: str, **fields: Any) -> Any:
        """Return the answer to a POST. Raises InsituError."""
        return self._ask("POST", path, "", fields)

    def delete(self, *path: str) -> Any:
        """Return the answer to a DELETE. Raises InsituError."""
        return self._ask("DELETE", path, "")

    def send(self, *path: str, file: Path, **query: str) -> Any:
        """Return the answer to a POST of a file. Raises InsituError."""
        try:
            with file.open("rb") as body:
                return self._ask("POST", path, urlencode(query), body=body)
        except OSError as error:
            raise InputError(
                f"A file that is sent must be readable. Received: {file} ({error.strerror})"
            ) from error

    def _ask(
        self,
        method: str,
        path: tuple[str, ...],
        query: str,
        fields: dict[str, Any] | None = None,
        body: BinaryIO | None = None,
    ) -> Any:
        import http.client

        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=_SECONDS, blocksize=_BLOCK)
        target = "/".join((_PREFIX, *(quote(part) for part in path))) + (f"?{query}" if query else "")
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        sent: str | BinaryIO | None = None if fields is None else json.dumps(fields)
        if body is not None:
            size = os.fstat(body.fileno()).st_size
            headers |= {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
            sent = body
        try:
            connection.request(method, target, sent, headers)
            answer = connection.getresponse()
            received = answer.read(_MOST)
        except (OSError, http.client.HTTPException) as error:
            raise ClusterError(
                f"The page at {self.url} doesn't answer: {error or type(error).__name__}"
            ) from error
        finally:
            connection.close()
        return _read_answer(self.url, answer.status, received)


def _read_answer(url: str, status: int, body: bytes) -> Any:
    """Return what an answer holds. Raises the error that it reports."""
    try:
        value = json.loads(body)
    except ValueError:
        raise ClusterError(f"{url} isn't the address of a page of insitu: it answered {status}") from None
    if status < 400:
        return value
    error = value.get("error") if isinstance(value, dict) else None
    given = error if isinstance(error, dict) else {}
    message = str(given.get("message", f"{url} answered {status}"))
    if status == 401:
        raise InputError(
            f"The page needs one of its tokens, which end with it. Received: one that {url} doesn't know. "
            f"Copy ui-USER.json from $INSITU_HOME there, and name it in ${TOKEN_FILE_ENV}"
        )
    kind = getattr(errors, str(given.get("kind")), None)
    if not (isinstance(kind, type) and issubclass(kind, InsituError)):
        kind = InputError if status < 500 else ClusterError
    raise kind(message)


def open_client(url: str) -> RestClient:
    """Return the client for a page. Its token is in the file that $INSITU_UI_TOKEN_FILE names.

    Raises InputError for an address over which others could read the token, and without a token.
    """
    parts = urlsplit(url)
    try:
        sound = (
            parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) and not parts.username
        )
    except ValueError:
        sound = False
    if not sound or parts.path.strip("/") or parts.query or parts.fragment:
        raise InputError(f"--url is the address of a page, such as https://grid-1:8780. Received: {url}")
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise InputError(
            f"A token goes over TLS, or stays on this machine. Received: --url {url}. Give an address with "
            f"https://, or reach the page through SSH: ssh -L 8780:127.0.0.1:8780 {parts.hostname}"
        )
    path = os.environ.get(TOKEN_FILE_ENV, "")
    if not path:
        raise InputError(
            f"--url needs a token of that page. Received: no ${TOKEN_FILE_ENV}. Set it to a copy of the file "
            f"ui-USER.json, which lies in $INSITU_HOME on the machine of the page, or to a file with one "
            f"token"
        )
    return RestClient(url, read_ui_token(Path(path)))


def read_ui_token(path: Path) -> str:
    """Return the token in a file: the token alone, or the record of a page, of which the stronger one."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_TOKEN).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"${TOKEN_FILE_ENV} names a file with a token. Received: {path} ({error})"
        ) from error
    if text.startswith("{"):
        try:
            record = json.loads(text)
            text = str(record.get("operate") or record.get("view") or "")
        except ValueError:
            text = ""
    if not text or len(text.split()) != 1 or not text.isascii() or not text.isprintable():
        raise InputError(f"${TOKEN_FILE_ENV} names a file with a token. Received: {path}, which has none")
    return text
