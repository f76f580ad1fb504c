"""Requests become the arrays that a model takes, or an error that says what was expected."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from insitu.base.errors import InputError
from insitu.extensions.exports.predictions import describe_model, make_answer, read_question


@dataclass
class Input:
    name: str
    dtype: str
    shape: tuple[int | None, ...] | None


ONE = [Input("x", "float32", (None, 2))]
TWO = [Input("age", "int8", (None,)), Input("word", "string", None)]


def ask(takes: Any, **body: Any) -> Any:
    return read_question(json.dumps(body).encode(), takes)


def test_rows_and_columns_give_the_same_arrays() -> None:
    for question in (
        ask(ONE, instances=[[1, 2.5], [3, 4]]),
        ask(ONE, instances=[{"x": [1, 2.5]}, {"x": [3, 4]}], signature_name="serving_default"),
        ask(ONE, inputs=[[1, 2.5], [3, 4]]),
        ask(ONE, inputs={"x": [[1, 2.5], [3, 4]]}),
    ):
        assert question.inputs["x"].dtype == np.float32 and question.inputs["x"].tolist() == [
            [1, 2.5],
            [3, 4],
        ]
    by_rows = ask(TWO, instances=[{"age": 3, "word": "a"}, {"age": 4, "word": {"b64": "w7Y="}}])
    by_columns = ask(TWO, inputs={"age": [3, 4], "word": ["a", "ö"]})
    for question in (by_rows, by_columns):
        assert question.inputs["age"].dtype == np.int8 and question.inputs["word"].tolist() == ["a", "ö"]
        assert question.rows == 2
    outputs = {"p": np.array([[0.5], [1]], np.float32), "q": np.array([True, False])}
    rows = json.loads(make_answer(outputs, by_rows))
    assert rows == {"predictions": [{"p": [0.5], "q": True}, {"p": [1.0], "q": False}]}
    columns = json.loads(make_answer(outputs, by_columns))
    assert columns == {"outputs": {"p": [[0.5], [1.0]], "q": [True, False]}}
    assert json.loads(make_answer({"p": outputs["p"]}, by_rows)) == {"predictions": [[0.5], [1.0]]}
    with pytest.raises(ValueError):
        make_answer({"p": np.array([np.nan])}, by_rows)


@pytest.mark.parametrize(
    ("inputs", "body", "error"),
    [
        (ONE, b"{", "is JSON"),
        (ONE, b"[" * 100_000, "is JSON"),
        (ONE, b'{"instances": [[NaN, 1]]}', "NaN, where numbers are finite"),
        (ONE, b'{"instances": [[1e999, 1]]}', "isn't finite, or too large for float32"),
        (ONE, b'{"instances": [[1e39, 1]]}', "isn't finite, or too large for float32"),
        (ONE, b"[]", "A request has"),
        (ONE, b'{"instances": [[1, 2]], "inputs": [[1, 2]]}', "A request has"),
        (ONE, b'{"instances": [[1, 2]], "more": 1}', "Received: 'more'"),
        (ONE, b'{"instances": [[1, 2]], "signature_name": "other"}', "signature is 'serving_default'"),
        (ONE, b'{"instances": []}', "1 or more"),
        (ONE, b'{"instances": 3}', "list of rows"),
        (ONE, b'{"instances": [[1, 2, 3]]}', r"float32 of the shape \[rows, 2\]. Received: shape \[1, 3\]"),
        (ONE, b'{"instances": [[1, 2], [3]]}', "rows of different shapes"),
        (ONE, b'{"instances": [["a", "b"]]}', "takes float32"),
        (ONE, b'{"instances": [[null, 1]]}', "takes float32"),
        (ONE, b'{"inputs": 3}', r"Received: shape \[\]"),
        (ONE, b'{"instances": [{"y": [1, 2]}]}', "inputs are x"),
        (TWO, b'{"instances": [{"age": 1}]}', "inputs are age, word. Received: .'age'. in row 0"),
        (TWO, b'{"instances": [1, 2]}', "inputs are age, word"),
        (TWO, b'{"inputs": {"age": [1], "word": ["a", "b"]}}', "same number of rows"),
        (TWO, b'{"inputs": {"age": [300], "word": ["a"]}}', "beyond int8"),
        (TWO, b'{"inputs": {"age": [1.5], "word": ["a"]}}', "takes int8"),
        (TWO, b'{"inputs": {"age": [1], "word": [2]}}', "takes rows of texts"),
        (TWO, b'{"inputs": {"age": [1], "word": [{"b64": "!"}]}}', "in base64"),
        ([Input("f", "any", None)], b'{"inputs": [1.5]}', "texts or whole numbers"),
    ],
)
def test_what_the_model_does_not_take_is_an_error(inputs: Any, body: bytes, error: str) -> None:
    with pytest.raises(InputError, match=error):
        read_question(body, inputs)


def test_metadata_have_the_form_of_tensorflow_serving() -> None:
    found = describe_model("m", 7, ONE, TWO)
    assert found["model_spec"] == {"name": "m", "signature_name": "", "version": "7"}
    signature = found["metadata"]["signature_def"]["signature_def"]["serving_default"]
    shape = {"dim": [{"size": "-1", "name": ""}, {"size": "2", "name": ""}], "unknown_rank": False}
    assert signature["inputs"]["x"] == {"dtype": "DT_FLOAT", "tensor_shape": shape, "name": "x"}
    assert signature["outputs"]["word"]["dtype"] == "DT_STRING"
    assert signature["outputs"]["word"]["tensor_shape"]["unknown_rank"]


def test_lists_of_different_lengths_are_rows_of_a_feature_column() -> None:
    takes = [Input("words", "any", None), Input("weights", "float32", None)]
    rows = [
        {"words": ["a", "b"], "weights": [0.5, 1]},
        {"words": [], "weights": []},
        {"words": ["c"], "weights": [2]},
    ]
    question = ask(takes, instances=rows)
    assert question.rows == 3
    assert [each.tolist() for each in question.inputs["words"]] == [["a", "b"], [], ["c"]]
    assert [each.tolist() for each in question.inputs["weights"]] == [[0.5, 1], [], [2]]
    by_columns = ask(takes, inputs={"words": [[1], [2, 3]], "weights": [[1], [2, 3]]})
    assert [each.tolist() for each in by_columns.inputs["words"]] == [[1], [2, 3]]
    with pytest.raises(
        InputError, match=r"'words' takes rows of texts or whole numbers, or of lists of them. Received"
    ):
        ask(takes[:1], inputs=[["a"], ["b", 3]])
    with pytest.raises(InputError, match="different shapes"):
        ask(takes[:1], inputs=["a", ["b", "c"]])
    with pytest.raises(InputError, match=r"float32 of the shape .* different shapes"):
        ask(ONE, inputs=[[1], [2, 3]])
