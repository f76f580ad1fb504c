"""The three ways to train one model, as scripts write them, for each backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import insitu
from insitu.train.replica.state import SEED_STRIDE

ROWS, BATCH, EPOCHS = 49, 16, 5
"""Three whole batches and one of a single row, in which the first of two replicas has none: 20 steps."""

BACKEND = keras.backend.backend()
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
Outcome = dict[str, Any]


def rows() -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(3)
    x = {
        "image": rng.normal(size=(ROWS, 8, 8, 1)).astype("float32"),
        "token": rng.integers(0, 7, (ROWS, 3)).astype("int32"),
    }
    return x, ((x["image"].mean((1, 2, 3)) > 0) + (x["token"][:, 0] > 3)).astype("int32")


class Batches(keras.utils.PyDataset):
    """The rows in global batches, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self._x, self._y = rows()

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> Any:
        part = slice(index * BATCH, (index + 1) * BATCH)
        return {name: values[part] for name, values in self._x.items()}, self._y[part]


def build(embedding: Any = keras.layers.Embedding) -> Any:
    """A convolution, BatchNorm, Dropout and an embedding; not compiled."""
    layers = keras.layers

    def start(seed: int) -> Any:
        return keras.initializers.GlorotUniform(seed)

    image = keras.Input((8, 8, 1), name="image")
    token = keras.Input((3,), dtype="int32", name="token")
    seen = layers.Conv2D(4, 3, activation="relu", kernel_initializer=start(1), name="convolution")(image)
    seen = layers.BatchNormalization(name="normalization")(seen)
    seen = layers.Flatten()(seen)
    table = (
        embedding(4, name="embedding")
        if embedding is insitu.layers.Embedding
        else embedding(7, 4, embeddings_initializer=start(2), name="embedding")
    )
    read = layers.Flatten()(table(token))
    both = layers.Concatenate()([seen, read])
    both = layers.Dense(16, activation="relu", kernel_initializer=start(3), name="hidden")(both)
    both = layers.Dropout(0.2, seed=5)(both)
    out = layers.Dense(4, kernel_initializer=start(4), name="out")(both)
    return keras.Model({"image": image, "token": token}, out)


def make_optimizer() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def outcome(model: Any, losses: list[float]) -> Outcome:
    return {"losses": losses, "weights": [np.asarray(w, np.float64).tolist() for w in model.get_weights()]}


# The ways


def by_fit(strategy: Any, embedding: Any = keras.layers.Embedding) -> Outcome:
    """Keras' compile, fit and evaluate. The last of the losses is of an evaluation."""
    with strategy.scope():
        model = build(embedding)
        model.compile(make_optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = rows()
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
    return outcome(model, [*history["loss"], float(model.evaluate(x, y, batch_size=BATCH, verbose=0))])


def by_custom_loop(strategy: Any) -> Outcome:
    with strategy.scope():
        model, optimizer, mean = build(), make_optimizer(), keras.metrics.Mean()

    train_step = step_by_hand(strategy, model, optimizer)

    def test_step(x: Any, y: Any) -> None:
        mean.update_state(LOSS(y, model(x, training=False)))

    data = strategy.distribute_dataset(Batches())
    losses = []
    for _ in range(EPOCHS):
        total = 0.0
        for x, y in data:
            loss = strategy.reduce("sum", strategy.run(train_step, args=(x, y)))
            total += float(loss) * float(strategy.reduce("sum", strategy.run(count, args=(y,))))
        losses.append(total / ROWS)
    for x, y in data:
        strategy.run(test_step, args=(x, y))
    return outcome(model, [*losses, float(mean.result())])


def step_by_hand(strategy: Any, model: Any, optimizer: Any) -> Callable[[Any, Any], Any]:
    """A step for `strategy.run` that trains and returns the loss."""

    def step(x: Any, y: Any) -> Any:
        def forward() -> Any:
            return strategy.compute_average_loss(LOSS(y, model(x, training=True)))

        loss, gradients = value_and_gradients(forward, model)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step


def count(y: Any) -> Any:
    return keras.ops.sum(keras.ops.ones_like(y))


def by_exchange(strategy: Any, rows_of: Any = None) -> Outcome:
    """A bare loop: gradients by hand for each replica of this task, combined by the exchange. `rows_of` holds
    the embedding's rows instead, where it is given."""
    with strategy.scope():
        model, optimizer = build(), make_optimizer()
        optimizer.build(model.trainable_variables)
    group = strategy.group()
    moved, seeds = state_of(model)
    averaged = [*model.trainable_variables, *moved]
    buffer = group.buffer((len(group.shards), 1 + sum(int(np.prod(v.shape)) for v in averaged)), "float32")
    data, losses = strategy.distribute_dataset(Batches()), []
    for _ in range(EPOCHS):
        total = 0.0
        for x, y in data:
            before = values_of(moved, seeds)
            if rows_of is not None:
                rows_of.fetch(model)
            parts = list(zip(strategy.local_results(x), strategy.local_results(y), strict=True))
            buffer[:] = 0
            for row, shard, part in zip(buffer, group.shards, parts, strict=True):
                if len(part[1]):
                    go_back(before, seeds, shard)
                    found = list(one_replica(model, moved, *part))
                    if rows_of is not None:
                        rows_of.push(model, shard, found, part[0]["token"])
                    row[:] = np.concatenate([np.ravel(v) for v in found])
            weights = [float(len(part[1])) for part in parts]
            mean = group.all_reduce(buffer if len(buffer) > 1 else buffer[0], "weighted_mean", weights)
            total += float(mean[0]) * float(
                strategy.reduce("sum", np.float32(sum(weights))) / replicas(strategy)
            )
            pieces = split(mean[1:], averaged)
            optimizer.apply(
                [keras.ops.convert_to_tensor(p) for p in pieces[: len(model.trainable_variables)]],
                model.trainable_variables,
            )
            go_on(before, moved, pieces[len(model.trainable_variables) :])
        losses.append(total / ROWS)
    return outcome(model, losses)


def by_exchange_and_tables(strategy: Any) -> Outcome:
    """A bare loop: dense gradients combined by the exchange, those of table rows pushed to a server."""
    from insitu.parameters import ParameterServer, connect

    with (
        ParameterServer(mode="async", total_replicas=2) as server,
        connect([server.address], shards=(0, 1)) as client,
    ):
        return by_exchange(strategy, RowsOnServer(client))


class RowsOnServer:
    """The rows of the model's embedding in a table on a parameter server."""

    def __init__(self, client: Any) -> None:
        from insitu.parameters import Table

        client.define_tables([Table("embedding", 4, updater={"name": "sgd", "learning_rate": 0.05})])
        self._client = client
        self._pushed = [0, 0]

    def fetch(self, model: Any) -> None:
        variable = model.get_layer("embedding").embeddings
        variable.assign(self._client.pull_rows("embedding", np.arange(7)).result())

    def push(self, model: Any, shard: int, found: list[np.ndarray], tokens: Any) -> None:
        """Takes the embedding's gradient out of what one replica `found`."""
        place = 1 + [v.path for v in model.trainable_variables].index("embedding/embeddings")
        keys = np.unique(keras.ops.convert_to_numpy(tokens)).astype(np.int64)
        gradients, found[place] = found[place][keys], np.zeros_like(found[place])
        pushed = self._client.push_rows("embedding", keys, gradients, self._pushed[shard], shard=shard)
        assert pushed.result() == "applied"
        self._pushed[shard] += 1


def by_servers(mode: str) -> Outcome:
    """A bare loop: gradients by hand for each of two shards, pushed to a parameter server."""
    from insitu.parameters import ParameterServer, connect

    model = build()
    weights = {v.path: v for v in model.trainable_variables}
    moved, seeds = state_of(model)
    data, losses = Batches(), []
    with (
        ParameterServer(mode=mode, total_replicas=2) as server,
        connect([server.address], shards=(0, 1)) as client,
    ):
        client.define(
            {name: (v.shape, "float32", keras.ops.convert_to_numpy(v)) for name, v in weights.items()},
            updater={"name": "sgd", "learning_rate": 0.05, "momentum": 0.9},
        )
        for step in range(EPOCHS * len(data)):
            if step % len(data) == 0:
                losses.append(0.0)
            for shard in (0, 1) if step else ():
                client.pull(shard).result()
            for name, variable in weights.items() if step else ():
                variable.assign(client.values[name])
            before, averages, pushes = values_of(moved, seeds), [0.0] * len(moved), []
            x, y = data[step % len(data)]
            for shard in (0, 1):
                part = np.arange(shard * len(y) // 2, (shard + 1) * len(y) // 2)
                gradients = None
                if len(part):
                    go_back(before, seeds, shard)
                    rows = {name: values[part] for name, values in x.items()}, y[part]
                    loss, *found = one_replica(model, moved, *rows)
                    losses[-1] += float(loss) * len(part) / ROWS
                    gradients = dict(zip(weights, found[: len(weights)], strict=True))
                    share = len(part) / len(y)
                    averages = [a + share * b for a, b in zip(averages, found[len(weights) :], strict=True)]
                pushes.append(client.push(step, len(part), shard=shard, gradients=gradients))
            go_on(before, moved, averages)
            for push in pushes:
                assert push.result() == "applied"
        for shard in (0, 1):
            client.pull(shard).result()
        for name, variable in weights.items():
            variable.assign(client.values[name])
    return outcome(model, losses)


WAYS: dict[str, Callable[[Any], Outcome]] = {
    "fit": by_fit,
    "custom loop": by_custom_loop,
    "low level": by_exchange,
}


# Parts of it


def replicas(strategy: Any) -> int:
    """How often reduce() counts a value that isn't per replica in this process."""
    return len(strategy.group().shards)


def state_of(model: Any) -> tuple[list[Any], list[Any]]:
    """(what a forward pass moves, seeds)."""
    variables = model.non_trainable_variables
    return [v for v in variables if "float" in v.dtype], [v for v in variables if "float" not in v.dtype]


def values_of(moved: list[Any], seeds: list[Any]) -> list[tuple[Any, np.ndarray]]:
    return [(v, keras.ops.convert_to_numpy(v).copy()) for v in (*moved, *seeds)]


def go_back(before: list[tuple[Any, np.ndarray]], seeds: list[Any], shard: int) -> None:
    """State as it was before the step, for the next shard, which has a seed of its own."""
    for variable, value in before:
        variable.assign(value)
    for seed in seeds:
        seed.assign(shifted(keras.ops.convert_to_numpy(seed), shard))


def go_on(before: list[tuple[Any, np.ndarray]], moved: list[Any], averages: list[Any]) -> None:
    """State as it is after the step: averages over shards, and seeds that have counted it."""
    for variable, value in zip(moved, averages, strict=True):
        variable.assign(value)
    for seed, value in before[len(moved) :]:
        seed.assign(value + np.array([0, 1], value.dtype))


def shifted(state: np.ndarray, shard: int) -> np.ndarray:
    seed = np.array([state[0]], np.int64) + shard * SEED_STRIDE
    return np.array([seed.astype(state.dtype)[0], state[1]], state.dtype)


def split(flat: np.ndarray, like: list[Any]) -> list[np.ndarray]:
    stops = np.cumsum([int(np.prod(v.shape)) for v in like])
    starts = [0, *stops[:-1]]
    return [flat[a:b].reshape(v.shape).copy() for a, b, v in zip(starts, stops, like, strict=True)]


def one_replica(model: Any, moved: list[Any], x: Any, y: Any) -> Iterator[np.ndarray]:
    """The loss, a gradient for each weight, and what the forward pass has moved."""

    def forward() -> Any:
        return keras.ops.mean(LOSS(y, model(x, training=True)))

    loss, gradients = value_and_gradients(forward, model)
    for tensor in (loss, *gradients, *moved):
        yield np.array(keras.ops.convert_to_numpy(tensor))


def value_and_gradients(forward: Callable[[], Any], model: Any) -> tuple[Any, list[Any]]:
    """The loss and its gradients; state moves as the forward pass moves it."""
    variables = model.trainable_variables
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = forward()
        return loss, tape.gradient(loss, variables)
    if BACKEND == "torch":
        model.zero_grad()
        loss = forward()
        loss.backward()
        return loss.detach(), [v.value.grad for v in variables]
    import jax

    others = list(model.non_trainable_variables)

    def pure(values: list[Any], state: list[Any]) -> Any:
        mapping = [*zip(variables, values, strict=True), *zip(others, state, strict=True)]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            loss = forward()
        return loss, [scope.get_current_value(v) for v in others]

    gradient = jax.value_and_grad(pure, has_aux=True)
    (loss, state), gradients = gradient([v.value for v in variables], [v.value for v in others])
    for variable, value in zip(others, state, strict=True):
        variable.assign(value)
    return loss, gradients
