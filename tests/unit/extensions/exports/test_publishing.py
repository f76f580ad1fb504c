"""A model is published in each format that the backend can write, once it predicts as it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from insitu.base.errors import InputError, TrainingError
from insitu.extensions.exports import convert_export, load_export, publish, publishing
from insitu.extensions.exports import formats as format_rules

# The libraries that write formats warn of each other and of themselves.
pytestmark = pytest.mark.filterwarnings("ignore")
BACKEND = keras.backend.backend()
ROWS = {"a": np.arange(12, dtype="float32").reshape(3, 4), "b": np.array([[1, 2], [3, 0], [2, 2]], "int32")}


def model_of() -> Any:
    """Inputs and outputs by name, of two dtypes, and a state."""
    a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b", dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(5, 2)(b))
    hidden = keras.layers.BatchNormalization()(keras.layers.Concatenate()([a, rows]))
    outputs = {"p": keras.layers.Dense(2, "softmax", name="p")(hidden), "q": keras.layers.Dense(1)(hidden)}
    return keras.Model({"a": a, "b": b}, outputs)


def formats() -> list[str]:
    found = ["keras"]
    for name in ("tf_saved_model", "onnx", "stablehlo"):
        try:
            format_rules.check_format(name)
        except InputError:
            continue
        found.append(name)
    return found


@pytest.mark.parametrize("format", formats())
def test_each_format_predicts_as_the_model_for_any_number_of_rows(tmp_path: Path, format: str) -> None:
    model = model_of()
    path = publish(model, tmp_path, 7, ROWS, format)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    served = load_export(path)
    assert sorted(value.name for value in served.inputs) == ["a", "b"] and len(served.outputs) == 2
    for rows in (1, 3):
        some = {name: values[:rows] for name, values in ROWS.items()}
        expected = model(some, training=False)
        found = served.predict(some)
        # ONNX names outputs by its own operations: they are told by their order.
        for name, array in zip(("p", "q"), found.values(), strict=True):
            want = keras.ops.convert_to_numpy(expected[name])
            np.testing.assert_allclose(found.get(name, array), want, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif("onnx" not in formats(), reason="needs the libraries of ONNX")
def test_a_keras_file_is_converted(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    path = publish(model, tmp_path, 1, ROWS["a"])
    made = convert_export(path, tmp_path / "more", 1, "onnx")
    [found] = load_export(made).call([ROWS["a"]])
    np.testing.assert_allclose(found, keras.ops.convert_to_numpy(model(ROWS["a"])), rtol=1e-5, atol=1e-6)
    path.write_bytes(b"no model")
    with pytest.raises(InputError, match="loaded first"):
        convert_export(path, tmp_path / "more", 2, "onnx")


def test_what_predicts_otherwise_or_leaves_more_files_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = model_of()
    write = publishing.write_model
    monkeypatch.setattr(publishing, "write_model", lambda model, *rest: write(other, *rest))
    for format in formats():
        with pytest.raises(TrainingError, match="was not published"):
            publish(model_of(), tmp_path, 1, ROWS, format)
    assert list(tmp_path.iterdir()) == []


def test_what_a_backend_or_the_libraries_cannot_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="one of keras, tf_saved_model, onnx, stablehlo"):
        format_rules.check_format("h5")
    if BACKEND != "jax":
        with pytest.raises(InputError, match=f"'stablehlo' on {BACKEND}; jax.export writes it"):
            publish(model_of(), tmp_path / "never", 1, ROWS, "stablehlo")
        assert not (tmp_path / "never").exists()
    monkeypatch.setattr(format_rules.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=rf"pip install 'insitu\[onnx-{BACKEND}\]'`. Received: no "):
        format_rules.check_format("onnx")
    with pytest.raises(InputError, match="SavedModel's folder, or a file"):
        load_export(tmp_path / "model.h5")
