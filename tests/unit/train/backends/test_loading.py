"""The folder of the active backend is loaded, and of no other."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import keras
import pytest

from insitu.base.config import BACKENDS
from insitu.base.errors import TrainingError
from insitu.train.backends import Backend, active_backend, load_backend

NAMES = [name for name in vars(Backend) if not name.startswith("_")]
METHODS = [name for name in NAMES if inspect.isfunction(vars(Backend)[name])]
REQUIRED = [name for name in METHODS if "NotImplementedError" in inspect.getsource(vars(Backend)[name])]
PROGRAM = """
import sys
from insitu.train.backends import load_backend
load_backend({!r})
print(sorted(name for name in sys.modules if name in ("keras", "tensorflow", "jax", "torch")))
print(sorted(name for name in sys.modules if name.startswith("insitu.train.")))
"""

SIGNATURES = """
import inspect
from insitu.train.backends import Backend, load_backend
for method in {1!r}:
    expected = inspect.signature(getattr(Backend(), method)).parameters.values()
    # What a constructor or function takes beyond these has a default.
    given = [each.name for each in expected if each.kind is not each.KEYWORD_ONLY]
    named = {{each.name: None for each in expected if each.kind is each.KEYWORD_ONLY}}
    inspect.signature(getattr(load_backend({0!r}), method)).bind(*given, **named)
"""


def test_a_backend_without_a_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    with pytest.raises(TrainingError, match=r"Received: the 'numpy' backend.*Set KERAS_BACKEND"):
        active_backend()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_folder_does_all_that_any_backend_must(name: str) -> None:
    backend = type(load_backend(name))
    assert set(REQUIRED) <= set(vars(backend))
    assert {each for each in vars(backend) if not each.startswith("_")} <= set(NAMES)


@pytest.mark.parametrize("name", ["tensorflow", "jax", pytest.param("torch", marks=pytest.mark.torch)])
def test_its_methods_take_what_the_interface_says(name: str) -> None:
    # In a process of its own: PyTorch can't be imported beside TensorFlow everywhere.
    run = [sys.executable, "-c", SIGNATURES.format(name, METHODS)]
    subprocess.run(run, env={**os.environ, "KERAS_BACKEND": name}, timeout=200, check=True)


@pytest.mark.parametrize("name", BACKENDS)
def test_loading_a_folder_imports_no_library_and_no_other_folder(name: str) -> None:
    run = [sys.executable, "-c", PROGRAM.format(name)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=100, check=True)
    room = "insitu.train.backends"
    expected = sorted([room, f"{room}.{name}", f"{room}.loading", f"{room}.protocol"])
    assert done.stdout.splitlines()[-2:] == ["[]", str(expected)]
