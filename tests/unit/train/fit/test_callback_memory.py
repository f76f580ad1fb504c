"""What callbacks remember travels; how they were set up, and what they hold open, stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from insitu.train.collectives.serialization import decode, encode
from insitu.train.fit.callback_memory import CallbackMemory, is_memory


class Counting(keras.callbacks.Callback):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.count = 0
        self.seen: list[Any] = []
        self.file: Any = None
        self.large = np.zeros(1 << 18)

    def on_train_begin(self, logs: Any = None) -> None:
        self.count, self.file = 0, object()


def test_what_changed_is_carried_over_and_the_rest_stays() -> None:
    first, second = Counting(3), Counting(5)
    source = CallbackMemory([first], keras.callbacks.History(), True)
    target = CallbackMemory([second], keras.callbacks.History(), True)
    first.on_train_begin()
    second.on_train_begin()
    first.seen.append(("a", np.float32(2.5), [1, None]))
    second.count, second.seen = 7, ["mine"]
    opened = second.file
    target.load_state_dict(_sent(source.state_dict()))
    # The limit is the script's, the count was not changed by the source, what is open stays open.
    assert (second.limit, second.count, second.file) == (5, 0, opened)
    assert second.seen == [("a", np.float32(2.5), [1, None])]
    first.large = np.ones(1 << 18)
    target.load_state_dict(_sent(source.state_dict()))
    assert second.large[0] == 1


def _sent(value: Any) -> Any:
    payload = encode(value)
    return decode(payload.tree, payload.arrays)


def test_another_task_keeps_what_the_chief_sent_of_its_writers(tmp_path: Path) -> None:
    saver = keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), save_best_only=True)
    other = CallbackMemory([saver], keras.callbacks.History(), False)
    assert other.take_sent({"ModelCheckpoint 0": {"best": 0.25}}) == []
    other.load_state_dict({"ModelCheckpoint 0": {"best": 0.5}, "Gone 0": {"count": 1}})
    other.release()
    assert other.state_dict()["ModelCheckpoint 0"] == {"best": 0.25}
    assert saver.best is None


class Saving(keras.callbacks.ModelCheckpoint):
    """A callback of the user's own."""

    tries = 0

    def remember(self) -> None:
        self.tries += 1
        self.last = "a"

    @property
    def where(self) -> str:
        return self.filepath


FORGED = {
    "filepath": "/home/somebody/.bashrc",
    "save_best_only": False,
    "on_epoch_end": "no method",
    "_save_model": "no method",
    "where": "/",
    "__class__": "x",
    "params": {},
    "append": True,
}


@pytest.mark.parametrize("kind", [keras.callbacks.ModelCheckpoint, Saving])
def test_a_checkpoint_sets_nothing_but_what_insitu_saves(
    tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It could have a model written over any file of the user's."""
    saver = kind(str(tmp_path / "best.keras"), save_best_only=True)
    memory = CallbackMemory([saver], keras.callbacks.History(), True)
    name = f"{kind.__name__} 0"
    before = dict(vars(saver))
    forged = FORGED if kind is Saving else {n: v for n, v in FORGED.items() if n != "where"}
    memory.load_state_dict({name: forged})
    assert vars(saver) == before and callable(saver.on_epoch_end)
    for attribute in ("filepath", "on_epoch_end"):
        assert f"would set {kind.__name__}.{attribute}, which insitu never saves" in caplog.text
    memory.load_state_dict({name: {"best": 0.25, "_current_epoch": 3, "tries": 4, "last": "a"}})
    assert (saver.best, saver._current_epoch, saver.tries, saver.last) == (0.25, 3, 4, "a")


def test_what_is_open_is_never_replaced(tmp_path: Path) -> None:
    logger = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    memory = CallbackMemory([logger], keras.callbacks.History(), True)
    logger.on_train_begin()
    opened = logger.csv_file
    memory.load_state_dict({"CSVLogger 0": {"csv_file": "/etc/passwd", "filename": "/etc/passwd"}})
    assert logger.csv_file is opened and logger.filename.endswith("log.csv")
    logger.on_train_end()


REMEMBERED = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": ("best", "_current_epoch", "_batches_seen_since_last_saving", "_last_batch_seen"),
    "History": ("history", "epoch"),
    "CSVLogger": ("keys",),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_train_batch", "_global_test_batch", "_is_tracing"),
}
SET_UP = {
    "EarlyStopping": ("monitor", "patience", "restore_best_weights"),
    "ModelCheckpoint": ("filepath", "save_freq", "save_weights_only"),
    "CSVLogger": ("filename", "sep"),
    "RemoteMonitor": ("root", "path", "headers", "field", "send_as_json"),
    "TensorBoard": ("log_dir", "_log_write_dir", "_train_dir", "_val_dir", "update_freq"),
    "BackupAndRestore": ("backup_dir", "_weights_path"),
    "LearningRateScheduler": ("schedule",),
}


def test_memory_and_set_up_of_keras_own_callbacks_are_told_apart() -> None:
    for names, expected in ((REMEMBERED, True), (SET_UP, False)):
        for kind, attributes in names.items():
            for name in attributes:
                assert is_memory(getattr(keras.callbacks, kind), name) is expected, f"{kind}.{name}"
