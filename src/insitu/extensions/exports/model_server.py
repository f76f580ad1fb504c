"""Answers REST predictions of one model, in the form of TensorFlow Serving: `insitu serve`."""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from insitu.base.errors import InputError
from insitu.base.net.ports import format_address
from insitu.extensions.exports.predictions import (
    Array,
    Value,
    describe_model,
    describe_state,
    make_answer,
    read_question,
)
from insitu.ui import (
    UIOptions,
    check_options,
    check_origin,
    find_origins,
    make_config,
    open_socket,
    read_facts,
)

logger = logging.getLogger("insitu")
DEFAULT_PORT = 8501
"""That of TensorFlow Serving's REST interface."""
MAX_BYTES = 16 << 20
"""Bytes of a request at most, unless the user says otherwise."""
BATCH_ROWS = 1024
"""Rows that the model gets at once, so that a large request needs no more memory than that."""


class Model(Protocol):
    """A model that can predict."""

    @property
    def inputs(self) -> Sequence[Value]:
        """Its inputs."""

    @property
    def outputs(self) -> Sequence[Value]:
        """Its outputs."""

    def predict(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name."""


@dataclass(frozen=True, slots=True)
class Served:
    """A version of a model."""

    #: Its number: the updates that the model has had.
    version: int
    #: The model itself.
    model: Model


class ModelHolder:
    """The version that answers now. `find_newer` returns a newer one than the version given, or None."""

    def __init__(
        self, first: Served, find_newer: Callable[[int], Served | None] | None, seconds: float
    ) -> None:
        #: Replaced as a whole, by the thread of `watch`.
        self.served = first
        self._find_newer = find_newer
        self._seconds = seconds
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Take in newer versions until `close`."""
        while self._find_newer is not None and not self._ended.wait(self._seconds):
            self.look()

    def look(self) -> None:
        """Take in a newer version, if there is one. One that can't be loaded is named; the other stays."""
        try:
            newer = self._find_newer(self.served.version) if self._find_newer is not None else None
        except (InputError, OSError) as error:
            logger.warning("The model that is served stays: %s", error)
            return
        if newer is not None:
            self.served = newer
            logger.warning("Version %d of the model answers now", newer.version)

    def predict(self, body: bytes) -> bytes:
        """Return the answer to a request. Raises InputError for what the model doesn't take."""
        served = self.served
        question = read_question(body, served.model.inputs)
        parts = []
        with self._lock:  # not every backend's models may be called by several threads
            for start in range(0, question.rows, BATCH_ROWS):
                rows = {n: array[start : start + BATCH_ROWS] for n, array in question.inputs.items()}
                parts.append(served.model.predict(rows))
        joined = {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}
        return make_answer(joined, question)

    def close(self) -> None:
        self._ended.set()


def make_model_application(
    name: str, holder: ModelHolder, *, origins: frozenset[str], token: str | None, max_bytes: int
) -> Any:
    """Return the application. With a token, each request must bring it."""
    app = FastAPI(title="insitu serve", openapi_url=None, docs_url=None, redoc_url=None)
    model_path = "/v1/models/{model}"

    def check(model: str, version: int | None = None) -> Served:
        served = holder.served
        if model != name or version not in (None, served.version):
            wanted = model if version is None else f"{model} version {version}"
            raise HTTPException(
                404, f"The model is {name}, version {served.version}. Received: {wanted[:200]}"
            )
        return served

    async def predict(model: str, request: Request, version: int | None = None) -> Response:
        check(model, version)
        body = await _read_body(request, max_bytes)
        try:
            answer = await to_thread.run_sync(holder.predict, body)
        except InputError:
            raise
        except Exception as error:  # of the model, or predictions that JSON has no numbers for
            text = f"The model gave no predictions: {type(error).__name__}: {error}"
            return JSONResponse({"error": text[:1000]}, 500)
        return Response(answer, media_type="application/json")

    async def show_state(model: str, version: int | None = None) -> Any:
        return describe_state(check(model, version).version)

    async def show_metadata(model: str, version: int | None = None) -> Any:
        served = check(model, version)
        return describe_model(name, served.version, served.model.inputs, served.model.outputs)

    for path in (model_path, model_path + "/versions/{version}"):
        app.post(path + ":predict")(predict)
        app.get(path + "/metadata")(show_metadata)
        app.get(path)(show_state)

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Any:
        refusal = _check_caller(request, origins, token)
        return refusal if refusal is not None else await call_next(request)

    app.add_exception_handler(HTTPException, _answer_error)
    app.add_exception_handler(InputError, _answer_error)
    return app


def _check_caller(request: Request, origins: frozenset[str], token: str | None) -> Response | None:
    """Refuse another name than this server's, what another site had a browser send, and a wrong token."""
    facts = read_facts(request.scope)
    refusal = check_origin(facts, origins)
    if refusal is not None:
        return JSONResponse({"error": refusal.text}, refusal.status)
    if token is not None and not secrets.compare_digest((facts.bearer() or "").encode(), token.encode()):
        text = "Send the header `Authorization: Bearer TOKEN`, with the token of --token"
        return JSONResponse({"error": text}, 401, headers={"www-authenticate": "Bearer"})
    return None


async def _read_body(request: Request, limit: int) -> bytes:
    """Return the body of a request, which is refused from the byte on that is too many."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise HTTPException(413, f"A request has {limit:,} bytes at most. Send fewer rows at a time")
    return bytes(body)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": str(error.detail)}, error.status_code)
    if not isinstance(error, InputError):
        raise error
    return JSONResponse({"error": error.message}, 400)


def serve_model(
    name: str,
    holder: ModelHolder,
    options: UIOptions,
    notify: Callable[[str], None],
    *,
    token: str | None = None,
    max_bytes: int = MAX_BYTES,
) -> None:
    """Answer predictions until SIGINT or SIGTERM. Raises InputError for options that can't be used."""
    import uvicorn

    check_options(options)
    listening = open_socket(options, DEFAULT_PORT, "The server")
    port = int(listening.getsockname()[1])
    with contextlib.ExitStack() as stack:
        stack.callback(listening.close)
        stack.callback(holder.close)
        # uvicorn raises the signal again at its end.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _interrupt))
        app = make_model_application(
            name, holder, origins=find_origins(options, port), token=token, max_bytes=max_bytes
        )
        server = uvicorn.Server(make_config(app, options, notify))
        threading.Thread(target=holder.watch, daemon=True).start()
        scheme = "https" if options.encrypted else "http"
        address = format_address(options.host, port)
        notify(f"Version {holder.served.version} of {name}: {scheme}://{address}/v1/models/{name}:predict")
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
