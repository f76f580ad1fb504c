"""Learns who earns much by Keras' fit, with the variables on parameter servers: see README.md.

insitu start --workers 2 --ps 1 --evaluator people/train examples/census servers.py
"""

import argparse

import keras
import numpy as np
from census_columns import FEATURES, deep, wide
from make_people import INCOMES

import insitu
from insitu import feature_column as fc

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=("sync", "async", "bounded"), default="async")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch", type=int, default=256, help="rows of a step, over all workers")
chosen = parser.parse_args()
me = insitu.context()

# The dense layers of the wide part take what a linear model would look up: counts of each id.
wide = [fc.indicator_column(column) for column in wide]
transform = fc.FeatureTransform([*wide, *deep])


def as_numbers(features, income):
    """Return the numbers that the layers take, and 1 for a large income."""
    return transform(features), (np.asarray(income) == INCOMES[1]).astype("float32")


def read(cache, **options):
    return insitu.dataset(cache, features=FEATURES, label="income", **options).map(as_numbers)


strategy = insitu.ParameterServerStrategy(mode=chosen.mode)
with strategy.scope():
    inputs = fc.make_inputs([*wide, *deep])
    hidden = fc.DenseFeatures(deep)(inputs)
    for units in (32, 16):
        hidden = keras.layers.Dense(units, activation="relu")(hidden)
    of_wide = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(
        fc.DenseFeatures(wide)(inputs)
    )
    logit = keras.layers.Add()([of_wide, keras.layers.Dense(1)(hidden)])
    model = keras.Model(inputs, keras.layers.Activation("sigmoid")(logit))
    auc = keras.metrics.AUC(name="auc")
    model.compile(keras.optimizers.Adam(0.005), "binary_crossentropy", metrics=["accuracy", auc])

held_out = read("people/test", shards=range(me.num_shards)).batch(512)
if me.role == "evaluator":
    insitu.SidecarEvaluator(model, held_out, "scored").start()
else:
    # Servers keep the checkpoints of the job. The evaluator reads files of the whole model.
    files = keras.callbacks.ModelCheckpoint("scored/{epoch:03d}.keras")
    train = read("people/train").shuffle().batch(chosen.batch)
    model.fit(train, epochs=chosen.epochs, verbose=0, callbacks=[files])
if me.is_chief:
    # The chief alone reads the held-out rows, of all shards.
    scores = model.evaluate(held_out, verbose=0, return_dict=True)
    print(
        "servers: held-out " + ", ".join(f"{name} {scores[name]:.3f}" for name in ("accuracy", "auc", "loss"))
    )
