"""Which calls need insitu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import insitu
from insitu.grid import import_cache
from insitu.paths import Paths
from insitu.train.fit.delegation import check_delegated, needs_insitu

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
    check_delegated()
