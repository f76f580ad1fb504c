"""A model that was loaded takes features as they come, and predicts as the one that was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from insitu import feature_column as fc
from insitu.base.errors import InputError
from insitu.extensions.exports import load_export
from insitu.extensions.exports.predictions import make_answer, read_question
from insitu.extensions.features.dense_features import make_inputs

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def test_features_of_text_are_looked_up_and_answers_are_those_of_predict(tmp_path: Path) -> None:
    word = fc.categorical_column_with_vocabulary_list("word", ["yes", "no"])
    columns = [fc.numeric_column("age"), fc.embedding_column(word, 3)]
    layer, more = fc.DenseFeatures(columns), keras.Input((2,), name="more")
    inputs = {**make_inputs(columns), "more": more}
    hidden = keras.layers.Concatenate()([layer({k: v for k, v in inputs.items() if k != "more"}), more])
    model = keras.Model(inputs, keras.layers.Dense(1, name="score")(hidden))
    model.save(tmp_path / "m.keras")
    served = load_export(tmp_path / "m.keras")
    assert [(v.name, v.dtype) for v in served.inputs] == [
        ("age", "float32"),
        ("word", "any"),
        ("more", "float32"),
    ]
    raw = {"age": [3.0, 4.5, 1.0], "word": ["yes", "maybe", "no"], "more": [[1, 2], [3, 4], [5, 6]]}
    question = read_question(json.dumps({"inputs": raw}).encode(), served.inputs)
    found = json.loads(make_answer(served.predict(question.inputs), question))["outputs"]
    looked_up = layer.transform({"age": np.array(raw["age"]), "word": np.array(raw["word"], object)})
    expected = model.predict({**looked_up, "more": np.array(raw["more"], "float32")}, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="texts are an input on TensorFlow alone")
def test_a_model_of_plain_keras_takes_texts(tmp_path: Path) -> None:
    given = keras.Input((1,), dtype="string", name="word")
    looked_up = keras.layers.StringLookup(vocabulary=["yes", "no"], output_mode="one_hot")(given)
    model = keras.Model(given, keras.layers.Dense(1)(looked_up))
    model.save(tmp_path / "m.keras")
    served = load_export(tmp_path / "m.keras")
    assert [(v.name, v.dtype) for v in served.inputs] == [("word", "string")]
    question = read_question(b'{"instances": [["yes"], ["maybe"], ["no"]]}', served.inputs)
    found = json.loads(make_answer(served.predict(question.inputs), question))["predictions"]
    import tensorflow as tf

    expected = model.predict(tf.constant([["yes"], ["maybe"], ["no"]]), verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="which takes texts")
def test_a_model_of_texts_is_refused_where_the_backend_has_none(tmp_path: Path) -> None:
    given = keras.Input((1,), dtype="string", name="word")
    keras.Model(given, keras.layers.Identity()(given)).save(tmp_path / "m.keras")
    with pytest.raises(InputError, match="KERAS_BACKEND=tensorflow"):
        load_export(tmp_path / "m.keras")


def serve(columns: list[Any], path: Path) -> tuple[Any, Any]:
    """(a saved model of the columns as it is served, a function that answers a request)."""
    layer = fc.DenseFeatures(columns)
    inputs = make_inputs(columns)
    keras.Model(inputs, keras.layers.Dense(1)(layer(inputs))).save(path)
    served = load_export(path)

    def ask(rows: list[Any]) -> Any:
        question = read_question(json.dumps({"instances": rows}).encode(), served.inputs)
        return json.loads(make_answer(served.predict(question.inputs), question))["predictions"]

    return keras.models.load_model(path), ask


def test_rows_of_different_lengths_are_answered_as_in_training(tmp_path: Path) -> None:
    words = fc.categorical_column_with_hash_bucket("words", 50)
    age = fc.bucketized_column(fc.numeric_column("age"), [0.5])
    columns = [
        age,
        fc.embedding_column(fc.weighted_categorical_column(words, "weights"), 3, "mean"),
        fc.indicator_column(fc.crossed_column([age, "words"], 20)),
    ]
    model, ask = serve(columns, tmp_path / "m.keras")
    rows = [
        {"age": 0.25, "words": ["a", "b"], "weights": [0.5, 2.5]},
        {"age": 1.75, "words": ["c"], "weights": [1.0]},
        {"age": 3.5, "words": [], "weights": []},
    ]
    layer = next(layer for layer in model.layers if isinstance(layer, fc.DenseFeatures))
    raw = {key: [row[key] for row in rows] for key in rows[0]}
    expected = model.predict(layer.transform({**raw, "age": np.array(raw["age"])}), verbose=0)
    np.testing.assert_allclose(ask(rows), expected, rtol=1e-5)
    # A row alone has the same answer, though its lists have one length.
    for row, answer in zip(rows[:2], expected[:2], strict=True):
        np.testing.assert_allclose(ask([row]), [answer], rtol=1e-5)
    with pytest.raises(InputError, match=r"A row of a numeric feature|numeric_column takes numbers"):
        ask([{**rows[0], "age": [1.0, 2.0]}, {**rows[1], "age": [1.0]}])


def test_a_cross_that_depends_on_what_lists_are_is_refused(tmp_path: Path) -> None:
    columns = [fc.indicator_column(fc.crossed_column(["one", "words"], 1000))]
    _, ask = serve(columns, tmp_path / "m.keras")
    row = {"one": "x", "words": ["a", "b"]}
    assert len(ask([row, {"one": "x", "words": ["c"]}])) == 2
    with pytest.raises(InputError, match=r"lists of one length in words, which 'one_X_words__ids' may read"):
        ask([row])


def test_a_sequential_model_has_its_names_and_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,), name="x"), keras.layers.Dense(1, name="y")])
    model.save(tmp_path / "m.keras")
    served = load_export(tmp_path / "m.keras")
    assert [(v.name, v.shape) for v in (*served.inputs, *served.outputs)] == [
        ("x", (None, 2)),
        ("y", (None, 1)),
    ]
    rows = np.ones((3, 2), "float32")
    np.testing.assert_allclose(served.predict({"x": rows})["y"], model.predict(rows, verbose=0), rtol=1e-6)
    (tmp_path / "m.keras").write_bytes(b"PK")
    with pytest.raises(InputError, match=r"loaded as it was exported. Received: .*m\.keras"):
        load_export(tmp_path / "m.keras")
