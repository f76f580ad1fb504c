"""Embeddings whose rows live on servers: here on one that is a thread of this process."""

from __future__ import annotations

import contextlib
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from models import in_shards

import insitu
from insitu.base.errors import InputError, TrainingError
from insitu.train import HybridStrategy, MultiWorkerMirroredStrategy, ParameterServerStrategy

KEYS = np.array([2**62, -5, 17, 10_000_000, 3, -(2**63), 2**63 - 1, 40], np.int64)


def rows_of(count: int, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Each user likes even or odd items; the number in the key doesn't tell."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, len(KEYS), count), rng.integers(0, 6, (count, 2))
    label = (user % 2 == item[:, 0] % 2).astype(np.int64)
    return {"user": KEYS[user], "items": item}, label


def likes(strategy: Any, **compile_options: Any) -> Any:
    layers = keras.layers
    with strategy.scope():
        user = keras.Input((), dtype="int64", name="user")
        items = keras.Input((2,), dtype="int64", name="items")
        embed = insitu.layers.Embedding
        vectors = [embed(8, name="users")(user), layers.Flatten()(embed(8, name="things")(items))]
        hidden = layers.Dense(16, activation="relu")(layers.Concatenate()(vectors))
        model = keras.Model({"user": user, "items": items}, layers.Dense(1, activation="sigmoid")(hidden))
        options = {"optimizer": keras.optimizers.Adam(0.03), "loss": "binary_crossentropy", **compile_options}
        model.compile(metrics=["accuracy"], **options)
    return model


def over(num_shards: int, **options: Any) -> ParameterServerStrategy:
    return ParameterServerStrategy(context=in_shards(tuple(range(num_shards)), num_shards), **options)


@pytest.fixture(scope="module")
def learned() -> Any:
    keras.utils.set_random_seed(3)
    model = likes(over(2, mode="sync", table_optimizer=keras.optimizers.Adagrad(0.5)))
    model.fit(*rows_of(600), batch_size=60, epochs=6, shuffle=False, verbose=0)
    return model


def test_learns_with_keys_of_any_size(learned: Any) -> None:
    x, y = rows_of(200, seed=1)
    assert learned.evaluate(x, y, verbose=0, return_dict=True)["accuracy"] > 0.95
    keys, rows = learned.get_layer("users").contents()
    assert keys.tolist() == sorted(KEYS.tolist())
    assert rows.shape == (8, 8)
    # A batch larger than the one that the layer made room for is cut.
    assert learned.predict(x, batch_size=200, verbose=0).shape == (200, 1)


def test_a_call_by_hand_takes_keys(learned: Any) -> None:
    x, _ = rows_of(20, seed=2)
    by_hand = keras.ops.convert_to_numpy(learned({name: keys[:5] for name, keys in x.items()}))
    np.testing.assert_allclose(by_hand, learned.predict(x, verbose=0)[:5], rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Skipping variable loading")  # the optimizer's state was on servers
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, as it saves
def test_saved_loaded_and_exported_it_says_the_same(learned: Any, tmp_path: Path) -> None:
    x, _ = rows_of(50, seed=3)
    expected = learned.predict(x, verbose=0)
    learned.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), expected, rtol=1e-5)
    plain = insitu.layers.export(loaded)
    assert not any(isinstance(layer, insitu.layers.Embedding) for layer in plain._flatten_layers())
    plain.save(tmp_path / "plain.keras")
    again = keras.saving.load_model(tmp_path / "plain.keras")
    np.testing.assert_allclose(again.predict(x, verbose=0), expected, rtol=1e-5)
    unknown = {"user": np.array([123, 456]), "items": x["items"][:2]}
    assert np.isfinite(again.predict(unknown, verbose=0)).all()
    # Trained on where the saved one was.
    strategy = over(1)
    with strategy.scope():
        loaded.compile("sgd", "binary_crossentropy")
    loaded.fit(*rows_of(60), batch_size=30, verbose=0)
    keys, _ = loaded.get_layer("users").contents()
    assert keys.tolist() == sorted(KEYS.tolist())


@pytest.mark.parametrize("module", ["insitu.train.layers", "insitu.train.parameter_server.layers", "gone"])
def test_a_file_that_names_the_layers_by_another_module_is_loaded(module: str, tmp_path: Path) -> None:
    """The layers have moved. Files from before must load too: Keras finds them by their registered name."""
    layers = [
        keras.Input((2,), dtype="int64"),
        insitu.layers.Embedding(3, input_dim=5),
        keras.layers.Flatten(),
    ]
    model = keras.Sequential(layers)
    model.save(tmp_path / "now.keras")
    with zipfile.ZipFile(tmp_path / "now.keras") as now, zipfile.ZipFile(tmp_path / "old.keras", "w") as old:
        for name in now.namelist():
            data = now.read(name)
            if name == "config.json":
                own = b'"module": "insitu.train.parameter_server.layers"'
                assert data.count(own) == 1 and b'"registered_name": "insitu>Embedding"' in data
                data = data.replace(own, f'"module": "{module}"'.encode())
            old.writestr(name, data)
    loaded = keras.saving.load_model(tmp_path / "old.keras")
    keys = np.array([[0, 4], [3, 1]])
    assert type(loaded.layers[0]) is insitu.layers.Embedding
    np.testing.assert_array_equal(loaded(keys), model(keys))


def test_layers_without_an_initializer_of_their_own_are_made_in_a_scope() -> None:
    class Passes(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return inputs

    with over(1).scope():
        made = Passes(name="passes", trainable=False)
    assert made.get_config() == Passes(name="passes", trainable=False).get_config()


def test_without_servers_it_needs_a_size() -> None:
    layer = insitu.layers.Embedding(4)
    with pytest.raises(TrainingError, match="input_dim"):
        layer(np.array([1, 2]))
    plain = insitu.layers.Embedding(4, input_dim=10)
    assert plain(np.array([[1, 2]])).shape == (1, 2, 4)


def test_dense_layers_train_together_around_tables_on_servers() -> None:
    keras.utils.set_random_seed(3)
    context = in_shards((0, 1), 2)
    strategy = HybridStrategy(context=context, table_optimizer=keras.optimizers.Adagrad(0.5))
    model = likes(strategy, optimizer=keras.optimizers.Adam(0.03))
    data = rows_of(600)
    model.fit(*data, batch_size=60, epochs=4, shuffle=False, verbose=0)
    x, y = rows_of(200, seed=1)
    assert model.evaluate(x, y, verbose=0, return_dict=True)["accuracy"] > 0.95
    assert model.predict(x, batch_size=200, verbose=0).shape == (200, 1)
    # Only the tables were on the server: two gradients of each step, none of them dense.
    told = strategy._open_session()._client.stats()[0]
    assert (told["applied"], told["rows"], told["pieces"]) == (2 * 40, 4 * 600, [])
    assert {name: table["rows"] for name, table in told["tables"].items()} == {"users": 8, "things": 6}
    assert told["staleness"]["largest"] == 1  # the other shard's, of the same step
    with pytest.raises(TrainingError, match="without an"):
        plain = HybridStrategy(context=context)
        with plain.scope():
            dense = keras.Sequential([keras.layers.Dense(1)])
            dense.compile("sgd", "mse")
        dense.fit(np.zeros((8, 2)), np.zeros(8), verbose=0)
    with pytest.raises(TrainingError, match="Use fit"):
        strategy.run(lambda: None)


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_loaded_model_trains_on_alike_with_and_without_servers(tmp_path: Path) -> None:
    given, labels = np.array([[1], [5], [7], [5]] * 8), np.array([0, 1, 0, 1] * 8, "float32")
    with over(1).scope():
        key = keras.Input((1,), dtype="int64")
        rows = keras.layers.Flatten()(insitu.layers.Embedding(4, name="rows")(key))
        model = keras.Model(key, keras.layers.Dense(1, "sigmoid")(rows))
        model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy")
    model.fit(given, labels, epochs=2, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    came = []
    for strategy in (None, MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)), over(1)):
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            loaded = keras.models.load_model(tmp_path / "model.keras")
        history = loaded.fit(given, labels, epochs=3, shuffle=False, verbose=0).history["loss"]
        came.append([history, loaded.get_layer("rows").contents()[1]])
    for history, rows in came[1:]:
        np.testing.assert_allclose(history, came[0][0], rtol=1e-5)
        np.testing.assert_allclose(rows, came[0][1], rtol=1e-4)


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_loaded_model_trains_on_and_begins_with_its_rows_once(learned: Any, tmp_path: Path) -> None:
    learned.save(tmp_path / "likes.keras")
    strategy = over(1, mode="sync", table_optimizer=keras.optimizers.SGD(0.5))
    with strategy.scope():
        model = keras.models.load_model(tmp_path / "likes.keras")
    x, y = rows_of(60)
    before = {name: model.get_layer(name).contents() for name in ("users", "things")}
    model.fit(x, y, batch_size=60, epochs=2, shuffle=False, verbose=0)
    moved = model.get_layer("users").contents()
    assert moved[0].tolist() == before["users"][0].tolist()
    assert 0 < np.abs(moved[1] - before["users"][1]).max() < 0.1
    # Another worker, or another life of this one, comes to the table when it has been trained.
    late = keras.models.load_model(tmp_path / "likes.keras").get_layer("users")
    late.attach(model.get_layer("users")._table, 8)
    np.testing.assert_array_equal(late.contents()[1], moved[1])


@pytest.mark.parametrize(
    "scaled",
    [
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 1024.0),
        lambda: keras.optimizers.SGD(0.1, loss_scale_factor=1024.0),
    ],
    ids=["moving", "fixed"],
)
def test_the_scale_of_losses_is_undone_for_rows_of_the_hybrid(scaled: Any) -> None:
    found = []
    for optimizer in (keras.optimizers.SGD(0.1), scaled()):
        keras.utils.set_random_seed(3)
        # One shard and one step: a step may read rows before or after an earlier push has come to its server.
        model = likes(HybridStrategy(context=in_shards((0,), 1)), optimizer=optimizer)
        model.fit(*rows_of(120), batch_size=120, epochs=1, shuffle=False, verbose=0)
        found.append([*(model.get_layer(name).contents()[1] for name in ("users", "things"))])
    for plain, undone in zip(*found, strict=True):
        np.testing.assert_allclose(undone, plain, rtol=1e-4, atol=1e-6)


def test_rows_whose_gradient_overflows_stay_as_they_are_in_the_hybrid() -> None:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 1e38)
    keras.utils.set_random_seed(3)
    model = likes(HybridStrategy(context=in_shards((0,), 1)), optimizer=optimizer)
    model.fit(*rows_of(60), batch_size=60, epochs=1, verbose=0, sample_weight=np.full(60, 1e30))
    told = model.get_layer("users").contents()[1]
    assert np.isfinite(told).all()
    assert np.abs(told).max() <= 0.05


@pytest.mark.parametrize("bound", ["clipnorm", "global_clipnorm"])
def test_a_norm_that_nobody_would_bound_is_refused(bound: str) -> None:
    x, y = rows_of(60)
    bounded = keras.optimizers.SGD(0.1, **{bound: 1.0})
    context = in_shards((0,), 1)
    for strategy in (
        over(1, mode="sync"),
        over(1, table_optimizer=keras.optimizers.SGD(0.1, **{bound: 1.0})),
        HybridStrategy(context=context),
    ):
        with pytest.raises(TrainingError, match=f"{bound}=1.0 for the rows"):
            likes(strategy, optimizer=bounded).fit(x, y, verbose=0)
    likes(over(1), optimizer=bounded).fit(x, y, verbose=0)


@pytest.mark.parametrize(
    "wrong", [{"age": 3}, {"max_age": "long"}, ["max_age"], {"every": 0}, {"max_age": 0}]
)
def test_an_eviction_that_cannot_be_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises((InputError, TrainingError), match="eviction"):
        insitu.layers.Embedding(4, eviction=wrong)


def test_what_cannot_be_is_refused() -> None:
    x, y = rows_of(60)
    with pytest.raises(InputError, match="integers"):
        likes(over(1)).fit({**x, "user": np.linspace(0, 1, 60)}, y, verbose=0)
    with pytest.raises(TrainingError, match="table_optimizer"):
        likes(over(1), optimizer="rmsprop").fit(x, y, verbose=0)
    model = likes(over(1))
    model.fit(x, y, batch_size=2, verbose=0)
    with pytest.raises(TrainingError, match="max_keys"):
        model.fit(x, y, batch_size=60, verbose=0)
    strategy = over(1)
    with strategy.scope():
        key = keras.Input((), dtype="int64")
        both = keras.layers.Concatenate()(
            [insitu.layers.Embedding(4)(key), keras.layers.Reshape((1,))(keras.ops.cast(key, "float32"))]
        )
        model = keras.Model(key, keras.layers.Dense(1)(both))
        model.compile("sgd", "mse")
    with pytest.raises(TrainingError, match="Embeddings alone"):
        model.fit(np.arange(8), np.ones(8), verbose=0)


def test_the_classes_that_keras_has_for_pytorch_are_those_that_scripts_name() -> None:
    from insitu.train.parameter_server.model_spec import built_in_updater

    for_torch = type(
        "SGD", (keras.optimizers.SGD,), {"__module__": "keras.src.backend.torch.optimizers.torch_sgd"}
    )
    of_a_user = type("SGD", (keras.optimizers.SGD,), {})
    assert built_in_updater(for_torch(0.5)) == built_in_updater(keras.optimizers.SGD(0.5))
    assert built_in_updater(of_a_user(0.5)) is None
