"""No Keras model: NumPy computes the gradients, and `strategy.group()` combines them over replicas.

The strategy decides which replica gets which rows. To use another one, change the line that makes it.

KERAS_BACKEND=jax python examples/strategies/low_level.py
"""

import keras
import numpy as np
from data import BATCH, ROWS, pictures

import insitu

strategy = insitu.MultiWorkerMirroredStrategy()


class Batches(keras.utils.PyDataset):
    """Global batches of flat pictures; `distribute_dataset` gives each replica its rows of each batch."""

    def __init__(self):
        super().__init__()
        self.x, self.y = pictures()

    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, index):
        part = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[part].reshape(-1, 144), self.y[part]


def features(x):
    """Return how much neighbours agree along columns and along rows, and a 1: float[rows, 3]."""
    image = x.reshape(-1, 12, 12)
    down = (image[:, 1:] * image[:, :-1]).mean((1, 2))
    across = (image[:, :, 1:] * image[:, :, :-1]).mean((1, 2))
    return np.stack([down, across, np.ones(len(x), "float32")], 1)


def gradient(weights, x, y):
    """Return the gradient of the mean logistic loss."""
    inputs = features(x)
    chance = 1 / (1 + np.exp(-inputs @ weights))
    return inputs.T @ (chance - y) / len(y)


def parts_of(batch):
    """Return the (pictures, labels) of each replica of this process, as NumPy arrays on each backend."""
    return [tuple(map(keras.ops.convert_to_numpy, part)) for part in strategy.local_results(batch)]


weights = np.zeros(3, "float32")
group = strategy.group()
# One row for each replica of this process, in the memory that the tasks share.
buffer = group.buffer((len(group.shards), len(weights)), "float32")
data = strategy.distribute_dataset(Batches())
for _epoch in range(20):
    for batch in data:
        parts = parts_of(batch)
        for row, (x, y) in zip(buffer, parts, strict=True):
            row[:] = gradient(weights, x, y) if len(y) else 0
        rows = [float(len(y)) for _, y in parts]
        # The mean over all rows of the step, with the same bits in each task.
        mean = group.all_reduce(buffer if len(parts) > 1 else buffer[0], "weighted_mean", rows)
        weights -= 2.0 * mean

right = total = 0
for batch in data:
    for x, y in parts_of(batch):
        right += int(((features(x) @ weights > 0) == y).sum()) if len(y) else 0
        total += len(y)
counts = strategy.reduce("sum", np.array([right, total])) // len(group.shards)
print(f"accuracy {counts[0] / counts[1]:.3f} on {strategy.num_replicas_in_sync} replicas")
