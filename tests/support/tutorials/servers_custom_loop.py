"""A coordinator's loop over words, as scripts for `tf.distribute` have it; `insitu` stands for that.

servers_custom_loop.py OUT [DIES]   writes what this task found; with DIES worker:1 dies once in a function
"""

import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import insitu as distribute

WORDS = ["north", "east", "south", "west", "up", "down", "here"]
EPOCHS, STEPS = 3, 8
out = Path(sys.argv[1])


def make_rows():
    rng = np.random.default_rng(7)
    words = np.stack([rng.permutation(WORDS)[:3] for _ in range(96)])
    return words, np.where((words == "up").any(axis=1), "yes", "no")[:, None]


def make_model():
    given = keras.Input((3,), dtype="int64", name="words")
    rows = keras.layers.Embedding(len(WORDS) + 1, 16, embeddings_initializer="ones")(given)
    start = keras.initializers.GlorotUniform(3)
    answer = keras.layers.Dense(1, "sigmoid", kernel_initializer=start)(keras.ops.mean(rows, axis=1))
    return keras.Model({"words": given}, answer), keras.optimizers.RMSprop(0.05)


def make_layers():
    find_words = keras.layers.StringLookup(vocabulary=WORDS)
    return find_words, keras.layers.StringLookup(vocabulary=["no", "yes"], num_oov_indices=0)


def make_dataset(find_words, find_label):
    rows = tf.data.Dataset.from_tensor_slices(make_rows())
    return rows.map(lambda x, y: ({"words": find_words(x)}, find_label(y))).batch(12).repeat()


def main():
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        server = distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
        )
        server.join()
        sys.exit("join never returns")
    partitioner = distribute.experimental.partitioners.FixedShardsPartitioner(num_shards=2)
    strategy = distribute.experimental.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    with strategy.scope():
        find_words, find_label = make_layers()
        model, optimizer = make_model()
        accuracy = keras.metrics.BinaryAccuracy()
    coordinator = distribute.experimental.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def step(iterator):
        def replica_step(features, labels):
            with tf.GradientTape() as tape:
                answer = model(features, training=True)
                losses = keras.losses.BinaryCrossentropy(reduction="none")(labels, answer)
                loss = tf.nn.compute_average_loss(losses)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(labels, answer)
            return loss

        features, labels = next(iterator)
        losses = strategy.run(replica_step, args=(features, labels))
        return strategy.reduce(distribute.ReduceOp.SUM, losses, axis=None)

    @tf.function
    def make_worker_dataset():
        return make_dataset(find_words, find_label)

    iterator = iter(coordinator.create_per_worker_dataset(make_worker_dataset))
    killed = out / "killed"

    calls = []

    def dying_step(iterator):
        calls.append(distribute.experimental.coordinator.experimental_get_current_worker_index())
        if calls == [1, 1]:  # the first call is a trial
            (out / "ran-on-1").touch()
            if len(sys.argv) > 2 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return step(iterator)

    losses, accuracies, values = [], [], []
    for _ in range(EPOCHS):
        accuracy.reset_state()
        values += [coordinator.schedule(dying_step, args=(iterator,)) for _ in range(STEPS)]
        coordinator.join()
        accuracies.append(float(accuracy.result()))
    losses = [float(loss) for loss in coordinator.fetch(values)]
    weights = [weight.tolist() for weight in model.get_weights()]
    context = distribute.context()
    found = {"losses": losses, "accuracies": accuracies, "weights": weights, "attempt": context.incarnation}
    (out / f"{context.index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
