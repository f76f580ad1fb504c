"""Canned estimators take a tf.data.Dataset, texts included, as the same arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import in_shards

from insitu import estimator as est
from insitu import feature_column as fc
from insitu.base.errors import InputError
from insitu.extensions.estimator.canned import map_batches
from insitu.train import MultiWorkerMirroredStrategy

tf = pytest.importorskip("tensorflow")
RNG = np.random.default_rng(2)
PEOPLE = {
    "age": RNG.normal(size=60).astype("float32"),
    "word": RNG.choice(["a", "b", "c"], (60, 2)),
    "w": RNG.uniform(0, 2, 60).astype("float32"),
}
LABELS = RNG.choice(["no", "yes"], 60)
WORD = fc.categorical_column_with_vocabulary_list("word", ["a", "b"])
COLUMNS = [fc.numeric_column("age"), WORD, fc.crossed_column([WORD, "word"], 9)]


def as_dataset(batch: int = 20) -> Any:
    return tf.data.Dataset.from_tensor_slices((PEOPLE, LABELS)).batch(batch)


@pytest.mark.parametrize("shards", [1, 2])
def test_numbers_are_those_of_the_same_arrays(tmp_path: Path, shards: int) -> None:
    found = []
    for name, data in (("data", as_dataset), ("arrays", lambda: (PEOPLE, LABELS))):
        strategy = MultiWorkerMirroredStrategy(context=in_shards(tuple(range(shards)), shards))
        model = est.LinearClassifier(
            COLUMNS,
            weight_column="w",
            label_vocabulary=["no", "yes"],
            config=est.RunConfig(tmp_path / name, train_distribute=strategy),
        )
        model.train(as_dataset, max_steps=7)
        rows = [row["logits"] for row in model.predict(data)]
        found.append((model.evaluate(data), rows))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-6)


def test_later_batches_have_the_shapes_of_the_first() -> None:
    lengths = [(4, 1, 3), (2, 1, 3), (4, 2, 3)]
    batches = tf.data.Dataset.from_generator(
        lambda: map(np.zeros, lengths), output_signature=tf.TensorSpec((None, None, 3), tf.float64)
    )
    found = map_batches(batches, lambda array: {"x": array})
    assert found.element_spec["x"].shape.as_list() == [None, 1, 3]
    rows = iter(found)
    assert [next(rows)["x"].shape, next(rows)["x"].shape] == lengths[:2]
    with pytest.raises(tf.errors.OpError, match=r"\(any, 1, 3\). Received: \(4, 2, 3\). Fill rows up"):
        next(rows)


def test_what_isnt_dense_or_has_no_rows_is_told(tmp_path: Path) -> None:
    model = est.LinearClassifier(COLUMNS, config=est.RunConfig(tmp_path))
    ragged = tf.data.Dataset.from_tensors(({"word": tf.ragged.constant([["a"], []])}, [0, 1]))
    with pytest.raises(InputError, match=r"has dense tensors. Received: RaggedTensorSpec"):
        model.train(lambda: ragged, max_steps=1)
    with pytest.raises(InputError, match=r"Received: an empty tf.data.Dataset"):
        model.train(lambda: as_dataset().take(0), max_steps=1)
