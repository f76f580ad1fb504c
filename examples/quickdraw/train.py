"""Ten classes of Quick, Draw! sketches, as `insitu import --label-from-filename --split ...` leaves them."""

import hashlib

import keras

import insitu

EPOCHS, BATCH = 8, 128

strategy = insitu.MultiWorkerMirroredStrategy()
train = insitu.dataset("quickdraw/train").shuffle().batch(BATCH)
held_out = insitu.dataset("quickdraw/test").batch(1024)

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
    rate = keras.optimizers.schedules.CosineDecay(2e-3, EPOCHS * train.num_steps)
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])

model.fit(
    train,
    epochs=EPOCHS,
    validation_data=held_out,
    callbacks=[insitu.BackupAndRestore(save_freq=50)],
)
if insitu.context().is_chief:
    model.save("quickdraw.keras")
    bits = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
    print(f"weights {bits[:16]}")
