"""Warming up leaves no trace in what a script builds afterwards."""

from __future__ import annotations

from pathlib import Path

import keras

from insitu.train.replica.building import has_accelerators, warm_up


def names_and_weights() -> tuple[list[str], list[bytes]]:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)])
    model.compile("adam", "mse")
    return [v.path for v in model.variables], [w.tobytes() for w in model.get_weights()]


def test_names_and_random_numbers_are_as_without_it(monkeypatch):
    keras.backend.clear_session()
    before = names_and_weights()
    keras.backend.clear_session()
    monkeypatch.setattr("insitu.train.replica.building.has_accelerators", lambda: False)
    warm_up()
    assert names_and_weights() == before


def test_a_device_whose_memory_others_need_is_left_alone(tmp_path: Path):
    assert not has_accelerators(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_accelerators(tmp_path)
