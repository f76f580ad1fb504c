"""Values equal those of TensorFlow's own columns, and are the same on each backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from backend_checks import result_of, start
from feature_rows import WORDS, make_columns, make_rows, table_of

from insitu import feature_column as fc
from insitu.base.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
RUNS = Path(__file__).parents[3] / "support" / "feature_runs.py"


def vocabulary_in(folder: Path) -> str:
    path = folder / "words.txt"
    path.write_text("\n".join(WORDS[1:8]) + "\n")
    return str(path)


def values_of_tensorflow(
    rows: dict[str, Any], vocabulary: str
) -> tuple[np.ndarray, list[tuple[str, np.ndarray]]]:
    """Return (the matrix of TensorFlow's input_layer, the part of each column)."""
    import tensorflow as tf

    columns = tf.compat.v1.feature_column
    with tf.Graph().as_default():
        tensors = {
            key: tf.ragged.constant(value).to_sparse() if isinstance(value, list) else tf.constant(value)
            for key, value in rows.items()
        }
        variables: dict[Any, list[Any]] = {}
        parts: dict[Any, Any] = {}
        matrix = columns.input_layer(
            tensors, make_columns(columns, vocabulary), cols_to_vars=variables, cols_to_output_tensors=parts
        )
        with tf.compat.v1.Session() as session:
            session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.tables_initializer()])
            for variable in {id(v): v for of_column in variables.values() for v in of_column}.values():
                session.run(variable.assign(table_of(variable.shape)))
            found, each = session.run([matrix, list(parts.values())])
    return found, list(zip([column.name for column in parts], each, strict=True))


def layer_of(vocabulary: str, **options: Any) -> fc.DenseFeatures:
    layer = fc.DenseFeatures(make_columns(fc, vocabulary), **options)
    layer.build()
    for weight in layer.weights:
        weight.assign(table_of(weight.shape))
    return layer


@pytest.mark.long
def test_values_equal_those_of_tensorflow_on_each_backend(tmp_path: Path):
    others = {backend: start(backend, tmp_path, str(tmp_path), script=RUNS) for backend in ("jax",)}
    rows, vocabulary = make_rows(), vocabulary_in(tmp_path)
    expected, parts = values_of_tensorflow(rows, vocabulary)
    layer = layer_of(vocabulary)
    outputs: dict[Any, Any] = {}
    matrix = layer(rows, cols_to_output_tensors=outputs)
    found = {column.name: np.asarray(part) for column, part in outputs.items()}
    assert list(found) == sorted(found)
    for name, part in parts:
        np.testing.assert_allclose(found[name], part, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(np.asarray(matrix), expected, rtol=1e-5, atol=1e-6)
    for process in others.values():
        result = result_of(process)
        np.testing.assert_allclose(result["matrix"], expected, rtol=1e-5, atol=1e-6)
        assert result["losses"][-1] < result["losses"][0]
        assert result["same_when_loaded"] and result["same_in_both"]


@pytest.mark.torch
def test_values_equal_those_of_tensorflow_on_pytorch(tmp_path: Path):
    process = start("torch", tmp_path, str(tmp_path), script=RUNS)
    expected, _ = values_of_tensorflow(make_rows(), vocabulary_in(tmp_path))
    result = result_of(process)
    np.testing.assert_allclose(result["matrix"], expected, rtol=1e-5, atol=1e-6)
    assert result["losses"][-1] < result["losses"][0]
    assert result["same_when_loaded"] and result["same_in_both"]


def test_a_layer_is_saved_with_its_columns(tmp_path: Path):
    layer = layer_of(vocabulary_in(tmp_path), lengths={"list": 5})
    columns = layer.feature_columns
    again = fc.DenseFeatures.from_config(layer.get_config())
    assert [c.name for c in again.feature_columns] == [c.name for c in columns]
    assert again.get_config() == layer.get_config()
    rows = make_rows()
    for name, values in layer.transform(rows).items():
        np.testing.assert_array_equal(values, again.transform(rows)[name])
    assert layer.transform(rows)["list__ids"].shape == (64, 5)


def test_a_model_is_saved_and_loaded(tmp_path: Path):
    column = fc.embedding_column(fc.categorical_column_with_vocabulary_list("w", ["a", "b"]), 2)
    inputs = fc.make_inputs([column, fc.numeric_column("x")])
    assert sorted(inputs) == ["w__ids", "x__values"]
    outputs = keras.layers.Dense(1)(fc.DenseFeatures([column, fc.numeric_column("x")])(inputs))
    model = keras.Model(inputs, outputs)
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    layer = next(layer for layer in loaded.layers if isinstance(layer, fc.DenseFeatures))
    batch = layer.transform({"w": np.array(["a", "none", "b"]), "x": [1.0, 2.0, 3.0]})
    np.testing.assert_array_equal(model.predict(batch, verbose=0), loaded.predict(batch, verbose=0))


def test_a_sequential_model_learns_from_transformed_batches():
    rng = np.random.default_rng(0)
    words = np.array(rng.choice(["a", "b", "c"], 300), object)
    column = fc.embedding_column(fc.categorical_column_with_hash_bucket("w", 10), 2)
    model = keras.Sequential([fc.DenseFeatures([column]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    inputs, labels = fc.FeatureTransform([column])({"w": words}, (words == "a").astype("float32"))
    history = model.fit(inputs, labels, epochs=20, batch_size=50, verbose=0).history["loss"]
    assert history[-1] < 0.01


def test_input_layer_has_the_arguments_of_tensorflow():
    numbers = fc.numeric_column("x")
    embedding = fc.embedding_column(fc.categorical_column_with_identity("i", 3), 2)
    variables: dict[Any, Any] = {}
    parts: dict[Any, Any] = {}
    features = {"x": [1.0, 2.0], "i": [0, 2]}
    matrix = fc.input_layer(features, [numbers, embedding], None, False, variables, parts)
    assert matrix.shape == (2, 3)
    assert variables[numbers] == [] and tuple(variables[embedding][0].shape) == (3, 2)
    assert not variables[embedding][0].trainable
    np.testing.assert_array_equal(np.asarray(matrix)[:, :2], np.asarray(parts[embedding]))
    with pytest.raises(InputError, match="weight_collections"):
        fc.input_layer(features, [numbers], weight_collections=["a"])


def test_text_within_a_graph_names_the_transform():
    import tensorflow as tf

    layer = fc.DenseFeatures([fc.indicator_column(fc.categorical_column_with_hash_bucket("w", 5))])

    @tf.function
    def call(words: Any) -> Any:
        return layer({"w": words})

    with pytest.raises(Exception, match=r"(?s)before the graph.*'w'.*FeatureTransform"):
        call(tf.constant(["a"]))


def test_a_categorical_column_alone_is_refused():
    column = fc.categorical_column_with_identity("i", 3)
    with pytest.raises(InputError, match=r"'i', which is categorical. Wrap it: indicator_column"):
        fc.DenseFeatures([column])
