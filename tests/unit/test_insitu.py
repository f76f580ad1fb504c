"""What `import insitu` gives, and when it is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

import insitu

EAGER = {"Context", "__version__", "config", "context"}


def test_modules_are_given_whole_and_names_from_their_rooms():
    assert insitu.errors is sys.modules["insitu.base.errors"]
    assert insitu.parameters is sys.modules["insitu.parameters"]
    assert insitu.ParameterServer is sys.modules["insitu.parameters.server"].ParameterServer
    assert insitu.Dataset is sys.modules["insitu.grid.reading.datasets"].Dataset


def test_any_other_name_is_no_attribute():
    with pytest.raises(AttributeError, match="module 'insitu' has no attribute 'datasets'"):
        insitu.datasets  # noqa: B018


def test_an_import_loads_no_room_until_a_name_of_it_is_asked_for():
    program = (
        "import json, sys, insitu\n"
        "print(json.dumps([n for n in dir(insitu) if n in vars(insitu)]))\n"
        "insitu.base.errors\n"
        "print(json.dumps(list(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    names, modules = (set(json.loads(line)) for line in done.stdout.splitlines())
    assert names >= EAGER and not names & {"Dataset", "layers", "MirroredStrategy"}
    rooms = {"insitu.grid", "insitu.train", "insitu.exchange", "insitu.parameters"}
    assert "insitu.base.errors" in modules and not modules & {*rooms, "numpy", "keras"}


def test_whoever_takes_the_dataset_may_pass_it_to_plain_keras(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str, Callable[[], None]]] = []
    monkeypatch.setattr(insitu, "call_after_import", lambda name, call: asked.append((name, call)))
    assert insitu.dataset is sys.modules["insitu.grid.caches.dataset_opening"].dataset
    assert asked == [("keras", insitu._register_dataset_adapter)]
    assert insitu.Dataset.__name__ == "Dataset" and len(asked) == 1
