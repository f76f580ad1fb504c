"""Keras 3 on TensorFlow without insitu: one process on one core."""

import sys

import keras
import models

models.me()
kind = sys.argv[1]
model = models.keras_model(keras, kind)
x, y = models.data(kind, 1)


def fit(**options):
    model.fit(x, y, batch_size=models.ROWS, shuffle=False, **options)


print(f"RATE {models.rate_of_fit(keras, fit, len(x))}")
