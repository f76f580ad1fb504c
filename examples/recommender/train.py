"""Learns who clicks on what. The tables of users and items have no fixed size: each new key gets a row.

python examples/recommender/make_clicks.py clicks.npz
insitu import --split train=0.9,test=0.1 clicks clicks.npz
insitu start --workers 2 --ps 2 clicks/train examples/recommender train.py
"""

import keras

import insitu

strategy = insitu.ParameterServerStrategy(mode="async", table_optimizer=keras.optimizers.Adagrad(0.2))
me = insitu.context()
train = insitu.dataset("clicks/train").shuffle().batch(2048)
held_out = insitu.dataset("clicks/test", shards=range(me.num_shards)).batch(4096)

with strategy.scope():
    user = keras.Input((), dtype="int64", name="user")
    item = keras.Input((), dtype="int64", name="item")
    rows = [
        insitu.layers.Embedding(16, keras.initializers.RandomNormal(stddev=0.1), name=f"{key.name}_taste")(
            key
        )
        for key in (user, item)
    ]
    agreement = keras.layers.Multiply()(rows)
    hidden = keras.layers.Dense(32, activation="relu")(keras.layers.Concatenate()([*rows, agreement]))
    click = keras.layers.Dense(1, activation="sigmoid")(hidden)
    model = keras.Model({"user": user, "item": item}, click)
    model.compile(
        keras.optimizers.Adam(0.002), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")]
    )

model.fit(train, epochs=6, verbose=2)
if me.is_chief:
    loss, auc = model.evaluate(held_out, verbose=0)
    print(f"held-out AUC {auc:.3f}")
    model.save("recommender.keras")
    insitu.layers.export(model).export("served", verbose=False)
    if auc < 0.7:
        raise SystemExit(f"The model has not learned enough: AUC {auc:.3f}, at least 0.7 expected")
