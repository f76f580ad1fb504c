"""A custom loop that keeps a checkpoint of its own, in which its data stands. It knows nothing of faults."""

import json
import os
from pathlib import Path

import keras
import numpy as np
from matrix_models import value_and_gradients

import insitu

OUT = Path(os.environ["OUT"])
OUT.mkdir(parents=True, exist_ok=True)
KEPT = OUT.with_name("loop.npz")
EPOCHS = 3
me = insitu.context()
strategy = insitu.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.02)
    optimizer.build(model.trainable_variables)
data = strategy.distribute_dataset(insitu.dataset("rows").shuffle().batch(8))
variables = [*model.variables, *optimizer.variables]
losses = []


def step(x, y):
    def forward():
        errors = keras.ops.mean((model(x, training=True) - y) ** 2, -1)
        return insitu.get_strategy().compute_average_loss(errors)

    loss, gradients = value_and_gradients(forward, model)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


def restore():
    if not KEPT.exists():
        return 0
    with np.load(KEPT) as found:
        for number, variable in enumerate(variables):
            variable.assign(found[f"variable-{number}"])
        kept = json.loads(str(found["kept"]))
    losses.extend(kept["losses"])
    data.load_state_dict(kept["data"])
    return kept["epoch"]


def save(epoch):
    if me.is_chief:
        kept = json.dumps({"losses": losses, "data": data.state_dict(), "epoch": epoch})
        values = {f"variable-{n}": keras.ops.convert_to_numpy(v.value) for n, v in enumerate(variables)}
        half = KEPT.with_name("half.npz")
        np.savez(half, kept=kept, **values)
        half.replace(KEPT)


epoch = restore()
while epoch < EPOCHS:
    for batch in data:
        x, y = keras.ops.cast(batch["x"], "float32"), keras.ops.cast(batch["y"], "float32")
        loss = strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)
        losses.append(float(loss))
        save(epoch)
    epoch += 1
    save(epoch)
result = {"losses": losses, "weights": [w.tolist() for w in model.get_weights()]}
(OUT / f"result-{me.task}.json").write_text(json.dumps(result))
