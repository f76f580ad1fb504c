from __future__ import annotations

import numpy as np
import pytest

from insitu import feature_column as fc
from insitu.base.errors import InputError
from insitu.extensions.features.sequence import steps_of


def test_steps_go_up_to_the_last_value():
    column = fc.sequence_categorical_column_with_identity("k", 9)
    assert steps_of(column.look_up({"k": [[1, 2], [], [3]]})).tolist() == [2, 0, 1]
    assert steps_of(column.look_up({"k": np.array([[1, -1, 2], [3, -1, -1]])})).tolist() == [3, 1]


def test_numbers_of_steps():
    column = fc.sequence_numeric_column(
        "k", shape=2, default_value=-1, normalizer_fn=lambda values: values / 2
    )
    values, lengths = column.read({"k": [[1, 2, 3, 4], [5, 6]]})
    assert values.tolist() == [[[0.5, 1], [1.5, 2]], [[2.5, 3], [-1, -1]]] and lengths.tolist() == [2, 1]
    with pytest.raises(InputError, match="3 numbers in row 0"):
        column.read({"k": [[1, 2, 3]]})
    with pytest.raises(InputError, match="NaN in row 1"):
        column.read({"k": [[1, 2, 3, 4], [np.nan, 6]]})


def test_steps_are_brought_to_one_number():
    word, number = fc.sequence_categorical_column_with_identity("w", 9), fc.sequence_numeric_column("n")
    transform = fc.FeatureTransform([word, number], lengths={"w": 3, "n": 3})
    found = transform({"w": [[1], [2, 3]], "n": [[1.5], [2.5, 3.5]]})
    assert found["w__ids"].tolist() == [[1, -1, -1], [2, 3, -1]]
    assert found["n__values"][..., 0].tolist() == [[1.5, 0, 0], [2.5, 3.5, 0]]
    assert found["w__lengths"].tolist() == found["n__lengths"].tolist() == [1, 2]
    assert set(found) == set(transform.names)
    with pytest.raises(InputError, match="4 in row 0 of the batch, for column 'w' with length 3"):
        transform({"w": [[1, 2, 3, 4], [1]], "n": [[1.5], [2.5, 3.5]]})
