"""Columns of text as ids in `fit`, on each backend: numbers of the layers of Keras on TensorFlow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backend_checks import result_of, start

RUNS = Path(__file__).parents[3] / "support" / "text_runs.py"


def run(backend: str, folder: Path) -> Any:
    folder.mkdir()
    rng = np.random.default_rng(0)
    city = np.array(["Rome", "Oslo", "Bonn", "", "Ål"], object)[rng.integers(0, 5, 200)]
    label = (city == "Oslo").astype("f4")
    columns = {"city": city, "age": rng.normal(size=200).astype("f4"), "label": label}
    pq.write_table(pa.table(columns), folder / "people.parquet")
    return result_of(start(backend, folder, str(folder), script=RUNS))


def check_refusals(found: Any) -> None:
    assert len(found["refused"]) == 2  # with a strategy, and without
    for message in found["refused"]:
        assert "with text in 'city'" in message
        assert "dataset.lookup('city') or dataset.hash('city', bins=100)" in message


@pytest.mark.long
def test_ids_train_as_the_layers_of_keras_do(tmp_path: Path) -> None:
    of_tensorflow, of_jax = run("tensorflow", tmp_path / "tf"), run("jax", tmp_path / "jax")
    for name in ("lookup", "hash"):
        assert of_tensorflow[name] == of_tensorflow[f"{name} of Keras"]
        assert of_jax[name][-1] < of_jax[name][0]
    assert of_jax["vocabulary"] == of_tensorflow["vocabulary"]
    check_refusals(of_jax)


@pytest.mark.torch
def test_ids_train_on_pytorch(tmp_path: Path) -> None:
    found = run("torch", tmp_path / "torch")
    for name in ("lookup", "hash"):
        assert found[name][-1] < found[name][0]
    check_refusals(found)
