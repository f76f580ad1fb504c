"""Which script `insitu init` writes for which columns."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from insitu.base.errors import InputError
from insitu.base.spec import Column
from insitu.service import FeatureFacts, LabelFacts, choose_label, make_template, render_script
from insitu.service.job_template import JobTemplate, choose_batch, choose_classes, find_image_shape

AGE, JOB, REVIEW = Column("age", "int64"), Column("job", "str"), Column("review", "str")
PICTURE = Column("picture", "uint8", (28, 28, 3))


def label(dtype: str = "int64", values: Any = (0, 1, 2), rows: int = 1000, names: Any = ()) -> LabelFacts:
    return LabelFacts(Column("label", dtype), values, rows, names)


def template(*features: FeatureFacts, of: LabelFacts | None = None, test: str = "") -> JobTemplate:
    return make_template("rows/train", test, "", of or label(), features)


@pytest.mark.parametrize(
    ("facts", "classes"),
    [
        (label("str", ("a", "b")), ("a", "b")),
        (label("bool", (False, True)), (False, True)),
        (label("int64", (0, 1, 2)), (0, 1, 2)),
        (label("uint8", (3, 7)), (3, 7)),
        (label("int64", tuple(range(100)), rows=5000), tuple(range(100))),
        (label("int64", tuple(range(100)), rows=200), None),
        (label("int64", tuple(range(0, 200, 2)), rows=5000), None),
        (label("int64", None), None),
        (label("float32", (0.0, 1.0)), (0.0, 1.0)),
        (label("float32", (0.0, 0.5, 1.0)), None),
        (label("int64", None, names=("cat", "dog")), (0, 1)),
    ],
)
def test_a_label_is_classes_or_a_number(facts: LabelFacts, classes: Any) -> None:
    assert choose_classes(facts) == classes


def test_a_label_that_is_neither_is_refused() -> None:
    with pytest.raises(InputError, match="names classes, up to 1000"):
        choose_classes(label("str", None))
    with pytest.raises(InputError, match="Received: 5 in all rows"):
        choose_classes(label("int64", (5,)))


def test_the_label_is_the_column_of_that_name_unless_another_one_is_given() -> None:
    columns = (AGE, JOB, Column("label", "int64"))
    assert choose_label(columns, None, "rows").name == "label"
    assert choose_label(columns, "job", "rows") is JOB
    with pytest.raises(InputError, match="Received: none, and no column of the name label"):
        choose_label((AGE, JOB), None, "rows")
    with pytest.raises(InputError, match="Give --label with one of age, job"):
        choose_label((AGE, JOB), "pay", "rows")
    with pytest.raises(InputError, match="one value a row"):
        choose_label((AGE, PICTURE), "picture", "rows")
    with pytest.raises(InputError, match="beside the label"):
        choose_label((AGE,), "age", "rows")


@pytest.mark.parametrize(
    ("dtype", "shape", "found"),
    [
        ("uint8", (28, 28), (28, 28, 1)),
        ("uint8", (32, 40, 3), (32, 40, 3)),
        ("uint8", (784,), (28, 28, 1)),
        ("float32", (32, 32, 3), (32, 32, 3)),
        ("uint8", (16,), None),
        ("uint8", (32, 32, 7), None),
        ("float32", (784,), None),
        ("float32", (32, 32), None),
        ("int64", (32, 32, 3), None),
        ("uint8", (), None),
    ],
)
def test_images_are_known_by_their_shape(dtype: str, shape: tuple[int, ...], found: Any) -> None:
    assert find_image_shape(Column("x", dtype, shape)) == found


def test_small_caches_have_some_steps() -> None:
    assert [choose_batch(rows) for rows in (10, 400, 1800, 10_000_000)] == [8, 16, 64, 256]


def test_images_make_a_convolutional_network_of_their_own() -> None:
    made = template(FeatureFacts(AGE), FeatureFacts(PICTURE))
    script = render_script(made, "./job")
    assert made.image is PICTURE and made.left_out == (("age", "the network sees picture alone"),)
    assert "keras.layers.Conv2D(32" in script and "feature_column" not in script and "np." not in script
    assert "Reshape" not in script and "Rescaling(1 / 255)" in script
    dark = template(FeatureFacts(Column("x", "uint8", (64,)), largest=16))
    script = render_script(dark, "./job")
    assert "keras.layers.Reshape((8, 8, 1))" in script and "Rescaling(1 / 16)" in script


def test_numbers_names_and_texts_enter_together() -> None:
    made = template(
        FeatureFacts(REVIEW, 900, words=7.0, many_words=11),
        FeatureFacts(JOB, 30, words=1.0, many_words=2),
        FeatureFacts(Column("zone", "float32", (2,))),
        FeatureFacts(AGE),
    )
    assert [each.name for each in made.numbers] == ["age", "zone"]
    script = render_script(made, "./job")
    assert 'NUMBERS = ["age", "zone"]' in script and 'fc.numeric_column("zone", shape=(2,))' in script
    assert 'categorical_column_with_hash_bucket("job", 128)' in script
    assert "WORDS = 16" in script and "split_words(row[name])" in script


def test_texts_alone_make_a_model_of_texts() -> None:
    script = render_script(template(FeatureFacts(REVIEW, 900, words=7.0, many_words=11)), "./job")
    assert 'row = {"review": row}' in script and "Normalization" not in script


def test_missing_numbers_are_filled_in_sight() -> None:
    assert "nan_to_num" not in render_script(template(FeatureFacts(AGE)), "./job")
    assert "nan_to_num" in render_script(template(FeatureFacts(AGE, has_missing=True)), "./job")


def test_a_number_is_predicted_on_its_own_scale() -> None:
    script = render_script(template(FeatureFacts(AGE), of=label("float32", None)), "./job")
    assert "Normalization(invert=True)" in script and '"mse"' in script and "CLASSES" not in script


def test_lists_of_different_lengths_are_left_out_and_nothing_else_is_refused() -> None:
    lists = FeatureFacts(Column("tokens", "int64[*]"))
    assert template(lists, FeatureFacts(AGE)).left_out[0][0] == "tokens"
    with pytest.raises(InputError, match=r"Received: tokens int64\[\*\] beside the label"):
        template(lists)


@pytest.mark.parametrize("of", [label(), label("str", ("it's", 'a "b"')), label("float64", None)])
@pytest.mark.parametrize("has_missing", [False, True])
@pytest.mark.parametrize(
    "columns",
    [
        ("age",),
        ("job",),
        ("review",),
        ("age", "job"),
        ("age", "review"),
        ("age", "job", "review"),
        ("picture",),
        tuple(f"column {number}" for number in range(40)),
    ],
)
def test_each_script_can_be_read_by_python(columns: Any, has_missing: bool, of: LabelFacts) -> None:
    known = {"job": FeatureFacts(JOB, 3, 1.0, 1), "review": FeatureFacts(REVIEW, 900, 7.0, 11)}
    known |= {"picture": FeatureFacts(PICTURE)}
    features = [known.get(n) or FeatureFacts(Column(n, "float32"), has_missing=has_missing) for n in columns]
    script = render_script(template(*features, of=of, test="rows/test"), "./job")
    ast.parse(script)
    assert ("import re\n" in script) == ("re.findall" in script)
    assert ("import numpy" in script) == ("np." in script)
    assert ("NUMBER_OF_CLASS" in script) == (of.column.dtype == "str")
    assert "\n\n\n\n" not in script and max(map(len, script.splitlines())) <= 110
    for name in columns:
        assert f'"{name}"' in script
