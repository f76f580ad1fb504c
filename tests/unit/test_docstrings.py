"""Examples in the docstrings of public names run, and `help(insitu)` shows the way to each of them."""

from __future__ import annotations

import doctest
import inspect
import os
import re
from pathlib import Path

import keras
import numpy as np
import pytest

import insitu

NAMES = sorted(set(insitu.__all__) - {"__version__"})
WITHOUT = {"exchange", "parameters", "track"}
"""Names whose docstrings show the use by an example that isn't run: it needs several tasks, or a server."""
SKIPPED = {
    *("HybridStrategy", "ParameterServerStrategy", "Server", "TPUStrategy"),
    *("config", "coordinator", "run", "start"),
}
"""Those whose examples are skipped in part: they start processes or servers, or need devices."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for files, and a cache digits/train: 100 rows with an image [64] and a label."""
    monkeypatch.chdir(tmp_path)
    images = np.arange(6400, dtype="float32").reshape(100, 64) % 17
    insitu.import_data("digits/train", {"image": images, "label": np.arange(100) % 10}, partitions=2)
    return tmp_path


def find_examples(name: str) -> doctest.DocTest:
    text = inspect.getdoc(getattr(insitu, name)) or ""
    names = {"insitu": insitu, "keras": keras, "np": np}
    return doctest.DocTestParser().get_doctest(text, names, f"insitu.{name}", None, 0)


@pytest.mark.parametrize("name", sorted(set(NAMES) - WITHOUT))
def test_the_example_of_each_public_name_runs(name: str, folder: Path) -> None:
    test = find_examples(name)
    assert test.examples, f"insitu.{name} has no example"
    said: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not failed, "".join(said)
    assert os.getcwd() == str(folder)


def test_names_without_a_run_example_are_listed() -> None:
    examples = {name: find_examples(name).examples for name in NAMES}
    assert {name for name in NAMES if not examples[name]} == WITHOUT
    skipped = {n for n in NAMES if any(doctest.SKIP in example.options for example in examples[n])}
    assert skipped == SKIPPED


def test_help_lists_each_public_name_once() -> None:
    _, *parts = re.split(r"\n(?=\w[^\n]*\n    \w)", insitu.__doc__ or "")
    lines = [line[4:] for part in parts for line in part.splitlines()[1:] if line[4:5].strip()]
    listed = [name for line in lines for name in re.split(r"\s{2,}", line)[0].split(", ")]
    assert sorted(listed) == NAMES


def test_the_example_of_the_package_runs(folder: Path) -> None:
    def make_model() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    names = {
        "images": np.zeros((96, 4), "float32"),
        "labels": np.arange(96) % 3,
        "make_model": make_model,
    }
    test = doctest.DocTestParser().get_doctest(insitu.__doc__ or "", names, "insitu", None, 0)
    said: list[str] = []
    failed, tried = doctest.DocTestRunner().run(test, out=said.append)
    assert tried and not failed, "".join(said)
