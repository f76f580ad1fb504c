"""Files that callbacks append to hold nothing that was written behind a mark."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from insitu.base.serialization import decode, encode
from insitu.train import TensorBoard
from insitu.train.fit.callback_memory import CallbackMemory
from insitu.train.fit.writer_files import appending, begin_files, mark_files, rewind_files, take_over_files

pytest.importorskip("tensorflow")

# Of NumPy, about how Keras reads a variable.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def make_model() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def begun(callback: Any, model: Any) -> Any:
    callback.set_params({"epochs": 4, "steps": 1})
    callback.set_model(model)
    callback.on_train_begin()
    return callback


def in_another_process(marks: dict[str, Any]) -> dict[str, Any]:
    """Marks as they arrive there, from a process of another number."""
    payload = encode(marks)
    return dict(decode(payload.tree, payload.arrays))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lines(path: Path) -> list[str]:
    return path.read_text().split()


def test_rows_of_a_csv_file_behind_a_mark_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    logger = keras.callbacks.CSVLogger(str(path))
    assert mark_files(logger) == {}
    logger.on_train_begin()
    logger.on_epoch_end(0, {"loss": 0.5})
    marks = in_another_process(mark_files(logger))
    logger.on_epoch_end(1, {"loss": 0.25})
    logger.on_train_end()

    other = keras.callbacks.CSVLogger(str(path))
    rewind_files(other, marks)
    with appending([other]) as opened:
        other.on_train_begin()
    assert opened == [other] and not other.append
    other.keys = logger.keys
    other.on_epoch_end(1, {"loss": 0.125})
    other.on_train_end()
    assert lines(path) == ["epoch,loss,val_loss", "0,0.5,NA", "1,0.125,NA"]


def test_a_csv_file_without_rows_gets_its_header(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    logger = keras.callbacks.CSVLogger(str(path))
    logger.on_train_begin()
    marks = mark_files(logger)
    logger.on_epoch_end(0, {"loss": 0.5})
    logger.on_train_end()
    rewind_files(logger, marks)
    assert path.read_text() == ""
    with appending([logger]):
        logger.on_train_begin()
    logger.on_epoch_end(0, {"loss": 0.5})
    logger.on_train_end()
    assert lines(path) == ["epoch,loss,val_loss", "0,0.5,NA"]


def test_a_file_that_is_gone_or_shorter_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    logger = keras.callbacks.CSVLogger(str(path))
    logger.on_train_begin()
    logger.on_epoch_end(0, {"loss": 0.5})
    marks = mark_files(logger)
    logger.on_train_end()
    path.write_text("epoch")
    rewind_files(logger, marks)
    assert path.read_text() == "epoch"
    path.unlink()
    rewind_files(logger, marks)
    assert not path.exists()


def test_a_callback_that_appends_by_itself_stays_so(tmp_path: Path) -> None:
    logger = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"), append=True)
    with appending([logger]) as opened:
        assert opened == []
    assert logger.append


def test_the_next_fit_begins_its_csv_file_as_in_plain_keras(tmp_path: Path) -> None:
    """The same callback: in the fit before it continued with a file of a task that was lost."""
    path = tmp_path / "log.csv"
    logger = keras.callbacks.CSVLogger(str(path))
    path.write_text("epoch,loss\n0,0.5\n1,0.25\n")
    memory = CallbackMemory([logger], keras.callbacks.History(), True)
    sizes = {"sizes": {str(path): 17}, "writer": "host.1"}
    state = {"CSVLogger 0": {"keys": ["loss"], "#uncopied": {}, "#files": sizes}}
    with memory.continuing_files(state, []):
        logger.on_train_begin()
    memory.load_state_dict(state)
    logger.on_epoch_end(1, {"loss": 0.125})
    logger.on_train_end()
    assert lines(path) == ["epoch,loss", "0,0.5", "1,0.125"]
    memory.close()

    logger.on_train_begin()
    logger.on_epoch_end(0, {"loss": 2})
    logger.on_train_end()
    assert lines(path) == ["epoch,loss,val_loss", "0,2,NA"]


def test_events_of_keras_behind_a_mark_are_gone_and_others_stay(tmp_path: Path) -> None:
    foreign = tmp_path / "train" / "events.out.tfevents.1700000000.some.host.12.34.v2"
    foreign.parent.mkdir()
    foreign.write_bytes(b"of somebody else")
    board = begun(keras.callbacks.TensorBoard(tmp_path), make_model())
    board.on_epoch_end(0, {"loss": 0.5})
    marks = mark_files(board)
    expected = contents(tmp_path)
    board.on_epoch_end(1, {"loss": 0.5, "val_loss": 0.5})
    board.on_train_end()
    assert len(contents(tmp_path)) == len(expected) + 1

    other = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    other.set_params({"epochs": 4})
    other.set_model(make_model())
    rewind_files(other, in_another_process(marks))
    assert contents(tmp_path) == expected
    other.on_epoch_end(1, {"loss": 0.5})
    other._train_writer.flush()
    assert len(contents(tmp_path)) == len(expected) + 1


def test_a_second_fit_takes_nothing_from_the_first_away(tmp_path: Path) -> None:
    board, model = keras.callbacks.TensorBoard(tmp_path), make_model()
    for epoch in (0, 1):
        begun(board, model).on_epoch_end(epoch, {"loss": 0.5})
        marks = mark_files(board)
        expected = contents(tmp_path)
        board.on_epoch_end(epoch + 1, {"loss": 0.5})
        board.on_train_end()
        if epoch == 0:
            first = contents(tmp_path)
    rewind_files(board, marks)
    assert contents(tmp_path) == expected
    assert first.items() <= expected.items()


def test_events_behind_a_mark_are_gone(tmp_path: Path) -> None:
    board = begun(TensorBoard(tmp_path, graph=False), make_model())
    marks = mark_files(board)
    expected = contents(tmp_path)
    assert len(expected) == 1, "what is written first is marked too"
    board.on_epoch_end(0, {"loss": 0.5})
    behind = mark_files(board)
    ended = contents(tmp_path)
    board.on_epoch_end(1, {"loss": 0.5})
    rewind_files(board, behind)
    assert contents(tmp_path) == ended
    rewind_files(board, in_another_process(marks))
    assert contents(tmp_path) == expected


def test_files_of_an_earlier_task_and_of_this_one_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = begun(TensorBoard(tmp_path, graph=False), make_model())
    board.on_epoch_end(0, {"loss": 0.5})
    memory = {"_paths": list(board._paths)}
    monkeypatch.setattr(os, "getpid", lambda: 12345678)
    other = begun(TensorBoard(tmp_path, graph=False), make_model())
    vars(other).update(memory)
    assert set(mark_files(other)["sizes"]) == {str(board._file.path), str(other._file.path)}
    other.on_epoch_end(1, {"loss": 0.5})
    assert other._paths == [str(board._file.path), str(other._file.path)]


def test_callbacks_that_append_to_nothing_have_no_marks(tmp_path: Path) -> None:
    for callback in (
        keras.callbacks.EarlyStopping(),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "a.keras")),
        TensorBoard("memory://somewhere"),
    ):
        assert mark_files(callback) == {}
        rewind_files(callback, {})
    remote = keras.callbacks.TensorBoard("gs://bucket/logs", write_graph=False)
    remote.set_model(make_model())
    assert mark_files(remote)["sizes"] == {}


def test_marks_are_plain_values(tmp_path: Path) -> None:
    board = begun(keras.callbacks.TensorBoard(tmp_path), make_model())
    marks = mark_files(board)
    assert in_another_process(marks) == marks
    assert all(isinstance(size, int) for size in marks["sizes"].values()) and np.size(marks["writer"]) == 1


@pytest.mark.parametrize("make", [keras.callbacks.TensorBoard, TensorBoard])
def test_a_fit_that_begins_again_leaves_no_events_of_its_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    folder, record = tmp_path / "logs", tmp_path / "record.json"
    begun(make(folder), make_model()).on_epoch_end(0, {"loss": 0.9})
    before = contents(folder)
    foreign = folder / "train" / "events.out.tfevents.1700000000.some.host.12.34.v2"
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_bytes(b"of somebody else")

    first = make(folder)
    begin_files([first], record)
    board = begun(first, make_model())
    board.on_epoch_end(0, {"loss": 0.5, "val_loss": 0.5})
    mark_files(board)  # has what is still in memory written
    assert sum(map(len, contents(folder).values())) > sum(map(len, before.values())) + foreign.stat().st_size
    # Another job continues writing meanwhile.
    foreign.write_bytes(b"of somebody else, and more")
    later = foreign.with_name("events.out.tfevents.1800000000.some.host.13.34.v2")
    later.write_bytes(b"of somebody else, too")

    monkeypatch.setattr(os, "getpid", lambda: 1234568)
    begin_files([make(folder)], record)
    found = contents(folder)
    for path, content in ((foreign, b"of somebody else, and more"), (later, b"of somebody else, too")):
        assert found.pop(str(path.relative_to(folder))) == content
    assert found == before


@pytest.mark.parametrize("make", [keras.callbacks.TensorBoard, TensorBoard])
@pytest.mark.parametrize("begins_again", [False, True])
def test_events_of_a_process_that_nobody_has_learnt_of_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, begins_again: bool
) -> None:
    folder, record = tmp_path / "logs", tmp_path / "record.json"

    def begin_process(number: int) -> Any:
        monkeypatch.setattr(os, "getpid", lambda: number)
        return make(folder)

    own = os.getpid()
    first = begin_process(own)
    begin_files([first], record)
    board = begun(first, make_model())
    board.on_epoch_end(0, {"loss": 0.5})
    marks = mark_files(board)
    expected = contents(folder)

    lost = begin_process(1234568)
    rewind_files(lost, marks, take_over_files(record))
    board = begun(lost, make_model())
    board.on_epoch_end(1, {"loss": 0.25})
    mark_files(board)
    for name in contents(folder).keys() - expected.keys():
        # TensorFlow asks for the process itself.
        (folder / name).rename(folder / name.replace(f".{own}.", ".1234568."))
    assert len(contents(folder)) > len(expected)

    third = begin_process(1234569)
    if begins_again:
        begin_files([third], record)
        assert contents(folder) == {}
    else:
        rewind_files(third, marks, take_over_files(record))
        assert contents(folder) == expected


def test_a_fit_that_began_on_another_host_has_no_record(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    assert take_over_files(record) == []
    path = tmp_path / "log.csv"
    path.write_text("epoch,loss\n0,0.9\n")
    begin_files([keras.callbacks.CSVLogger(str(path), append=True)], record)
    assert path.read_text() == "epoch,loss\n0,0.9\n", "nobody knows whose rows those are"


def test_a_csv_file_that_is_appended_to_loses_the_rows_of_a_fit_that_begins_again(tmp_path: Path) -> None:
    for name, first in (("old.csv", "epoch,loss\n0,0.9\n"), ("new.csv", "")):
        path = tmp_path / name
        if first:
            path.write_text(first)
        for _ in range(2):
            logger = keras.callbacks.CSVLogger(str(path), append=True)
            begin_files([logger], tmp_path / f"{name}.json")
            logger.on_train_begin()
            logger.on_epoch_end(0, {"loss": 0.5})
            logger.on_train_end()
        assert lines(path)[-1] == "0,0.5,NA"
        assert path.read_text().count("0,0.5") == 1 and path.read_text().startswith(first)
