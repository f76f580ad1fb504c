"""insitu on one core of each process: `MultiWorkerMirroredStrategy` with Keras 3 on a backend.

python insitu_rank.py MODEL [COMMUNICATION]
"""

import os
import sys

import models

index, size = models.me()
os.environ.update(INSITU_TASK=f"worker:{index}", INSITU_SHARDS=f"{index}/{size}")

import keras  # noqa: E402

import insitu  # noqa: E402

kind = sys.argv[1]
if keras.backend.backend() == "torch":
    # As bare PyTorch has its images. The other way Keras turns them around before and after each layer.
    keras.config.set_image_data_format("channels_first")
strategy = insitu.MultiWorkerMirroredStrategy(sys.argv[2] if len(sys.argv) > 2 else "auto")
with strategy.scope():
    model = models.keras_model(keras, kind)
x, y = models.data(kind, size)
if kind == "cnn" and models.channels_first(keras):
    x = x.reshape(-1, 1, 28, 28)


def fit(**options):
    model.fit(x, y, batch_size=models.ROWS * size, shuffle=False, **options)


rate = models.rate_of_fit(keras, fit, len(x))
if index == 0:
    print(f"RATE {rate}")
