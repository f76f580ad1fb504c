"""Which calls need insitu."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from models import in_shards

import insitu
from insitu.base.paths import Paths
from insitu.grid import import_cache
from insitu.train import MultiWorkerMirroredStrategy
from insitu.train.backends import active_backend
from insitu.train.fit.trainer import needs_insitu

ARRAYS = (np.ones((2, 2)), np.ones((2, 1)))


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("INSITU_HOME", str(tmp_path / "home"))
    np.savez(tmp_path / "rows.npz", x=ARRAYS[0], y=ARRAYS[1])
    import_cache(Paths(tmp_path / "home"), "two", [str(tmp_path / "rows.npz")], partitions=1)
    return insitu.dataset("two", features="x", label="y").batch(1)


def test_rows_of_a_cache_do(rows: Any) -> None:
    assert needs_insitu({"x": rows})
    assert needs_insitu({"x": ARRAYS[0], "validation_data": rows})
    assert needs_insitu({"x": ARRAYS[0], "validation_data": (rows,)})
    assert not needs_insitu({"x": ARRAYS[0], "validation_data": ARRAYS, "callbacks": None})
    assert not needs_insitu({"x": [[1.0], [2.0]]})
    assert not needs_insitu({})


def test_a_callback_that_takes_a_training_up_does(tmp_path: Path) -> None:
    backup, other = insitu.BackupAndRestore(tmp_path), keras.callbacks.BackupAndRestore(tmp_path)
    for callbacks in (backup, [other, backup], [[backup]], keras.callbacks.CallbackList([backup])):
        assert needs_insitu({"x": ARRAYS[0], "callbacks": callbacks})
    for callbacks in (other, [other], [], keras.callbacks.CallbackList([other], add_history=True)):
        assert not needs_insitu({"x": ARRAYS[0], "callbacks": callbacks})


def test_keras_may_do_what_no_distribution_changes() -> None:
    active_backend().check_delegated()


class Looping(keras.Sequential):
    def fit(self, x: Any, y: Any) -> Any:
        for _ in range(2):
            self.train_step((x, y))


class Passing(keras.Sequential):
    def fit(self, x: Any, y: Any) -> Any:
        return super().fit(x, y, verbose=0)


class Running(keras.Sequential):
    def fit(self, x: Any, y: Any) -> Any:
        return [self.strategy.run(self.train_step, (batch,)) for batch in zip(x, y, strict=True)]


@pytest.mark.parametrize(("kind", "told"), [(Looping, True), (Passing, False), (Running, False)])
def test_a_fit_that_trains_by_itself_is_told(kind: Any, told: bool) -> None:
    strategy = MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2))
    with strategy.scope(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind([keras.Input((2,)), keras.layers.Dense(1)]).compile("sgd", "mse")
    assert [kind.__name__ in str(each.message) for each in caught] == [True] * told
