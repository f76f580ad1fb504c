"""Each worker gets the sum of what all have added, from where its script began."""

from __future__ import annotations

import keras
import numpy as np

from insitu.train.parameter_server.coordinator import SummedVariables


def test_own_additions_are_taken_back_and_the_sums_of_all_are_added() -> None:
    total, pair = keras.Variable(5.0), keras.Variable(np.zeros(2, "float32"))
    summed = SummedVariables()
    summed.begin([total])
    total.assign_add(1.0)
    pair.assign([1.0, 2.0])  # made by the first function
    assert summed.read([total, pair]).tolist() == [6.0, 1.0, 2.0]
    assert summed.first_values(1).tolist() == [0.0, 0.0]
    summed.end()
    assert float(total.value) == 5.0 and np.asarray(pair.value).tolist() == [0.0, 0.0]
    summed.begin([total, pair])
    summed.load(np.array([3.0, 4.0]))
    assert float(total.value) == 8.0 and np.asarray(pair.value).tolist() == [4.0, 0.0]
    total.assign(0.0)
    summed.begin([total, pair])
    summed.load(np.array([10.0, 4.0, 7.0]))
    assert float(total.value) == 7.0 and np.asarray(pair.value).tolist() == [4.0, 7.0]


def test_integers_stay_integers() -> None:
    count = keras.Variable(2, dtype="int32")
    summed = SummedVariables()
    summed.begin([count])
    summed.load(np.array([2.0**30]))
    assert int(count.value) == 2**30 + 2
