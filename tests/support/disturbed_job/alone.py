"""A script that knows nothing of insitu, so its chief is a task of its own. Each task trains for itself, and
the chief waits for the others: the job ends with it."""

import json
import os
import time
from pathlib import Path

import keras
import numpy as np

EPOCHS = 4
OUT = Path(os.environ["OUT"])
OUT.mkdir(parents=True, exist_ok=True)
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]
name = f"{task['type']}-{task['index']}"
KEPT = OUT.with_name(f"{name}.npz")
rng = np.random.default_rng(task["index"])
x = rng.normal(size=(24, 6)).astype("float32")
y = x.sum(1, keepdims=True)
keras.utils.set_random_seed(3)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.02), "mse")
model.optimizer.build(model.trainable_variables)
variables = [*model.variables, *model.optimizer.variables]
losses = []
if KEPT.exists():
    with np.load(KEPT) as found:
        losses = found["losses"].tolist()
        for number, variable in enumerate(variables):
            variable.assign(found[f"variable-{number}"])
while len(losses) < EPOCHS:
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    model.save(OUT / f"{name}-{len(losses)}.keras")
    losses += history["loss"]
    values = {f"variable-{n}": keras.ops.convert_to_numpy(v.value) for n, v in enumerate(variables)}
    half = KEPT.with_name(f"half-{name}.npz")
    np.savez(half, losses=losses, **values)
    half.replace(KEPT)
(OUT / f"{name}.json").write_text(json.dumps(losses))
others = [OUT / f"worker-{index}.json" for index in range(len(config["cluster"]["worker"]))]
while task["type"] == "chief" and not all(path.exists() for path in others):
    time.sleep(0.05)
