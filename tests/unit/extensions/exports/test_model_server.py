"""The server answers by the model that it was given, and by newer ones."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from asgi_client import ORIGIN, Client

pytest.importorskip("fastapi")

from insitu.base.errors import InputError
from insitu.extensions.exports.model_server import BATCH_ROWS, ModelHolder, Served, make_model_application

TOKEN = "t" * 32


@dataclass
class Value:
    name: str
    dtype: str
    shape: tuple[int | None, ...] | None


class Twice:
    """Returns numbers twice as large, times a factor."""

    inputs = (Value("x", "float64", (None,)),)
    outputs = (Value("y", "float64", (None,)),)

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.sizes: list[int] = []

    def predict(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        self.sizes.append(len(inputs["x"]))
        if (inputs["x"] < 0).any():
            raise RuntimeError("no such number")
        return {"y": 2 * self.factor * inputs["x"]}


def client_of(holder: ModelHolder, token: str | None = None, bearer: str | None = None) -> Client:
    app = make_model_application("m", holder, origins=frozenset({ORIGIN}), token=token, max_bytes=1 << 16)
    return Client(app, bearer=bearer)


def test_predictions_state_and_metadata_are_answered_and_errors_say_why() -> None:
    model = Twice()
    client = client_of(ModelHolder(Served(3, model), None, 1.0))
    for path in ("/v1/models/m:predict", "/v1/models/m/versions/3:predict"):
        answer = client.post(path, {"instances": [1, 2]})
        assert (answer.status, answer.json()) == (200, {"predictions": [2, 4]})
    assert client.get("/v1/models/m").json()["model_version_status"][0]["state"] == "AVAILABLE"
    assert client.get("/v1/models/m/metadata").json()["model_spec"]["version"] == "3"
    for path, status in (("/v1/models/n", 404), ("/v1/models/m/versions/4", 404), ("/other", 404)):
        assert client.get(path).status == status and "error" in client.get(path).json()
    answer = client.post("/v1/models/m:predict", {"instances": ["a"]})
    assert answer.status == 400 and "takes float64" in answer.json()["error"]
    assert client.post("/v1/models/m:predict", b" " * 70_000).status == 413
    failed = client.post("/v1/models/m:predict", {"instances": [1e308]})
    assert failed.status == 500 and "error" in failed.json()
    model.sizes.clear()
    many = list(range(2 * BATCH_ROWS + 1))
    assert client.post("/v1/models/m:predict", {"inputs": many}).json()["outputs"] == [2 * n for n in many]
    assert model.sizes == [BATCH_ROWS, BATCH_ROWS, 1]


def test_callers_without_the_token_and_other_sites_are_refused() -> None:
    holder = ModelHolder(Served(1, Twice()), None, 1.0)
    assert client_of(holder, TOKEN, TOKEN).get("/v1/models/m").status == 200
    for bearer in (None, "x" * 32, TOKEN[1:]):
        answer = client_of(holder, TOKEN, bearer).get("/v1/models/m")
        assert answer.status == 401 and "--token" in answer.json()["error"]
    assert client_of(holder).get("/v1/models/m", host="evil.example").status == 421
    sent = {"instances": [1]}
    assert client_of(holder).post("/v1/models/m:predict", sent, origin="http://evil.example").status == 403


def test_a_newer_version_answers_and_one_that_cannot_be_loaded_does_not() -> None:
    found: list[Any] = [None, InputError("damaged"), Served(2, Twice(10))]
    seen = threading.Event()

    def find(version: int) -> Served | None:
        each = found.pop(0) if found else None
        if not found:
            seen.set()
        if isinstance(each, Exception):
            raise each
        return each

    holder = ModelHolder(Served(1, Twice()), find, 0.001)
    client = client_of(holder)
    assert client.post("/v1/models/m:predict", {"inputs": [1]}).json() == {"outputs": [2]}
    for version in (1, 1, 2):
        holder.look()
        assert holder.served.version == version
    thread = threading.Thread(target=holder.watch)
    thread.start()
    assert seen.wait(30)
    holder.close()
    thread.join(30)
    assert not thread.is_alive()
    assert client.post("/v1/models/m:predict", {"inputs": [1]}).json() == {"outputs": [20]}
