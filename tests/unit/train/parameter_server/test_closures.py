"""Scheduled functions: their arguments, and what is told of their results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from insitu.base.errors import NotFinite, TrainingError
from insitu.train.parameter_server.coordinator import (
    Closure,
    PerWorkerDataset,
    PerWorkerValues,
    WorkerIterator,
    describe_closures,
    encode_failure,
    rebuild_failure,
)


def closure(fn: Any, *args: Any, **kwargs: Any) -> Closure:
    return Closure(fn, args, kwargs)


def test_a_function_gets_the_values_of_its_worker_and_returns_arrays() -> None:
    returned = closure(lambda x, y: (tf.constant(x), y), PerWorkerValues(3), y=PerWorkerValues("a")).run()
    assert isinstance(returned[0], np.ndarray) and returned == (3, "a")


def test_a_trial_takes_back_what_it_has_read() -> None:
    iterator = iter(PerWorkerDataset(range(4))).value
    assert next(iterator) == 0
    iterator.begin_trial()
    assert [next(iterator), next(iterator)] == [1, 2]
    iterator.end_trial()
    assert list(iterator) == [1, 2, 3]
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()
    assert closure(len, PerWorkerValues(iterator), iterator).iterators() == [iterator]
    assert WorkerIterator(iter([5])).get_next() == 5


def test_functions_are_told_apart_by_name_and_order() -> None:
    one, other = closure(len), closure(max)
    assert describe_closures([one, other]) == describe_closures([one, other])
    assert describe_closures([one, other]) != describe_closures([other, one])
    assert closure(tf.function(test_numbers_stay_numbers)).name.endswith("test_numbers_stay_numbers")
    assert closure(tf.function(len_of)).code is closure(len_of).code


def len_of(given: Any) -> int:
    return len(given)


def test_numbers_stay_numbers() -> None:
    assert closure(len_of, "abc").run() == 3


class Own(Exception):
    """Of the script."""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("no"), ValueError, r"^no \(in step, on worker:3\)$"),
        (tf.errors.OutOfRangeError(None, None, "end"), tf.errors.OutOfRangeError, "end"),
        (NotFinite("nan"), NotFinite, "nan"),
        (Own("mine"), TrainingError, "failed with Own.*mine"),
        (UnicodeDecodeError("utf8", b"x", 0, 1, "bad"), TrainingError, "failed with UnicodeDecodeError"),
    ],
)
def test_failures_are_raised_alike_everywhere(error: Exception, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        raise rebuild_failure(encode_failure(error, 3), "step")
