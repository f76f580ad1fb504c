"""The rules of columns: each error has the rule, the value and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from insitu import feature_column as fc
from insitu.base.errors import InputError

NUMBER = fc.numeric_column("x")
CATEGORY = fc.categorical_column_with_identity("c", 3)
HASHED = fc.categorical_column_with_hash_bucket("h", 3)
WEIGHTED = fc.weighted_categorical_column(CATEGORY, "w")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fc.numeric_column(3), "name of a feature. Received: 3"),
        (lambda: fc.numeric_column(""), "name of a feature. Received: ''"),
        (lambda: fc.numeric_column("x", shape=(0,)), r"1 at least. Received: \(0,\)"),
        (lambda: fc.numeric_column("x", shape=(2.5,)), r"Received: \(2.5,\)"),
        (lambda: fc.numeric_column("x", dtype="string"), "one of numbers.*Received: 'string'"),
        (lambda: fc.numeric_column("x", default_value="a"), "Received: 'a'"),
        (lambda: fc.numeric_column("x", shape=2, default_value=(1, 2, 3)), r"Received: \(1, 2, 3\)"),
        (lambda: fc.numeric_column("x", normalizer_fn=3), "function of an array. Received: 3"),
        (lambda: fc.bucketized_column(CATEGORY, [1]), "takes a numeric_column. Received: .*Wrap the feature"),
        (lambda: fc.bucketized_column("x", [1]), "takes a numeric_column"),
        (lambda: fc.bucketized_column(fc.numeric_column("x", (2, 2)), [1]), r"Pass shape=\(4,\)"),
        (lambda: fc.bucketized_column(NUMBER, []), r"Received: \[\]"),
        (lambda: fc.bucketized_column(NUMBER, [2, 1]), "Sort them"),
        (lambda: fc.bucketized_column(NUMBER, [1, 1]), "Sort them"),
        (lambda: fc.categorical_column_with_identity("c", 0), r"num_buckets.*Received: 0"),
        (lambda: fc.categorical_column_with_identity("c", 2**31), f"Received: {2**31}"),
        (lambda: fc.categorical_column_with_identity("c", 3, 3), r"\[0, 3\). Received: 3"),
        (lambda: fc.categorical_column_with_hash_bucket("c", 2.5), "Received: 2.5"),
        (lambda: fc.categorical_column_with_hash_bucket("c", 2, "float32"), "Received: 'float32'"),
        (lambda: fc.categorical_column_with_vocabulary_list("c", []), r"Received: \[\]"),
        (lambda: fc.categorical_column_with_vocabulary_list("c", "abc"), "Received: 'abc'"),
        (lambda: fc.categorical_column_with_vocabulary_list("c", ["a", 1]), r"Received: \['a', 1\]"),
        (lambda: fc.categorical_column_with_vocabulary_list("c", ["a", "b", "a"]), "'a' at 0 and 2"),
        (
            lambda: fc.categorical_column_with_vocabulary_list("c", [b"\xff"]),
            "in UTF-8. Received: .* for column 'c'",
        ),
        (
            lambda: fc.categorical_column_with_vocabulary_list("c", [1, 2**63]),
            f"int64. Received: {2**63} for",
        ),
        (
            lambda: fc.categorical_column_with_vocabulary_list("c", ["a"], "int64"),
            "'string'. Received: 'int64'",
        ),
        (lambda: fc.categorical_column_with_vocabulary_list("c", ["a"], default_value=1), r"\[0, 1\)"),
        (
            lambda: fc.categorical_column_with_vocabulary_list(
                "c", ["a"], default_value=0, num_oov_buckets=1
            ),
            "default_value=0 and num_oov_buckets=1",
        ),
        (lambda: fc.weighted_categorical_column(NUMBER, "w"), "takes a categorical column"),
        (lambda: fc.weighted_categorical_column(WEIGHTED, "w"), "weighted once"),
        (lambda: fc.crossed_column(["a"], 3), r"two keys at least. Received: \['a'\]"),
        (lambda: fc.crossed_column("ab", 3), "two keys at least. Received: 'ab'"),
        (lambda: fc.crossed_column(["a", HASHED], 3), "hashed column 'h'. Pass the key 'h'"),
        (lambda: fc.crossed_column(["a", WEIGHTED], 3), "takes no weights"),
        (lambda: fc.crossed_column(["a", NUMBER], 3), "Make ranges of numbers by bucketized_column"),
        (lambda: fc.crossed_column(["a", "b"], 3, hash_key=-1), "Received: -1"),
        (lambda: fc.indicator_column(NUMBER), "make ranges of it by bucketized_column"),
        (lambda: fc.embedding_column("c", 3), "takes a categorical column. Received: 'c'"),
        (lambda: fc.embedding_column(CATEGORY, 0), "dimension.*Received: 0"),
        (lambda: fc.embedding_column(CATEGORY, 3, "max"), "mean, sqrtn, sum. Received: 'max'"),
        (lambda: fc.embedding_column(CATEGORY, 3, max_norm=0), "Received: 0"),
        (lambda: fc.shared_embeddings([CATEGORY], 3), r"Received: \{'c': 3\}"),
        (
            lambda: fc.shared_embeddings([CATEGORY, fc.categorical_column_with_identity("d", 4)], 3),
            r"Received: \{'c': 3, 'd': 4\}",
        ),
    ],
)
def test_rules(make: Callable[[], Any], message: str):
    with pytest.raises(InputError, match=message):
        make()


def test_a_vocabulary_may_be_an_array():
    make = fc.categorical_column_with_vocabulary_list
    assert make("c", np.array([3, 5])) == make("c", [3, 5])
    assert make("c", np.array(["a", "b"])) == make("c", ["a", b"b"])


def test_a_vocabulary_file_is_checked(tmp_path: Path):
    path = tmp_path / "v.txt"
    make = fc.categorical_column_with_vocabulary_file
    with pytest.raises(InputError, match=r"v\.txt: .*No such file"):
        make("c", path)
    path.write_text("a\nb\na\n")
    with pytest.raises(InputError, match=r"'a' at 0 and 2 of .*v\.txt"):
        make("c", path)
    assert make("c", path, vocabulary_size=2).vocabulary == ("a", "b")
    with pytest.raises(InputError, match=r"Received: 4, where .*v\.txt has 3"):
        make("c", path, vocabulary_size=4)
    with pytest.raises(InputError, match="Pass dtype='string'"):
        make("c", path, dtype="int64", vocabulary_size=1)
    path.write_text("7\n5")
    assert make("c", path, dtype="int64").vocabulary == (7, 5)
    path.write_bytes(b"\xff\n")
    with pytest.raises(InputError, match="in UTF-8"):
        make("c", path)
    path.write_text("")
    with pytest.raises(InputError, match="which is empty"):
        make("c", path)


def test_shared_embeddings_have_one_table():
    other = fc.categorical_column_with_identity("d", 3)
    first, second = fc.shared_embedding_columns([CATEGORY, other], 2)
    assert (first.name, second.name) == ("c_shared_embedding", "d_shared_embedding")
    layer = fc.DenseFeatures([first, second])
    matrix = layer({"c": [1], "d": [1]})
    assert len(layer.weights) == 1 and matrix[0, 0] == matrix[0, 2]
