"""Cases: callbacks."""

from __future__ import annotations

import csv
from typing import Any

import keras
import numpy as np
from keras_case_tools import (
    FIT,
    Counts,
    Run,
    case,
    compiled,
    dense,
    iterations,
    numbers,
    outcome,
    regress,
    weights,
)

# Callbacks


@case()
def callbacks_hear_all_events(run: Run) -> dict[str, Any]:
    counts = Counts()
    model, history = regress(run, {"callbacks": [counts], "validation_data": run.rows(20)})
    params = {name: value for name, value in counts.params.items() if name != "verbose"}
    return outcome(model, history, **counts.told(), params=params)


@case()
def callback_on_batches(run: Run) -> dict[str, Any]:
    seen: list[Any] = []

    def end(batch: int, logs: Any) -> None:
        seen.append((int(batch), {name: float(value) for name, value in logs.items()}))

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    model, history = regress(run, {"callbacks": [callback]}, metrics=["mae"])
    return outcome(model, history, seen=seen)


@case()
def callback_reads_weights_between_steps(run: Run) -> dict[str, Any]:
    seen: list[Any] = []

    class Reader(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append((float(np.sum(self.model.get_weights()[0])), iterations(self.model)))

    model, history = regress(run, {"callbacks": [Reader()]})
    return outcome(model, history, seen=seen)


@case()
def callback_sets_weights_and_rate(run: Run) -> dict[str, Any]:
    class Meddler(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.model.optimizer.learning_rate = 0.02
                self.model.layers[-1].bias.assign([0.5])

    model, history = regress(run, {"callbacks": [Meddler()]})
    return outcome(model, history)


@case()
def callback_evaluates_and_predicts(run: Run) -> dict[str, Any]:
    x, y = run.rows(20)
    seen: list[Any] = []

    class Looks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append((self.model.evaluate(x, y, verbose=0), self.model.predict(x[:5], verbose=0)))

    model, history = regress(run, {"callbacks": [Looks()]}, metrics=["mae"])
    return outcome(model, history, seen=seen)


@case()
def stop_in_the_middle_of_an_epoch(run: Run) -> dict[str, Any]:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                self.model.stop_training = True

    counts = Counts()
    model, history = regress(run, {"callbacks": [Stop(), counts], "epochs": 3})
    return outcome(model, history, **counts.told())


@case()
def stop_at_the_end_of_an_epoch(run: Run) -> dict[str, Any]:
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 1

    model, history = regress(run, {"callbacks": [Stop()], "epochs": 5})
    again = model.fit(*run.rows(), **FIT)
    return outcome(model, history, again=again.history)


@case()
def early_stopping(run: Run) -> dict[str, Any]:
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, min_delta=0.1, restore_best_weights=True)
    options = {"callbacks": [stop], "epochs": 12, "validation_data": run.rows(20)}
    model, history = regress(run, options)
    return outcome(model, history, stopped=stop.stopped_epoch, best=stop.best_epoch)


@case()
def learning_rate_scheduler(run: Run) -> dict[str, Any]:
    callback = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5 if epoch else rate)
    model, history = regress(run, {"callbacks": [callback], "epochs": 4})
    return outcome(model, history, rate=numbers(model.optimizer.learning_rate))


@case()
def learning_rate_schedule(run: Run) -> dict[str, Any]:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.7, staircase=True)
    model, history = regress(run, {"epochs": 3}, optimizer=keras.optimizers.SGD(schedule))
    return outcome(model, history, rate=numbers(model.optimizer.learning_rate))


@case()
def reduce_rate_on_plateau(run: Run) -> dict[str, Any]:
    callback = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.3, patience=1, min_delta=0.5)
    options = {"callbacks": [callback], "epochs": 6, "validation_data": run.rows(20)}
    model, history = regress(run, options)
    return outcome(model, history, rate=numbers(model.optimizer.learning_rate))


@case()
def model_checkpoint(run: Run) -> dict[str, Any]:
    path = run.folder / "best.weights.h5"
    callback = keras.callbacks.ModelCheckpoint(
        str(path), "val_loss", save_best_only=True, save_weights_only=True
    )
    options = {"callbacks": [callback], "epochs": 3, "validation_data": run.rows(20)}
    model, history = regress(run, options)
    chief: dict[str, Any] = {}
    if run.index == 0:
        copy = dense()
        copy.load_weights(path)
        chief = weights(copy)
    return {**outcome(model, history), "chief": chief}


@case()
def model_checkpoint_by_batches(run: Run) -> dict[str, Any]:
    path = str(run.folder / "{epoch}-{batch}.keras")
    callback = keras.callbacks.ModelCheckpoint(path, save_freq=4)
    model, history = regress(run, {"callbacks": [callback], "epochs": 2})
    files = {each.name: weights(keras.models.load_model(each)) for each in run.folder.glob("*.keras")}
    return {**outcome(model, history), "chief": files}


@case()
def csv_logger(run: Run) -> dict[str, Any]:
    path = run.folder / "log.csv"
    options = {"callbacks": [keras.callbacks.CSVLogger(str(path))], "validation_data": run.rows(20)}
    model, history = regress(run, options, metrics=["mae"])
    chief: list[Any] = []
    if run.index == 0:
        with path.open() as file:
            chief = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    return {**outcome(model, history), "chief": chief}


@case()
def terminate_on_nan(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    x[20] = np.nan
    counts = Counts()
    with run.scope():
        model = compiled(dense())
    history = model.fit(x, y, callbacks=[keras.callbacks.TerminateOnNaN(), counts], **{**FIT, "epochs": 3})
    return {"iterations": iterations(model), "epochs": history.epoch, **counts.told()}


@case()
def swap_averaged_weights(run: Run) -> dict[str, Any]:
    callback = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8)
    options = {"callbacks": [callback], "epochs": 3, "validation_data": run.rows(20)}
    model, history = regress(run, options, optimizer=optimizer)
    return outcome(model, history)


@case()
def logs_changed_by_a_callback(run: Run) -> dict[str, Any]:
    class Adds(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["twice"] = 2 * logs["loss"]

    model, history = regress(run, {"callbacks": [Adds()]})
    return outcome(model, history)


@case()
def backup_and_restore_of_keras(run: Run) -> dict[str, Any]:
    """A training that fails in its third epoch continues from there in a second fit."""

    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise RuntimeError("stopped on purpose")

    x, y = run.rows()
    backup = keras.callbacks.BackupAndRestore(str(run.folder / "backup"))
    with run.scope():
        model = compiled(dense())
    stopped = False
    try:
        model.fit(x, y, callbacks=[backup, Fail()], **{**FIT, "epochs": 4})
    except RuntimeError:
        stopped = True
    counts = Counts()
    backup = keras.callbacks.BackupAndRestore(str(run.folder / "backup"))
    history = model.fit(x, y, callbacks=[backup, counts], **{**FIT, "epochs": 4})
    return outcome(model, history, stopped=stopped, **counts.told())
