"""Tasks that look values up in different vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from exchange_ranks import in_threads

import insitu.exchange
from insitu.base.errors import CheckpointError, TrainingError
from insitu.extensions.features import feature_column
from insitu.train import BackupAndRestore, MultiWorkerMirroredStrategy
from insitu.train.evaluation.checkpoints import BackupCheckpoints
from insitu.train.replica.state import check_same_vocabularies, find_vocabularies


def check(*found: dict[str, str]) -> list[Any]:
    """What each task of a group says."""

    def rank(index: int, addresses: list[str]) -> str:
        with insitu.exchange.join(
            index, addresses, shards=(index,), num_shards=len(found), timeout=40.0
        ) as group:
            try:
                check_same_vocabularies(group, found[index])
            except TrainingError as error:
                return error.message
            return ""

    return in_threads(len(found), rank)


def test_a_vocabulary_that_differs_is_named_in_all_tasks() -> None:
    said = check({"the file a": "1", "b": "2"}, {"the file a": "3", "b": "2"}, {"the file a": "1"})
    assert len(said) == 3 and len(set(said)) == 1
    assert "Received: the file a: task 1 has another one" in said[0]


def test_equal_vocabularies_and_those_of_one_task_pass() -> None:
    assert check({"a": "1"}, {"a": "1", "mine": "2"}, {}) == ["", "", ""]


def test_many_vocabularies_are_compared_too() -> None:
    many = {f"{number:03d}": str(number) for number in range(100)}
    assert check(many, many) == ["", ""]
    assert "other vocabularies" in check(many, {**many, "099": "x"})[0]
    assert "Received: 003: task 1 has" in check(many, {**many, "003": "x"})[0]


def test_files_of_columns_and_lookup_layers_are_found(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("one\ntwo\n")
    feature_column.categorical_column_with_vocabulary_file("word", file)
    before = find_vocabularies(None)[f"the file {file}"]
    file.write_text("two\none\n")
    feature_column.categorical_column_with_vocabulary_file("word", file)
    assert find_vocabularies(None)[f"the file {file}"] not in ("", before)

    def make(words: list[str]) -> keras.Model:
        inputs = keras.Input((1,), dtype="int64")
        numbers = keras.layers.IntegerLookup(vocabulary=[int(word) for word in words], name="ids")(inputs)
        return keras.Model(inputs, keras.layers.Embedding(9, 2)(numbers))

    first, same, other = (find_vocabularies(make(words)) for words in (["1", "2"], ["1", "2"], ["2", "1"]))
    name = "lookup layer 0, ids"
    assert first[name] == same[name] != other[name]


def test_a_checkpoint_isnt_read_with_another_vocabulary(tmp_path: Path) -> None:
    def train(words: list[int], epochs: int) -> keras.Model:
        with MultiWorkerMirroredStrategy().scope():
            inputs = keras.Input((1,), dtype="int64")
            numbers = keras.layers.IntegerLookup(vocabulary=words, name="ids")(inputs)
            rows = keras.layers.Flatten()(keras.layers.Embedding(9, 2)(numbers))
            model = keras.Model(inputs, keras.layers.Dense(1)(rows))
            model.compile("sgd", "mse")
        data = np.ones((8, 1), "int64"), np.ones((8, 1), "float32")
        model.fit(*data, epochs=epochs, verbose=0, callbacks=[BackupAndRestore(tmp_path)])
        return model

    trained = train([1, 2], 1)
    source = BackupCheckpoints(tmp_path, None, 0)
    assert source.load(source.find()[-1], trained) is not None
    assert int(train([1, 2], 2).optimizer.iterations) == 2
    with pytest.raises(CheckpointError, match="Received: another one in lookup layer 0, ids"):
        train([2, 1], 3)
    inputs = keras.Input((1,), dtype="int64")
    other = keras.Model(inputs, keras.layers.IntegerLookup(vocabulary=[2, 1], name="ids")(inputs))
    with pytest.raises(CheckpointError, match="lookup layer 0, ids"):
        source.load(source.find()[-1], other)


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that tests before have read don't count."""
    monkeypatch.setattr("insitu.train.replica.state._read_files", {})
