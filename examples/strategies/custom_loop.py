"""A custom training loop. To use another strategy, change the line that makes it.

KERAS_BACKEND=tensorflow python examples/strategies/custom_loop.py
"""

import keras
from data import BATCH, ROWS, pictures

import insitu

keras.utils.set_random_seed(1)
strategy = insitu.MultiWorkerMirroredStrategy()

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2),
        ]
    )
    optimizer = keras.optimizers.Adam(0.02)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
row_losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


class Batches(keras.utils.PyDataset):
    """Global batches; `distribute_dataset` gives each replica its rows of each batch."""

    def __init__(self):
        super().__init__()
        self.x, self.y = pictures()

    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, index):
        part = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[part], self.y[part]


def forward(x, y):
    outputs = model(x, training=True)
    # This replica's part of the loss. The sum over all replicas is the mean over all rows of the step.
    return strategy.compute_average_loss(row_losses(y, outputs)), outputs


if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss, outputs = forward(x, y)
        # Gradients are summed over all replicas of all workers before the update.
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        accuracy.update_state(y, outputs)
        return loss

elif keras.backend.backend() == "jax":
    import jax

    def pure(trainable, others, x, y):
        outputs, others = model.stateless_call(trainable, others, x, training=True)
        return strategy.compute_average_loss(row_losses(y, outputs)), (outputs, others)

    def train_step(x, y):
        trainable = [v.value for v in model.trainable_variables]
        others = [v.value for v in model.non_trainable_variables]
        gradient = jax.value_and_grad(pure, has_aux=True)
        (loss, (outputs, others)), gradients = gradient(trainable, others, x, y)
        for variable, value in zip(model.non_trainable_variables, others, strict=True):
            variable.assign(value)
        optimizer.apply(gradients, model.trainable_variables)
        accuracy.update_state(y, outputs)
        return loss

else:

    def train_step(x, y):
        model.zero_grad()
        loss, outputs = forward(x, y)
        loss.backward()
        optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
        accuracy.update_state(y, outputs)
        return loss.detach()


data = strategy.distribute_dataset(Batches())
for epoch in range(4):
    accuracy.reset_state()
    losses = []
    for x, y in data:
        losses.append(float(strategy.reduce("sum", strategy.run(train_step, args=(x, y)))))
    print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}")
print(f"accuracy {float(accuracy.result()):.3f} on {strategy.num_replicas_in_sync} replicas")
