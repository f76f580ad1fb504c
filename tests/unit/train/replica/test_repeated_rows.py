"""A line says where the rows of an Embedding train otherwise than in plain Keras on TensorFlow."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
from models import in_shards

from insitu.train import MultiWorkerMirroredStrategy, OneDeviceStrategy
from insitu.train.replica import repeated_rows

X, Y = np.zeros((16, 3), "int32"), np.zeros((16, 1), "float32")


def train(scope: Any, optimizer: str = "adam", *, embeds: bool = True, **options: Any) -> None:
    layers = keras.layers
    first = [layers.Embedding(9, 4), layers.Flatten()] if embeds else []
    with scope:
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *first, layers.Dense(1)])
        model.compile(keras.optimizers.get({"class_name": optimizer, "config": options}), "mse")
    model.fit(X, Y, batch_size=8, verbose=0)


def over(shards: int) -> Any:
    context = in_shards(tuple(range(shards)), shards)
    return MultiWorkerMirroredStrategy(context=context).scope()


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_rows, "_named", [])


@pytest.mark.parametrize(
    "make", [lambda: over(1), lambda: over(2), lambda: OneDeviceStrategy("cpu:0").scope()]
)
def test_an_embedding_with_adam_is_named_once(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    train(make())
    train(contextlib.nullcontext())
    said = capsys.readouterr().err
    assert said.count("embedding") == said.count("Adam gets the sum of the gradients") == 1
    assert "Compare with plain Keras on another backend" in said


def test_clipping_makes_sgd_differ_too(capsys: pytest.CaptureFixture[str]) -> None:
    train(over(2), "sgd", learning_rate=0.1, clipnorm=0.01)
    assert "SGD gets the sum" in capsys.readouterr().err


def test_nothing_is_said_where_nothing_differs(capsys: pytest.CaptureFixture[str]) -> None:
    train(over(2), "sgd")
    train(contextlib.nullcontext())
    train(over(2), embeds=False)
    assert "gets the sum" not in capsys.readouterr().err


def test_the_chief_alone_says_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    context = in_shards((0, 1), 2)
    monkeypatch.setattr(repeated_rows, "context", lambda: type("Worker", (), {"is_chief": False}))
    train(MultiWorkerMirroredStrategy(context=context).scope())
    assert "gets the sum" not in capsys.readouterr().err
