"""Datasets of insitu as TensorFlow's, and passes of them in a fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import insitu
from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.grid import import_cache
from insitu.train.fit.feed import DatasetFeed

pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="needs TensorFlow")


@pytest.fixture
def cache(tmp_path: Path, home: Path) -> str:
    rng = np.random.default_rng(0)
    names = np.array([f"row {i}" for i in range(50)])
    x, label = rng.normal(size=(50, 3)).astype("f4"), rng.normal(size=50).astype("f4")
    np.savez(tmp_path / "n.npz", x=x, name=names, label=label)
    import_cache(Paths(home), "n", [str(tmp_path / "n.npz")], partitions=3)
    return "n"


def test_batches_are_tensors_and_text_is_strings(cache: str) -> None:
    import tensorflow as tf

    ds = insitu.dataset(cache, features=["x", "name"]).batch(20)
    made = ds.as_tf_dataset()
    assert made.cardinality() == 3 and ds.repeat(2).as_tf_dataset().cardinality() == 6
    features, label = made.element_spec
    assert (features["x"].shape.as_list(), features["name"].dtype, label.dtype) == (
        [None, 3],
        tf.string,
        tf.float32,
    )
    expected = [batch[0]["name"].tolist() for batch in insitu.dataset(cache).batch(20)]
    assert [[n.decode() for n in f["name"].numpy()] for f, _ in made] == expected
    assert (
        insitu.dataset(cache).batch(20).repeat().as_tf_dataset().cardinality() == tf.data.INFINITE_CARDINALITY
    )


def make_model(strategy: Any = None) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_a_fit_of_several_passes_is_that_of_keras(cache: str) -> None:
    ds = insitu.dataset(cache, features="x").filter(lambda x, label: label > 0).batch(8).repeat(2)
    plain = make_model()
    expected = plain.fit(ds.as_tf_dataset(), epochs=2, verbose=0, shuffle=False).history["loss"]
    with insitu.OneDeviceStrategy().scope():
        model = make_model()
    got = model.fit(ds, epochs=2, verbose=0).history["loss"]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    steps = -(-ds.rows // 8) * 2 * 2
    assert int(model.optimizer.iterations) == int(plain.optimizer.iterations) == steps


def test_evaluations_and_loops_make_all_passes(cache: str) -> None:
    ds = insitu.dataset(cache, features="x").batch(8)
    strategy = insitu.OneDeviceStrategy()
    with strategy.scope():
        model = make_model()
    assert model.predict(ds.repeat(2), verbose=0).shape == (100, 1)
    np.testing.assert_allclose(
        model.evaluate(ds.repeat(3), verbose=0), model.evaluate(ds, verbose=0), rtol=1e-5
    )
    assert len(strategy.distribute_dataset(ds.repeat(2))) == 14
    assert sum(len(y) for _, y in strategy.distribute_dataset(ds.repeat(2))) == 100


def test_passes_without_end_need_a_number_of_steps(cache: str) -> None:
    ds = insitu.dataset(cache, features="x").batch(8).repeat()
    with insitu.OneDeviceStrategy().scope():
        model = make_model()
    for call in (model.fit, model.evaluate, model.predict):
        with pytest.raises(InputError, match="has no end"):
            call(ds, verbose=0)
    model.fit(ds, steps_per_epoch=5, epochs=3, verbose=0)
    assert int(model.optimizer.iterations) == 15
    assert model.predict(ds, steps=9, verbose=0).shape == (50 + 16, 1)


def test_a_column_of_text_goes_into_a_model(cache: str, home: Path) -> None:
    ds = insitu.dataset(cache, features="name").batch(8)

    def make() -> Any:
        keras.utils.set_random_seed(1)
        lookup = keras.layers.StringLookup(vocabulary=["row 1", "row 7"], output_mode="one_hot")
        inputs = keras.Input((), dtype="string")
        model = keras.Model(inputs, keras.layers.Dense(1)(lookup(keras.ops.expand_dims(inputs, -1))))
        model.compile("sgd", "mse")
        return model

    plain = make()
    expected = plain.fit(ds.as_tf_dataset(), epochs=2, verbose=0, shuffle=False).history["loss"]
    with insitu.OneDeviceStrategy().scope():
        model = make()
    np.testing.assert_allclose(model.fit(ds, epochs=2, verbose=0).history["loss"], expected, rtol=1e-5)
    two = insitu.Context(Paths(home), shards=(0, 1), num_shards=2)
    with insitu.MultiWorkerMirroredStrategy(context=two).scope():
        model = make()
    shards = insitu.dataset(cache, features="name", context=two).batch(200)
    whole = insitu.dataset(cache, features="name").batch(200)
    got = model.fit(shards, epochs=2, verbose=0).history["loss"]
    expected = make().fit(whole.as_tf_dataset(), epochs=2, verbose=0, shuffle=False).history["loss"]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert model.predict(shards, verbose=0).shape == (50, 1)


def test_the_ledger_of_several_passes_goes_by_passes(cache: str) -> None:
    ds = insitu.dataset(cache, features="x").shuffle(1).batch(20).repeat(2)
    feed = DatasetFeed(ds, [0], 1)
    assert (feed.num_steps, feed.count_steps(0), feed.cache) == (6, 3, cache)
    steps = list(feed.steps(1, 0))
    assert [step.epoch for step in steps] == [2, 2, 2, 3, 3, 3]
    assert [step.last for step in steps] == [False, False, True] * 2
    from_the_middle = list(feed.steps(1, 4))
    for got, expected in zip(from_the_middle, steps[4:], strict=True):
        np.testing.assert_array_equal(got.parts[0].data[0], expected.parts[0].data[0])
    assert [feed.find_pass(1, step) for step in (0, 2, 3, 6)] == [(2, 0), (2, 2), (3, 0), (4, 0)]
    assert DatasetFeed(insitu.dataset(cache).filter(lambda *_: _[1] > 0).batch(5), [0], 1).cache is None


def test_lists_of_different_lengths_are_filled_up_for_a_model(home: Path, tmp_path: Path) -> None:
    tokens = pa.array([list(range(1, 1 + row % 4)) for row in range(50)], pa.list_(pa.int32()))
    labels = pa.array([float(row % 4) for row in range(50)], pa.float32())
    pq.write_table(pa.table({"tokens": tokens, "label": labels}), tmp_path / "t.parquet")
    import_cache(Paths(home), "t", [str(tmp_path / "t.parquet")], partitions=3, ragged=["tokens"])
    ds = insitu.dataset("t", features="tokens")
    padded = ds.batch(8, pad=0, length=4)

    def make() -> Any:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,), dtype="int32")
        rows = keras.layers.Embedding(5, 3, mask_zero=True)(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(rows)))
        model.compile("sgd", "mse")
        return model

    expected = make().fit(padded.as_tf_dataset(), epochs=2, verbose=0, shuffle=False).history["loss"]
    with insitu.OneDeviceStrategy().scope():
        model = make()
    np.testing.assert_allclose(model.fit(padded, epochs=2, verbose=0).history["loss"], expected, rtol=1e-5)
    for call in (lambda: model.fit(ds.batch(8), verbose=0), ds.batch(8).as_tf_dataset):
        with pytest.raises(InputError, match=r"whose rows are lists\. Give batch\(\) a length"):
            call()
