"""A name of tf.distribute that isn't here says what to use."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

import insitu
from insitu.base.missing_names import ADVICE, missing_name


class Batches(keras.utils.PyDataset):
    """One batch."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> np.ndarray:
        return np.zeros((2, 1))


@pytest.mark.parametrize("owner", [owner for owner in ADVICE if owner.startswith("insitu")])
def test_modules_say_what_to_use(owner: str) -> None:
    module = insitu if owner == "insitu" else getattr(insitu, owner.partition(".")[2])
    for name, advice in ADVICE[owner].items():
        with pytest.raises(AttributeError) as error:
            getattr(module, name)
        assert advice in str(error.value) and f"{owner!r} has no attribute {name!r}" in str(error.value)
        assert not hasattr(module, name)


def test_objects_say_what_to_use() -> None:
    strategy = insitu.OneDeviceStrategy()
    for name, advice in ADVICE["Strategy"].items():
        with pytest.raises(AttributeError, match="'OneDeviceStrategy' object has no attribute") as error:
            getattr(strategy, name)
        assert advice in str(error.value)
    with pytest.raises(AttributeError, match=r"strategy\.devices"):
        insitu.get_replica_context().devices  # noqa: B018
    data = strategy.distribute_dataset(Batches())
    with pytest.raises(AttributeError, match=r"strategy\.reduce"):
        data.reduce  # noqa: B018
    with pytest.raises(AttributeError, match=r"'OneDeviceStrategy' object has no attribute 'nothing'$"):
        strategy.nothing  # noqa: B018


def test_estimators_say_what_to_use(tmp_path: Path) -> None:
    made = insitu.estimator.Estimator(lambda features: None, tmp_path)
    for name, advice in ADVICE["Estimator"].items():
        with pytest.raises(AttributeError, match=r"which tf.estimator.Estimator has") as error:
            getattr(made, name)
        assert advice in str(error.value)
    assert not hasattr(made, "nothing")


def test_other_names_are_no_attributes() -> None:
    assert str(missing_name("insitu", "datasets")) == "module 'insitu' has no attribute 'datasets'"
