from __future__ import annotations

import numpy as np
import pytest

from insitu import feature_column as fc
from insitu.base.errors import InputError


def test_a_batch_becomes_numbers():
    age = fc.numeric_column("age")
    words = fc.categorical_column_with_vocabulary_list("words", ["a", "b"])
    weighted = fc.weighted_categorical_column(words, "w")
    transform = fc.FeatureTransform([age, fc.indicator_column(words), weighted])
    assert transform.raw_keys == ("age", "w", "words")
    features = {
        "age": [1, 2],
        "words": np.array([["a", "x"], ["", "b"]]),
        "w": [[1.0, 2.0], [3.0, 4.0]],
        "more": [0, 0],
    }
    found, label = transform(features, np.array([5, 6]))
    assert label.tolist() == [5, 6]
    assert set(found) == set(transform.names)
    assert found["age__values"].tolist() == [[1], [2]] and found["age__values"].dtype == np.float32
    assert found["words__ids"].tolist() == [[0, -1], [-1, 1]] and found["words__ids"].dtype == np.int32
    assert found["words_weighted_by_w__weights"].tolist() == [[1, 0], [0, 4]]
    assert set(transform(features)) == set(found)


def test_rows_of_different_lengths_are_brought_to_one():
    column = fc.categorical_column_with_identity("k", 9)
    cross = fc.crossed_column(["k", "k2"], 100)
    transform = fc.FeatureTransform([column, cross], lengths={"k": 3, "k_X_k2": 4})
    batch = {"k": [[1, 2], [3]], "k2": [[1], [2, 3]]}
    found = transform(batch)
    assert found["k__ids"].tolist() == [[1, 2, -1], [3, -1, -1]]
    assert found["k_X_k2__ids"].shape == (2, 4) and (found["k_X_k2__ids"] >= 0).sum() == 4
    plain = fc.FeatureTransform([cross])(batch)["k_X_k2__ids"]
    for row, wide in zip(plain.tolist(), found["k_X_k2__ids"].tolist(), strict=True):
        assert [i for i in row if i >= 0] == [i for i in wide if i >= 0]
    with pytest.raises(InputError, match="Received: 4 in row 1 of the batch, for column 'k' with length 3"):
        transform({"k": [[1], [1, 2, 3, 4]], "k2": [[1], [2, 3]]})


def test_columns_may_be_shared_by_several_layers():
    numbers = fc.numeric_column("x")
    category = fc.categorical_column_with_identity("c", 3)
    wide, deep = [numbers, fc.indicator_column(category)], [numbers, fc.embedding_column(category, 2)]
    transform = fc.FeatureTransform(wide + deep)
    assert transform.names == ("x__values", "c__ids")
    found = transform({"x": [1.0], "c": [2]})
    assert fc.DenseFeatures(wide)(found).shape == (1, 4) and fc.DenseFeatures(deep)(found).shape == (1, 3)
    assert fc.raw_keys(wide) == ["c", "x"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([], r"Received: \[\]"),
        ("age", "Feature columns are a list. Received: str"),
        (["age"], "Received: 'age'. Wrap the name of a feature"),
        (
            [fc.categorical_column_with_identity("k", n) for n in (3, 4)],
            "read the data in one way",
        ),
        (
            [
                fc.indicator_column(fc.categorical_column_with_identity("k", 3)),
                *[fc.embedding_column(fc.categorical_column_with_identity("k", 4), 2)],
            ],
            "read the data in one way",
        ),
    ],
)
def test_what_makes_no_transform_is_refused(columns, message: str):
    with pytest.raises(InputError, match=message):
        fc.FeatureTransform(columns)


@pytest.mark.parametrize("lengths", [{"x": 3}, {"c": 0}, {"c": True}])
def test_lengths_are_those_of_categorical_columns(lengths):
    columns = [fc.numeric_column("x"), fc.categorical_column_with_identity("c", 3)]
    with pytest.raises(InputError, match="length"):
        fc.FeatureTransform(columns, lengths)


def test_features_have_the_same_rows():
    with pytest.raises(InputError, match="'a__values': 1, 'b__values': 2"):
        fc.FeatureTransform([fc.numeric_column("a"), fc.numeric_column("b")])({"a": [1], "b": [1, 2]})


def test_layers_may_have_tables_of_one_name():
    """A wide and a deep part each have a table for a column."""
    word = fc.categorical_column_with_identity("c", 3)
    columns = [fc.embedding_column(word, 1), fc.embedding_column(word, 4), fc.numeric_column("x")]
    assert fc.FeatureTransform(columns).names == ("c__ids", "x__values")


def test_a_column_comes_once_in_a_layer():
    with pytest.raises(InputError, match="several named 'x'"):
        fc.DenseFeatures([fc.numeric_column("x"), fc.numeric_column("x")])
