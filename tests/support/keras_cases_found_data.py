"""Cases of public reports: data, weights of rows, masks, random operations, callbacks, resuming."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
from keras_case_tools import (
    BATCH,
    FIT,
    SEVERAL,
    Batches,
    Counts,
    Limit,
    Run,
    SumOf,
    case,
    compiled,
    dense,
    iterations,
    numbers,
    outcome,
    regress,
    sparse_loss,
    weights,
)
from keras_cases_models import stack
from keras_cases_streams import QUIET, Sequence, fit_on, tf_data

ops = keras.ops

# Weights of rows, masks


@case(strategies=SEVERAL)
def class_weights_of_some_classes(run: Run) -> dict[str, Any]:
    """A class without an entry."""
    x, _ = run.rows()
    with run.scope():
        model = compiled(dense(3), loss=sparse_loss(), metrics=["accuracy"], weighted_metrics=["accuracy"])
    history = model.fit(x, run.labels()[:, None], class_weight={0: 3.0, 1: 1.0, 2: 0.0}, **FIT)
    return outcome(model, history)


@case(strategies=SEVERAL)
def class_weights_and_validation(run: Run) -> dict[str, Any]:
    """Weights of classes are for training; what validates has none."""
    x, _ = run.rows()
    y = run.labels()
    with run.scope():
        model = compiled(dense(3), loss=sparse_loss(), weighted_metrics=["accuracy"])
    history = model.fit(x, y, class_weight={0: 3.0, 1: 1.0, 2: 0.5}, validation_split=0.4, **FIT)
    return outcome(model, history, evaluated=model.evaluate(x, y, verbose=0))


@case(strategies=SEVERAL, backends=["tensorflow"])
def class_weights_of_a_stream(run: Run) -> dict[str, Any]:
    import tensorflow as tf

    x, _ = run.rows()
    data = tf.data.Dataset.from_tensor_slices((x, run.labels())).batch(BATCH)
    with run.scope():
        model = compiled(dense(3), loss=sparse_loss(), weighted_metrics=["accuracy"])
    history = model.fit(data, class_weight={0: 3.0, 1: 1.0, 2: 0.5}, validation_data=data, **QUIET)
    return outcome(model, history)


@case(strategies=SEVERAL)
def batches_without_any_weight(run: Run) -> dict[str, Any]:
    """A whole batch has weights of zero, under each way of dividing by weights."""
    x, y = run.rows()
    weight = np.ones(37, "float32")
    weight[8:16] = 0
    weight[20:24] = 0
    found = {}
    for reduction in ("sum_over_batch_size", "mean_with_sample_weight"):
        with run.scope():
            loss = keras.losses.MeanSquaredError(reduction=reduction)
            model = compiled(dense(), loss=loss, weighted_metrics=["mae"])
        history = model.fit(x, y, sample_weight=weight, validation_data=(x, y, weight), **FIT)
        found[reduction] = outcome(model, history)
    return found


@case(strategies=SEVERAL)
def weights_of_rows_and_of_classes_by_a_split(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    weight = run.rng(2).uniform(0, 3, 37).astype("float32")
    with run.scope():
        model = compiled(dense(), weighted_metrics=["mae"], metrics=[SumOf()])
    return outcome(model, model.fit(x, y, sample_weight=weight, validation_split=0.35, **FIT))


@case(strategies=SEVERAL)
def weights_of_one_output(run: Run) -> dict[str, Any]:
    """Two outputs, of which one has weights of rows."""
    x, v = run.rows()
    with run.scope():
        inputs = keras.Input((4,))
        outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")}
        model = compiled(
            keras.Model(inputs, outputs), loss="mse", weighted_metrics={"a": ["mae"], "b": ["mae"]}
        )
    weight = {"a": np.linspace(0, 1, 37, dtype="f4"), "b": np.ones(37, "f4")}
    return outcome(model, model.fit(x, {"a": v, "b": -v}, sample_weight=weight, **FIT))


def texts(run: Run, count: int = 21) -> tuple[np.ndarray, np.ndarray]:
    """Rows of words, of which the first ones of the batch are much shorter than the last ones."""
    x = run.rng().integers(1, 6, (count, 5))
    for row in range(count):
        x[row, 1 + row % 5 :] = 0
    return x, (x % 3)[..., None].astype("float32")


def tagger(outputs: int = 1) -> Any:
    layers = keras.layers
    return stack(
        (5,),
        layers.Embedding(6, 4, mask_zero=True),
        layers.LSTM(3, return_sequences=True),
        layers.Dense(outputs),
    )


@case(strategies=SEVERAL)
def mask_in_metrics_and_weights(run: Run) -> dict[str, Any]:
    """Steps that are masked count in no metric, weighted or not."""
    x, y = texts(run)
    weight = run.rng(2).uniform(0.5, 2, (21, 5)).astype("float32")
    with run.scope():
        model = compiled(tagger(), metrics=["mae"], weighted_metrics=["mse"])
    history = model.fit(x, y, sample_weight=weight, validation_data=(x, y), **FIT)
    return outcome(model, history, evaluated=model.evaluate(x, y, batch_size=BATCH, verbose=0))


@case(strategies=SEVERAL)
def mask_with_labels_of_classes(run: Run) -> dict[str, Any]:
    x, y = texts(run)
    with run.scope():
        model = compiled(tagger(3), loss=sparse_loss(), metrics=["accuracy"])
    return outcome(model, model.fit(x, y[..., 0].astype("int32"), **FIT))


@case(strategies=SEVERAL)
def rows_without_any_word(run: Run) -> dict[str, Any]:
    """A replica whose rows are all masked."""
    x, y = texts(run, 24)
    x[:4] = 0
    x[12:16] = 0
    with run.scope():
        model = compiled(tagger(), metrics=["mae"])
    return outcome(model, model.fit(x, y, **FIT))


@case(strategies=SEVERAL)
def loss_masked_by_hand(run: Run) -> dict[str, Any]:
    """The loss divides by the number of words itself."""
    x, y = texts(run)

    def loss(y: Any, y_pred: Any) -> Any:
        known = ops.cast(y > 0, "float32")
        return ops.sum(ops.square(y - y_pred) * known) / ops.sum(known)

    layers = keras.layers
    with run.scope():
        model = compiled(stack((5,), layers.Embedding(6, 4), layers.Dense(1)), loss=loss)
    return outcome(model, model.fit(x, y, **FIT))


@case(strategies=SEVERAL)
def padding_with_accumulation(run: Run) -> dict[str, Any]:
    x, y = texts(run)
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    with run.scope():
        model = compiled(tagger(), optimizer)
    return outcome(model, model.fit(x, y, **{**FIT, "batch_size": 4}))


# Data


@case(strategies=SEVERAL)
def labels_of_other_types(run: Run) -> dict[str, Any]:
    x, _ = run.rows()
    found = {}
    for kind in ("uint8", "int64", "float64", "bool"):
        y = (run.labels() > 0).astype(kind)
        with run.scope():
            model = compiled(dense(), keras.optimizers.SGD(0.05), "binary_crossentropy", metrics=["accuracy"])
        model.set_weights([np.full_like(w, 0.1) for w in model.get_weights()])
        found[kind] = outcome(model, model.fit(x, y, **FIT))
    return found


@case(strategies=SEVERAL)
def inputs_of_half_precision(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        model = compiled(dense())
    return outcome(model, model.fit(x.astype("float16"), y, **FIT))


@case(strategies=SEVERAL)
def validation_split_of_dictionaries(run: Run) -> dict[str, Any]:
    x, y = run.rows(41)
    with run.scope():
        a, b = keras.Input((2,), name="a"), keras.Input((2,), name="b")
        model = compiled(
            keras.Model({"a": a, "b": b}, keras.layers.Dense(1)(keras.layers.Concatenate()([a, b]))),
            metrics=[SumOf()],
        )
    return outcome(model, model.fit({"a": x[:, :2], "b": x[:, 2:]}, y, validation_split=0.3, **FIT))


@case(strategies=SEVERAL, free=["weights"])
def validation_split_of_shuffled_arrays(run: Run) -> dict[str, Any]:
    """The last rows validate, whatever the order of the others."""
    x, y = run.rows(41)
    with run.scope():
        model = compiled(dense(), keras.optimizers.SGD(0.0), metrics=[SumOf()])
    return outcome(model, model.fit(x, y, validation_split=0.3, **{**FIT, "shuffle": True}))


@case(strategies=SEVERAL)
def rows_of_numpy_in_other_orders(run: Run) -> dict[str, Any]:
    """Views: turned columns, every second row, the order of Fortran, bytes of the other order."""
    x, y = run.rows(37)
    wide = np.repeat(x, 2, axis=0)[::2]
    with run.scope():
        model = compiled(dense())
    history = model.fit(np.asfortranarray(wide)[:, ::-1], y.astype(">f4"), **FIT)
    return outcome(model, history, predicted=model.predict(wide[::-1], verbose=0))


@case(strategies=SEVERAL, backends=["tensorflow"])
def tf_data_whose_last_batch_is_dropped(run: Run) -> dict[str, Any]:
    data = tf_data(run).batch(BATCH, drop_remainder=True)
    return fit_on(run, data, fit={"validation_data": tf_data(run, 19).batch(4, drop_remainder=True)})


@case(strategies=SEVERAL, backends=["tensorflow"])
def tf_data_over_the_epochs_end(run: Run) -> dict[str, Any]:
    """Repeated before it is cut into batches: a batch has rows of two epochs."""
    return fit_on(run, tf_data(run).repeat(3).batch(BATCH), fit={"epochs": 1})


@case(strategies=SEVERAL, backends=["tensorflow"])
def tf_data_by_lengths(run: Run) -> dict[str, Any]:
    """Batches of texts of like length, of several sizes."""
    import tensorflow as tf

    x, _ = texts(run, 36)
    lengths = (x > 0).sum(1)
    words = tf.ragged.constant([row[:n].tolist() for row, n in zip(x, lengths, strict=True)])
    data = tf.data.Dataset.from_tensor_slices((words, run.rows(36)[1]))
    data = data.map(lambda a, b: (tf.cast(a, tf.float32), b))
    data = data.bucket_by_sequence_length(lambda a, b: tf.shape(a)[0], [3, 5], [7, 5, 3])
    with run.scope():
        layers = keras.layers
        model = compiled(
            stack((None,), layers.Reshape((-1, 1)), layers.GlobalAveragePooling1D(), layers.Dense(1))
        )
    return {**outcome(model, model.fit(data, **QUIET, callbacks=[Limit()])), "iterations": 0}


@case(strategies=SEVERAL, backends=["tensorflow"])
def tf_data_of_padded_batches(run: Run) -> dict[str, Any]:
    import tensorflow as tf

    x, _ = texts(run, 36)
    lengths = (x > 0).sum(1)

    def rows() -> Any:
        for row, n, y in zip(x, lengths, run.rows(36)[1], strict=True):
            yield row[:n], y

    signature = (tf.TensorSpec((None,), tf.int64), tf.TensorSpec((1,), tf.float32))
    data = tf.data.Dataset.from_generator(rows, output_signature=signature).padded_batch(BATCH)
    with run.scope():
        layers = keras.layers
        model = compiled(
            stack((None,), layers.Embedding(6, 4, mask_zero=True), layers.LSTM(3), layers.Dense(1))
        )
    return {**outcome(model, model.fit(data, **QUIET, callbacks=[Limit()])), "iterations": 0}


@case(strategies=SEVERAL, backends=["tensorflow"])
def tf_data_mixed_of_several(run: Run) -> dict[str, Any]:
    """Rows drawn from two sources with a seed, of unknown length."""
    import tensorflow as tf

    a, b = tf_data(run, 20), tf_data(run, 37).skip(20)
    data = tf.data.Dataset.sample_from_datasets([a, b], [0.5, 0.5], seed=4).batch(BATCH)
    return {**fit_on(run, data), "iterations": 0}


@case(strategies=SEVERAL, backends=["tensorflow"])
def tf_data_shuffled_once(run: Run) -> dict[str, Any]:
    """The same order in each epoch, of which the last rows are held out."""
    data = tf_data(run).shuffle(37, seed=2, reshuffle_each_iteration=False)
    held_out = data.skip(28).batch(4)
    return fit_on(run, data.take(28).batch(BATCH), fit={"validation_data": held_out})


@case(strategies=SEVERAL, backends=["tensorflow"])
def tf_data_cached_after_a_shuffle(run: Run) -> dict[str, Any]:
    return fit_on(run, tf_data(run).shuffle(37, seed=2).cache().batch(BATCH), fit={"epochs": 3})


@case(strategies=SEVERAL, backends=["tensorflow"])
def tf_data_of_groups_and_windows(run: Run) -> dict[str, Any]:
    """Time series: windows over rows, each a row of the batch."""
    x, y = run.rows(40)
    data = keras.utils.timeseries_dataset_from_array(x, y[5:], sequence_length=5, batch_size=BATCH)
    with run.scope():
        model = compiled(stack((5, 4), keras.layers.LSTM(3), keras.layers.Dense(1)), metrics=[SumOf()])
    return outcome(model, model.fit(data, **QUIET))


def random_course(run: Run, data: Any, epochs: int = 3) -> list[float]:
    """The loss of each epoch of a model that learns nothing: it says which numbers were drawn."""
    with run.scope():
        model = compiled(dense(), keras.optimizers.SGD(0.0))
    model.set_weights([np.full_like(w, 0.1) for w in model.get_weights()])
    return model.fit(data, epochs=epochs, verbose=0).history["loss"]


def draws_differ(course: list[float]) -> bool:
    return len({round(value, 5) for value in course}) == len(course)


@case(strategies=SEVERAL, backends=["tensorflow"])
def random_rows_of_a_dataset(run: Run) -> dict[str, Any]:
    """`Dataset.random` with a seed, and noise by a number of the row and a stateless operation."""
    import tensorflow as tf

    noise = tf.data.Dataset.random(seed=5).map(
        lambda s: tf.random.stateless_normal((4,), tf.stack([s, 0])),
    )
    data = tf.data.Dataset.zip((tf_data(run), noise)).map(lambda row, n: (row[0] + n, row[1])).batch(BATCH)
    return {"course": random_course(run, data)}


@case(strategies=SEVERAL, backends=["tensorflow"])
def random_rows_by_a_counter(run: Run) -> dict[str, Any]:
    import tensorflow as tf

    numbered = tf_data(run).enumerate()
    data = numbered.map(
        lambda n, row: (row[0] + tf.random.stateless_normal((4,), tf.stack([n, 3])), row[1]),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    return {"course": random_course(run, data.batch(BATCH))}


@case(strategies=SEVERAL, backends=["tensorflow"])
def random_layer_in_a_map(run: Run) -> dict[str, Any]:
    """A layer with a seed augments in a map, behind a cache: other numbers in each epoch."""
    import tensorflow as tf

    noise = keras.layers.GaussianNoise(0.5, seed=3)
    data = tf_data(run).cache().batch(BATCH).map(lambda x, y: (noise(x, training=True), y))
    data = data.prefetch(tf.data.AUTOTUNE)
    return {"differ": draws_differ(random_course(run, data))}


@case(strategies=SEVERAL, backends=["tensorflow"])
def random_numbers_of_numpy_in_a_map(run: Run) -> dict[str, Any]:
    """Each process draws its own numbers by NumPy, with the same seed."""
    import tensorflow as tf

    rng = np.random.default_rng(3)

    def noisy(x: Any) -> Any:
        return (x + rng.normal(size=x.shape)).astype("float32")

    def augment(x: Any, y: Any) -> Any:
        drawn = tf.numpy_function(noisy, [x], tf.float32)
        drawn.set_shape(x.shape)
        return drawn, y

    return {"differ": draws_differ(random_course(run, tf_data(run).map(augment).batch(BATCH)))}


@case(strategies=SEVERAL)
def random_numbers_of_a_sequence(run: Run) -> dict[str, Any]:
    """A PyDataset that augments by NumPy, with a seed of its own."""

    class Noisy(Sequence):
        rng = np.random.default_rng(3)

        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return (x + self.rng.normal(size=x.shape)).astype("float32"), y

    with run.scope():
        model = compiled(dense(), keras.optimizers.SGD(0.0))
    model.evaluate(*run.rows(8), verbose=0)
    course = model.fit(Noisy(run.rows()), epochs=3, shuffle=False, verbose=0).history["loss"]
    return {"differ": draws_differ(course)}


# Callbacks, early stopping, resuming


@case(strategies=SEVERAL)
def early_stopping_that_never_stops(run: Run) -> dict[str, Any]:
    """The best weights come back at the end, also where all epochs were trained."""
    stop = keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True)
    options = {"callbacks": [stop], "epochs": 5, "validation_data": run.rows(20)}
    model, history = regress(run, options, optimizer=keras.optimizers.SGD(0.3, momentum=0.9))
    return outcome(model, history, best=stop.best_epoch, value=float(stop.best))


@case(strategies=SEVERAL)
def early_stopping_from_an_epoch_with_a_baseline(run: Run) -> dict[str, Any]:
    stop = keras.callbacks.EarlyStopping(
        "mae", mode="min", patience=1, start_from_epoch=3, baseline=0.01, restore_best_weights=True
    )
    options = {"callbacks": [stop], "epochs": 9, "initial_epoch": 1}
    model, history = regress(run, options, metrics=["mae"])
    return outcome(model, history, stopped=stop.stopped_epoch, best=stop.best_epoch)


@case(strategies=SEVERAL)
def early_stopping_used_twice(run: Run) -> dict[str, Any]:
    """One callback in two fits: in the second it begins at its start."""
    x, y = run.rows()
    stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=0.02)
    model, first = regress(run, {"callbacks": [stop], "epochs": 9})
    second = model.fit(x, -y, **{**FIT, "epochs": 20, "initial_epoch": len(first.epoch)}, callbacks=[stop])
    return outcome(model, second, first=first.history, stopped=stop.stopped_epoch)


@case(strategies=SEVERAL)
def plateau_with_a_rest(run: Run) -> dict[str, Any]:
    """A plateau with cooldown and a smallest rate, beside a stop on the same number."""
    plateau = keras.callbacks.ReduceLROnPlateau(
        "val_mae", factor=0.5, patience=1, cooldown=1, min_lr=0.03, min_delta=0.3, mode="min"
    )
    stop = keras.callbacks.EarlyStopping("val_mae", patience=4, min_delta=0.2)
    options = {"callbacks": [plateau, stop], "epochs": 9, "validation_data": run.rows(20)}
    model, history = regress(run, options, metrics=["mae"])
    return outcome(model, history, stopped=stop.stopped_epoch)


@case(strategies=SEVERAL)
def checkpoint_with_a_threshold(run: Run) -> dict[str, Any]:
    """Only what is better than a value of before is written."""
    path = run.folder / "best.weights.h5"
    kinds = keras.callbacks
    first = kinds.ModelCheckpoint(
        str(path), "loss", save_best_only=True, save_weights_only=True, initial_value_threshold=0.15
    )
    model, history = regress(run, {"callbacks": [first], "epochs": 6})
    chief = path.exists() if run.index == 0 else None
    return {**outcome(model, history, best=float(first.best)), "chief": chief}


@case(strategies=SEVERAL)
def checkpoint_by_a_metric_in_a_name(run: Run) -> dict[str, Any]:
    """Files named by numbers of the logs."""
    path = str(run.folder / "{epoch:02d}-{val_mae:.3f}.weights.h5")
    callback = keras.callbacks.ModelCheckpoint(path, "val_mae", mode="min", save_weights_only=True)
    options = {"callbacks": [callback], "epochs": 3, "validation_data": run.rows(20)}
    model, history = regress(run, options, metrics=["mae"])
    chief = sorted(each.name for each in run.folder.glob("*.h5")) if run.index == 0 else []
    return {**outcome(model, history), "chief": chief}


@case(strategies=SEVERAL)
def csv_of_two_fits(run: Run) -> dict[str, Any]:
    """The log of a second fit is appended, with the epochs that went before."""
    path, (x, y) = run.folder / "log.csv", run.rows()
    model, first = regress(run, {"callbacks": [keras.callbacks.CSVLogger(str(path))]})
    log = keras.callbacks.CSVLogger(str(path), append=True, separator=";")
    second = model.fit(x, y, **{**FIT, "epochs": 4, "initial_epoch": 2}, callbacks=[log])
    chief = path.read_text().split() if run.index == 0 else []
    chief = [
        [round(float(v), 3) if v[0].isdigit() else v for v in row.replace(";", ",").split(",")]
        for row in chief
    ]
    return {**outcome(model, second, first=first.history), "chief": chief}


@case(strategies=SEVERAL)
def backup_by_batches_and_a_changed_rate(run: Run) -> dict[str, Any]:
    """Keras' backup every third batch. A fit that fails continues at the beginning of its epoch."""

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if iterations(self.model) == 8:
                raise RuntimeError("stopped on purpose")

    x, y = run.rows(40)
    kinds = keras.callbacks
    rate = kinds.LearningRateScheduler(lambda epoch, rate: 0.1 / (1 + epoch))
    folder = str(run.folder / "backup")
    with run.scope():
        model = compiled(dense(), keras.optimizers.SGD(0.1))
    stopped = False
    try:
        model.fit(x, y, callbacks=[rate, kinds.BackupAndRestore(folder), Fail()], **{**FIT, "epochs": 3})
    except RuntimeError:
        stopped = True
    counts = Counts()
    history = model.fit(
        x, y, callbacks=[rate, kinds.BackupAndRestore(folder), counts], **{**FIT, "epochs": 3}
    )
    return outcome(model, history, stopped=stopped, **counts.told())


@case(strategies=SEVERAL)
def list_of_callbacks_made_by_the_script(run: Run) -> dict[str, Any]:
    """A CallbackList of Keras, given to fit."""
    x, y = run.rows()
    with run.scope():
        model = compiled(dense())
    counts = Counts()
    callbacks = keras.callbacks.CallbackList(
        [counts], add_history=True, model=model, epochs=2, verbose=0, steps=5
    )
    history = model.fit(x, y, callbacks=callbacks, **FIT)
    return outcome(model, history, **counts.told())


@case(strategies=SEVERAL)
def callbacks_by_their_old_names(run: Run) -> dict[str, Any]:
    """`on_batch_begin`, `on_batch_end`, and the number of the batch over all epochs."""
    seen: list[Any] = []

    class Old(keras.callbacks.Callback):
        def on_batch_begin(self, batch: int, logs: Any = None) -> None:
            seen.append(int(batch))

        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(float(logs["loss"]))

    model, history = regress(run, {"callbacks": [Old()]})
    return outcome(model, history, seen=seen)


@case(strategies=SEVERAL)
def error_in_a_callback_and_another_fit(run: Run) -> dict[str, Any]:
    """A fit that a callback ends by an error has done its steps; the next one continues."""

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                raise ValueError("ended on purpose")

    x, y = run.rows()
    with run.scope():
        model = compiled(dense(), keras.optimizers.Adam(0.01), metrics=["mae"])
    ended = 0
    for _ in range(2):
        try:
            model.fit(x, y, callbacks=[Fail()], **FIT)
        except ValueError:
            ended += 1
    history = model.fit(x, y, **FIT)
    return outcome(model, history, ended=ended)


@case(strategies=SEVERAL)
def callback_that_trains_another_model(run: Run) -> dict[str, Any]:
    """At the end of each epoch a probe is trained on what the model gives."""
    x, y = run.rows(20)
    with run.scope():
        probe = compiled(stack((1,), keras.layers.Dense(1)), keras.optimizers.SGD(0.05))
    seen: list[float] = []

    class Probe(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            given = self.model.predict(x, verbose=0)
            seen.append(probe.fit(given, y, **FIT).history["loss"][-1])

    model, history = regress(run, {"callbacks": [Probe()], "epochs": 3})
    return outcome(model, history, seen=seen, probe=weights(probe))


@case(strategies=SEVERAL)
def callback_that_saves_each_epoch(run: Run) -> dict[str, Any]:
    """A callback of the user's own saves the model and its state as JSON, and reads both back."""
    seen: list[Any] = []

    class Save(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            folder = run.folder / f"{run.index}-{epoch}"
            folder.mkdir()
            self.model.save(folder / "model.keras")
            (folder / "state.json").write_text(
                json.dumps({"epoch": epoch, **{k: float(v) for k, v in logs.items()}})
            )
            loaded = keras.models.load_model(folder / "model.keras")
            x, y = run.rows(20)
            seen.append((json.loads((folder / "state.json").read_text()), loaded.evaluate(x, y, verbose=0)))

    model, history = regress(run, {"callbacks": [Save()]})
    return outcome(model, history, seen=seen)


@case(strategies=SEVERAL)
def goes_on_from_a_file_at_an_epoch(run: Run) -> dict[str, Any]:
    """Saved after two epochs, loaded, and trained from epoch 2 to 4 with a schedule and a stop."""
    x, y = run.rows()
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 20)
    model, first = regress(run, optimizer=keras.optimizers.SGD(schedule, momentum=0.9), metrics=["mae"])
    path = run.folder / f"model-{run.index}.keras"
    model.save(path)
    with run.scope():
        loaded = keras.models.load_model(path)
    counts = Counts()
    options = {**FIT, "epochs": 4, "initial_epoch": 2}
    second = loaded.fit(x, y, callbacks=[counts], validation_data=(x, y), **options)
    return outcome(
        loaded, second, first=first.history, **counts.told(), rate=numbers(loaded.optimizer.learning_rate)
    )


@case(strategies=SEVERAL, apart=["iterations"])
def generator_that_ends_in_the_middle(run: Run) -> dict[str, Any]:
    """Too few batches for the epochs that were asked for: Keras ends with a warning, and on TensorFlow counts
    one update too many."""
    counts = Counts()
    with run.scope():
        model = compiled(dense(), metrics=[SumOf()])
    data = Batches(run.rows(37)).once()
    history = model.fit(data, steps_per_epoch=2, epochs=4, verbose=0, callbacks=[counts, Limit()])
    return outcome(model, history, **counts.told())
