"""What callbacks remember travels; how they were set up, and what they hold open, stays."""

from __future__ import annotations

import copy
import random
import threading
from collections import deque
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.serialization import decode, encode
from insitu.train.fit import callback_memory
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


def memory_of(*callbacks: Any, is_chief: bool = True) -> CallbackMemory:
    return CallbackMemory(callbacks, keras.callbacks.History(), is_chief)


def test_what_was_kept_is_transferred_until_it_is_released() -> None:
    one, other = Counting(3), Counting(3)
    memory = memory_of(one, other)
    one.count, one.seen = 1, [[0], {"a": [1]}, (2, [3])]
    memory.keep([one])
    memory.keep()
    one.count, other.count = 2, 5
    one.seen[0].append(9)
    one.seen[1]["a"].append(9)
    one.seen[2][1].append(9)
    memory.keep()  # what was kept first stays
    own = memory.transfer()["own"]
    assert own["Counting 0"]["count"] == 1
    assert own["Counting 0"]["seen"] == [[0], {"a": [1]}, (2, [3])]
    assert "count" not in own["Counting 1"], "as it was before the fit"
    assert memory.state_dict()["Counting 0"]["count"] == 2, "a checkpoint is of now"
    memory.release()
    assert memory.transfer()["own"]["Counting 0"]["seen"][0] == [0, 9]


def test_who_is_not_about_to_be_called_is_not_kept() -> None:
    one, other = Counting(3), Counting(3)
    memory = memory_of(one, other)
    memory.keep([one])
    one.count = other.count = 1
    own = memory.transfer()["own"]
    assert ("count" in own["Counting 0"], own["Counting 1"]["count"]) == (False, 1)


plain = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=12,
)


def spoil(value: Any) -> None:
    """Change a value in place, on every level."""
    for item in list(value.values() if isinstance(value, dict) else value):
        if isinstance(item, (list, dict)):
            spoil(item)
    value.clear()


@given(st.lists(plain, max_size=5), st.integers(0, 200))
def test_nothing_that_is_kept_changes_in_place(values: list[Any], repeats: int) -> None:
    one = Counting(3)
    memory = memory_of(one)
    one.seen = [*range(repeats), *values]
    expected = copy.deepcopy(one.seen)
    memory.keep()
    spoil(one.seen)
    assert memory.transfer()["own"]["Counting 0"].get("seen", []) == expected


def test_long_and_deep_lists_are_kept() -> None:
    one = Counting(3)
    memory = memory_of(one)
    deep: Any = [1]
    for _ in range(15):
        deep = [deep]
    one.seen = [(step, [0.5]) for step in range(1000)] + [deep]
    memory.keep()
    one.seen[3][1].append(7)
    one.seen.append(8)
    kept = memory.transfer()["own"]["Counting 0"]["seen"]
    assert (len(kept), kept[3], kept[-1]) == (1001, (3, [0.5]), deep)


def test_another_task_gets_what_is_its_own() -> None:
    chief, other = Counting(3), Counting(3)
    source = memory_of(other, is_chief=False)
    chief.count, other.count = 7, 2
    source.take_sent(memory_of(Counting(3)).chief_state_dict() | {"Counting 0": {"count": 7}})
    source.release()
    sent = _sent(source.transfer())
    assert memory_of(Counting(3)).receive(sent)["Counting 0"]["count"] == 7
    replaced = memory_of(Counting(3), is_chief=False)
    assert replaced.receive(sent)["Counting 0"]["count"] == 2
    # It knows of the chief what the one that is lost has known.
    assert replaced.transfer()["of_chief"]["Counting 0"] == {"count": 7}


def test_what_is_given_twice_is_the_same_each_time() -> None:
    """A callback changes it in place meanwhile, where it opens something."""
    one = Counting(3)
    memory, state = memory_of(one), {"Counting 0": {"seen": [1], "large": np.ones(2)}}
    memory.load_state_dict(state)
    one.seen.append(2)
    one.large += 1
    memory.load_state_dict(state)
    assert (one.seen, one.large.tolist()) == ([1], [1.0, 1.0])


def test_the_same_callback_twice_in_a_list_is_one() -> None:
    one, fresh = Counting(3), Counting(3)
    memory = memory_of(one, one)
    memory.keep()
    one.count = 4
    memory.release()
    memory_of(fresh, fresh).load_state_dict(_sent(memory.state_dict()))
    assert fresh.count == 4


class Opening(Counting):
    """Opens something at beginnings, and elsewhere."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.of_epoch = object()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.writer = object()


def test_what_cannot_be_copied_is_named_with_the_event_that_makes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = Opening(3)
    memory = memory_of(one, keras.callbacks.CSVLogger("unused.csv"))
    for event, call in (
        ("on_train_begin", one.on_train_begin),
        ("on_epoch_begin", lambda: one.on_epoch_begin(0)),
        ("on_test_begin", lambda: None),
    ):
        call()
        memory.record_uncopied(event)
    one.on_epoch_end(0)
    state = _sent(memory.state_dict())
    expected = {"file": "on_train_begin", "of_epoch": "on_epoch_begin", "writer": ""}
    assert state["Opening 0"]["#uncopied"] == expected

    other = Opening(3)
    there = memory_of(other)
    there.warn_of_uncopied(state)
    printed = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in printed] == ["Opening.file", "Opening.of_epoch", "Opening.writer"]
    assert "on_epoch_begin is called again" in printed[1] and "nothing makes another" in printed[2]
    assert there.is_made_by("on_train_begin", other, state)
    assert there.is_made_by("on_epoch_begin", other, state)
    assert not there.is_made_by("on_test_begin", other, state)
    assert there.is_made_by("on_test_begin", other, {}), "it hasn't heard of the event"
    assert there.is_made_by("on_test_begin", Counting(3), state)


def test_an_attribute_that_is_made_again_by_another_event_belongs_to_that() -> None:
    one = Opening(3)
    memory = memory_of(one)
    one.on_train_begin()
    memory.record_uncopied("on_train_begin")
    memory.record_uncopied("on_epoch_begin")
    assert memory.state_dict()["Opening 0"]["#uncopied"] == {"file": "on_train_begin"}
    one.file = object()
    memory.record_uncopied("on_test_begin")
    assert memory.state_dict()["Opening 0"]["#uncopied"] == {"file": "on_test_begin"}


class Tracker:
    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.inner: Any = None


class Holding(keras.callbacks.Callback):
    """Keeps what a script makes once, and changes it in place."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.window: deque[int] = deque(maxlen=2)
        self.tracker = Tracker()
        self.tracker.inner = Tracker()
        self.rng = np.random.default_rng(seed)
        self.old_rng = np.random.RandomState(seed)
        self.random = random.Random(seed)
        self.mean = keras.metrics.Mean()
        self.variable = keras.Variable(0.0)
        self.lock = threading.Lock()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.add(batch)
        self.window.append(batch)
        self.tracker.seen.add(batch)
        self.tracker.inner.seen = {batch}
        self.mean.update_state(batch)
        self.variable.assign(batch)
        self.draw()

    def draw(self) -> list[float]:
        return [float(self.rng.random()), float(self.old_rng.rand()), self.random.random()]


def _portray(held: Holding) -> list[Any]:
    tracker = [held.tracker.seen, held.tracker.inner.seen]
    return [held.seen, held.window, tracker, float(held.mean.result()), float(held.variable.value)]


def test_what_a_callback_changes_in_place_is_carried_over(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Holding(1), Holding(2)
    source = CallbackMemory([first], keras.callbacks.History(), True)
    target = CallbackMemory([second], keras.callbacks.History(), True)
    for batch in range(4):
        first.on_train_batch_end(batch)
    source.keep()
    kept = copy.deepcopy(_portray(first))
    sent = _sent(source.state_dict())
    first.on_train_batch_end(4)
    assert _portray(first) != kept
    # What it was like when it was last kept: the batch since is done again.
    again = _sent(source.transfer()["own"])
    held = [second.tracker, second.rng, second.mean]
    target.warn_of_uncopied(again)
    target.load_state_dict(again)
    assert _portray(second) == kept
    assert all(a is b for a, b in zip(held, [second.tracker, second.rng, second.mean], strict=True))
    callback_memory._named_at_start.clear()
    for _ in range(2):
        target.warn_at_start("replace")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "--on-loss" in line]
    assert "--on-loss replace" in line and line.endswith(": Holding.lock")
    target.warn_of_uncopied(again)
    assert "Holding.lock can't be carried over" in (printed := capsys.readouterr().err)
    assert printed.count("carried over") == 1
    target.load_state_dict(sent)
    third = Holding(1)
    for batch in range(4):
        third.on_train_batch_end(batch)
    assert second.draw() == third.draw()
