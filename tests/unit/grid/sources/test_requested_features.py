from __future__ import annotations

import pytest

from insitu.base.errors import InputError
from insitu.base.spec import Column
from insitu.grid.sources.tfrecord import RequestedFeature, check_reading, parse_features


def test_columns_are_named_with_their_features():
    image, label, tokens, text = parse_features(
        "image:uint8[28, 28]=image/raw, label:int64 ,tokens:int32[*]=t,text:str"
    )
    assert image == RequestedFeature("image", "uint8", (28, 28), "image/raw")
    assert label == RequestedFeature("label", "int64", (), "label")
    assert (image.column, image.values) == (Column("image", "uint8", (28, 28)), 784)
    assert tokens.column == Column("tokens", "int32[*]")
    assert text.column == Column("text", "str")
    assert str(image) == "image:uint8[28,28]=image/raw" and str(tokens) == "tokens:int32[*]=t"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "NAME:DTYPE"),
        ("label", "Received: 'label'"),
        ("label:int64,", "Received: ''"),
        ("x:int65", "Received: 'int65'"),
        ("x:uint8[0]", "whole numbers, 1 at least"),
        ("x:uint8[2,*]", "whole numbers, 1 at least"),
        ("x:uint8[99999,99999]", "whole numbers, 1 at least"),
        ("x:str[2]", "one text a row"),
        ("x:int64,x:float32=y", "x twice"),
    ],
)
def test_what_names_no_columns_is_refused(text: str, message: str):
    with pytest.raises(InputError, match=r"--features|dtype|shape|text") as caught:
        parse_features(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("side", [0, -1, 5000])
def test_images_have_a_side(side: int):
    check_reading(None, 28)
    with pytest.raises(InputError, match=f"Received: {side}"):
        check_reading(None, side)
