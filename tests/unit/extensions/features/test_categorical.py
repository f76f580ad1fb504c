"""Ids beside TensorFlow's are in test_dense_features.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from insitu import feature_column as fc
from insitu.base.errors import InputError
from insitu.base.fingerprint import fingerprints
from insitu.extensions.features.categorical import CategoricalColumn


def ids(column: CategoricalColumn, **features: Any) -> list[list[int]]:
    found = column.look_up(features)
    return np.where(found.present, found.values, -1).tolist()


def test_identity():
    column = fc.categorical_column_with_identity("k", 3)
    assert ids(column, k=[0, 2, -1]) == [[0], [2], [-1]]
    assert ids(fc.categorical_column_with_identity("k", 3, default_value=1), k=[9, -7, -1]) == [
        [1],
        [1],
        [-1],
    ]
    with pytest.raises(InputError, match=r"in \[0, 3\). Received: 3 in row 1 of the batch, in feature 'k'"):
        ids(column, k=[0, 3])
    with pytest.raises(InputError, match=r"text in 'k'.*'int64'"):
        ids(column, k=["a"])


def test_vocabulary():
    column = fc.categorical_column_with_vocabulary_list("k", ["a", "b"])
    assert ids(column, k=["b", "x", "", "a"]) == [[1], [-1], [-1], [0]]
    assert column.look_up({"k": ["x", ""]}).present.tolist() == [[True], [False]]
    numbers = fc.categorical_column_with_vocabulary_list("k", [10, 20], default_value=0)
    assert ids(numbers, k=[20, 5, -1]) == [[1], [0], [-1]]
    buckets = fc.categorical_column_with_vocabulary_list("k", [10, 20], num_oov_buckets=4)
    assert ids(buckets, k=[20, 5]) == [[1], [2 + int(fingerprints([b"5"])[0] % np.uint64(4))]]
    assert buckets.num_buckets == 6
    with pytest.raises(InputError, match=r"whole numbers in 'k'.*Pass dtype='int64'"):
        ids(column, k=[1])


def test_hash_of_numbers_is_that_of_their_digits():
    numbers = fc.categorical_column_with_hash_bucket("k", 100, "int64")
    texts = fc.categorical_column_with_hash_bucket("k", 100)
    assert ids(numbers, k=[5, 123]) == ids(texts, k=["5", "123"])


def test_rows_without_values():
    column = fc.categorical_column_with_hash_bucket("k", 10)
    assert ids(column, k=[[], ["a"]])[0] == [-1] and ids(column, k=[[], []]) == [[-1], [-1]]
    cross = fc.crossed_column(["k", fc.categorical_column_with_vocabulary_list("k", ["a", "b"])], 10)
    assert ids(cross, k=[[], ["a", "b"]])[0] == [-1] * 4


def test_an_id_does_not_depend_on_the_rows_beside_it():
    cross = fc.crossed_column(["n", "k"], 1000)
    alone = ids(cross, k=[["a", "b"]], n=np.array([1]))
    assert alone == ids(cross, k=[["a", "b"], ["c"]], n=np.array([1, 2]))[:1]
    # An array is what TensorFlow calls dense: it hashes what is sparse first.
    assert alone != ids(cross, k=np.array([["a", "b"]]), n=np.array([1]))
    word = fc.categorical_column_with_hash_bucket("k", 1000)
    assert ids(word, k=[["a", ""], ["b"]])[0][1] >= 0 and ids(word, k=np.array([["a", ""]]))[0][1] == -1
    with pytest.raises(InputError, match=r"'' in row 0 .* in lists that have one length by now"):
        ids(word, k=[["a", ""]])


def test_ranges():
    age = fc.numeric_column("k")
    column = fc.bucketized_column(age, [1, 2])
    assert ids(column, k=[0.9, 1, 1.5, 2, 99]) == [[0], [1], [1], [2], [2]]
    pair = fc.bucketized_column(fc.numeric_column("k", shape=2), [1, 2])
    assert ids(pair, k=[[0.0, 0.0], [2.0, 2.0]]) == [[0, 3], [2, 5]]
    with pytest.raises(InputError, match="NaN in row 1 of the batch, in feature 'k'"):
        ids(column, k=[0, np.nan])


def test_weights_lie_beside_the_values():
    column = fc.weighted_categorical_column(fc.categorical_column_with_identity("k", 5), "w")
    found = column.look_up({"k": np.array([[1, 2], [3, -1]]), "w": [[0.5, 1.5], [2.0, 7.0]]})
    assert found.weights is not None and found.weights.tolist() == [[0.5, 1.5], [2.0, 0.0]]
    ragged = column.look_up({"k": [[1, 2], [3]], "w": [[0.5, 1.5], [2.0]]})
    assert ragged.weights is not None and ragged.weights.tolist() == [[0.5, 1.5], [2.0, 0.0]]
    with pytest.raises(InputError, match="Each value has one weight"):
        column.look_up({"k": [[1, 2], [3, 4]], "w": [[0.5], [2.0]]})
    with pytest.raises(InputError, match=r"1 weights in 'w' for row 0"):
        column.look_up({"k": [[1, 2], [3]], "w": [[0.5], [2.0, 1.0]]})
    for wrong, told in ((np.nan, "NaN in row 1"), (np.inf, "inf in row 1"), (-np.inf, "-inf in row 1")):
        with pytest.raises(InputError, match=told):
            column.look_up({"k": [1, 2], "w": [0.5, wrong]})
    with pytest.raises(InputError, match=r"weights 'w' of shape \(4,\) for values of shape \(2, 2\)"):
        column.look_up({"k": np.array([[1, 2], [3, 4]]), "w": np.arange(4.0)})


def test_features_of_a_cross_have_the_same_rows():
    cross = fc.crossed_column(["a", "b"], 10)
    for rows in (1, 2):
        with pytest.raises(InputError, match=rf"Received: \[{rows}, 3\] rows of a, b, for column 'a_X_b'"):
            cross.look_up({"a": np.arange(rows), "b": np.arange(3)})


def test_names_are_those_of_tensorflow():
    identity = fc.categorical_column_with_identity("b", 5)
    cross = fc.crossed_column(["z", fc.crossed_column([identity, "a"], 5)], 5)
    assert cross.name == "a_X_b_X_z" and cross.raw_keys == ("z", "b", "a")
    assert fc.weighted_categorical_column(identity, "w").name == "b_weighted_by_w"
    assert fc.bucketized_column(fc.numeric_column("n"), [1]).name == "n_bucketized"
