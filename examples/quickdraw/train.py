"""Learns ten classes of Quick, Draw! sketches. FOLDER holds their bitmaps, one `.npy` file per class:

    insitu import --label-from-filename --split train=0.9,test=0.1 quickdraw FOLDER
    insitu start --workers 2 quickdraw/train examples/quickdraw train.py

With `--mode async`, `sync` or `bounded` the model is on parameter servers:

    insitu start --workers 2 --ps 2 quickdraw/train examples/quickdraw train.py --mode async

With `--mode async --epochs 4`, two workers, two servers and TensorFlow, the accuracy on held-out rows was
0.905.
"""

import argparse
import hashlib

import keras

import insitu

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=("async", "sync", "bounded"))
parser.add_argument("--epochs", type=int, default=8)
chosen = parser.parse_args()
EPOCHS, BATCH = chosen.epochs, 128

if chosen.mode:
    strategy = insitu.ParameterServerStrategy(mode=chosen.mode)
else:
    strategy = insitu.MultiWorkerMirroredStrategy()
me = insitu.context()
train = insitu.dataset("quickdraw/train").shuffle().batch(BATCH)
# With parameter servers each worker evaluates alone, so it reads all rows. Otherwise workers share the rows.
everything = {"shards": range(me.num_shards)} if chosen.mode else {}
held_out = insitu.dataset("quickdraw/test", **everything).batch(1024)

layers = keras.layers
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((784,)),
            layers.Rescaling(1 / 255),
            layers.Reshape((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(128, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    # In modes async and bounded the servers make one update for each shard's gradient.
    updates = train.num_steps * (me.num_shards if chosen.mode in ("async", "bounded") else 1)
    rate = keras.optimizers.schedules.CosineDecay(2e-3, EPOCHS * updates)
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])

model.fit(
    train,
    epochs=EPOCHS,
    validation_data=None if chosen.mode else held_out,
    callbacks=[insitu.BackupAndRestore(save_freq=50)],
)
if me.is_chief:
    if chosen.mode:
        print(f"held-out accuracy {model.evaluate(held_out, verbose=0)[1]:.3f}")
    model.save("quickdraw.keras")
    bits = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
    print(f"weights {bits[:16]}")
