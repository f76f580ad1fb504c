"""What is particular to TFRecord; `test_sources.py` has what all formats do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_writer import encode_example, encode_sequence, image_records, write_records

from insitu.base.errors import InputError, SourceError
from insitu.base.paths import Paths
from insitu.base.spec import Column
from insitu.grid import import_cache
from insitu.grid.partitions import ragged_rows
from insitu.grid.sources.base import SourceOptions
from insitu.grid.sources.tfrecord import TfrecordSource

IMAGES = "image:uint8[4,4]=image_raw,label:int64"


def read(path: Path, features: str, block_bytes: int = 1 << 20, start: int = 0) -> dict[str, Any]:
    source = TfrecordSource(path, SourceOptions(features=features))
    found: dict[str, list[Any]] = {column.name: [] for column in source.columns}
    for block in source.blocks(block_bytes, start):
        for column in source.columns:
            values = block.columns[column.name]
            if column.dtype.endswith("[*]"):
                values = [row.tolist() for row in ragged_rows(values, np.dtype(column.dtype[:-3]))]
            elif column.dtype == "str":
                values = values.to_pylist()
            assert len(values) == block.rows
            found[column.name].extend(values)
    return found


@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecord.gz"])
def test_images_and_labels(tmp_path: Path, name: str):
    images, labels, records = image_records(500)
    write_records(tmp_path / name, records)
    source = TfrecordSource(tmp_path / name, SourceOptions(features=IMAGES))
    assert source.columns == (Column("image", "uint8", (4, 4)), Column("label", "int64"))
    assert 400 < source.expected_rows < 600
    found = read(tmp_path / name, IMAGES, 3000)
    np.testing.assert_array_equal(np.stack(found["image"]), images)
    np.testing.assert_array_equal(found["label"], labels)


def test_kinds_and_dtypes(tmp_path: Path):
    record = encode_example(
        {
            "text": ("bytes", ["é".encode()]),
            "raw": ("bytes", [np.array([1.5, -2], ">f8").astype("<f8").tobytes()]),
            "flags": ("int64", [1, 0]),
            "small": ("int64", [-128]),
            "half": ("float", [0.5]),
            "tokens": ("int64", [1, 300, -1]),
        }
    )
    write_records(tmp_path / "a.tfrecord", [record])
    features = (
        "text:str,r:float64[2]=raw,flags:bool[2],small:int8,half:float16,tokens:int32[*],none:float32[*]"
    )
    found = read(tmp_path / "a.tfrecord", features)
    assert found["text"] == ["é"] and found["r"][0].tolist() == [1.5, -2]
    assert found["flags"][0].tolist() == [True, False] and found["small"][0] == -128
    assert found["half"][0] == 0.5 and found["half"][0].dtype == np.float16
    assert found["tokens"] == [[1, 300, -1]] and found["none"] == [[]]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(
            st.text(max_size=5), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), st.integers(0, 1000)
        ),
        min_size=1,
        max_size=60,
    ),
    block_bytes=st.integers(1, 3000),
    at=st.integers(0, 60),
)
def test_rows_of_any_layouts_are_read_from_any_block_on(tmp_path: Path, rows, block_bytes: int, at: int):
    """Also more layouts of records of one length than are compared with."""
    path = tmp_path / "a.tfrecord"
    write_records(
        path,
        [
            encode_example({"t": ("bytes", [t.encode()]), "n": ("int64", n), "k": ("int64", [k])})
            for t, n, k in rows
        ],
    )
    features = "t:str,n:int64[*],k:int64"
    found = read(path, features, block_bytes)
    assert list(zip(found["t"], found["n"], found["k"], strict=True)) == rows
    blocks = list(TfrecordSource(path, SourceOptions(features=features)).blocks(block_bytes))
    block = blocks[at % len(blocks)]
    done = sum(b.rows for b in blocks[: at % len(blocks) + 1])
    assert read(path, features, block_bytes, block.next_start)["k"] == [k for _, _, k in rows[done:]]


def test_many_layouts_of_one_length(tmp_path: Path):
    records = []
    for i in range(50):
        values = [200] * (i % 25) + [1] * (50 - 2 * (i % 25))
        records.append(encode_example({"n": ("int64", values), "k": ("int64", [i])}))
    assert len({len(record) for record in records}) == 1
    write_records(tmp_path / "a.tfrecord", [*records, b"", b""])
    found = read(tmp_path / "a.tfrecord", "n:int64[*],k:int64[*]")
    assert found["k"] == [[i] for i in range(50)] + [[], []]
    assert [len(n) for n in found["n"][:50]] == [50 - i % 25 for i in range(50)]


def test_steps_of_a_sequence(tmp_path: Path):
    steps = [("float", [1.0, 2.0]), ("float", [3.0, 4.0])]
    records = [
        encode_sequence({"label": ("int64", [7])}, {"x": steps, "words": [("bytes", [b"ab"])]}),
        encode_sequence({"label": ("int64", [8])}, {"x": steps, "words": []}),
    ]
    write_records(tmp_path / "a.tfrecord", records)
    found = read(tmp_path / "a.tfrecord", "x:float32[2,2],label:int64,words:uint8[*]")
    assert found["x"][1].tolist() == [[1, 2], [3, 4]] and found["label"] == [7, 8]
    assert found["words"] == [[97, 98], []]


GOOD = {
    "n": ("int64", [1]),
    "f": ("float", [1.0, 2.0]),
    "b": ("bytes", [b"\xff\xfe"]),
    "t": ("bytes", [b"a"]),
}


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            "x:int64",
            r"lacks the feature; it has b \(a bytes_list of 1 value\), f \(a float_list of 2 values\)",
        ),
        ("n:float32", "it is a int64_list of 1 value. Ask for such as n:int64"),
        ("f:int64[2]", "Ask for such as f:float32"),
        ("f:float32", "has 1 value; it is a float_list of 2 values"),
        ("n:str", "a text is one value of bytes"),
        ("b:str", r"text is in UTF-8: invalid start byte. Ask for b:uint8\[\*\]"),
        ("b:uint8[3]", "has 3 bytes; it has 2"),
        ("t:int16[*]", "has a multiple of 2 bytes; it has 1"),
        ("b:bool[2]", "a byte of 0 or 1; one is 255"),
    ],
)
def test_what_doesnt_fit_names_record_and_feature(tmp_path: Path, features: str, message: str):
    write_records(tmp_path / "a.tfrecord", [encode_example(GOOD)])
    with pytest.raises(
        SourceError, match=rf"a\.tfrecord: feature .* of record 0 at byte 0 must fit.*{message}"
    ):
        TfrecordSource(tmp_path / "a.tfrecord", SourceOptions(features=features))


def test_a_number_beyond_its_dtype_names_its_record(tmp_path: Path):
    records = [encode_example({"n": ("int64", [n])}) for n in (1, 127, 128, 1)]
    write_records(tmp_path / "a.tfrecord", records)
    with pytest.raises(SourceError, match=r"'n' of record 2 at byte .*in \[-128, 127\]; one is 128"):
        read(tmp_path / "a.tfrecord", "n:int8")


@pytest.mark.parametrize(("asked", "advice"), [("n:int64", "n:int64[*]=n"), ("t:str", "t:uint8[*]=t")])
def test_what_helps_if_some_records_lack_a_feature_is_named(tmp_path: Path, asked: str, advice: str):
    write_records(tmp_path / "a.tfrecord", [encode_example(GOOD), encode_example({"f": GOOD["f"]})])
    with pytest.raises(SourceError, match=rf"record 1 .*If records differ, ask for {re.escape(advice)}\."):
        read(tmp_path / "a.tfrecord", asked)
    assert read(tmp_path / "a.tfrecord", advice)[advice[0]][1] == []


def test_suggested_features_fit_later_records(tmp_path: Path):
    early = {"image": ("bytes", [b"\xff" * 3000]), "score": ("float", [1.0]), "t": ("bytes", [b"a"]), **GOOD}
    records = [encode_example(early)] * 40
    records.append(
        encode_example({"image": ("bytes", [b"\xff"]), "f": ("float", [1.0]), "late": ("int64", [1])})
    )
    write_records(tmp_path / "a.tfrecord", records)
    with pytest.raises(SourceError, match="fits its first 41 records") as caught:
        TfrecordSource(tmp_path / "a.tfrecord", SourceOptions())
    suggested = str(caught.value).partition("--features '")[2].partition("'")[0]
    assert suggested == (
        "b:uint8[*],f:float32[*],image:uint8[*],late:int64[*],n:int64[*],score:float32[*],t:uint8[*]"
    )
    found = read(tmp_path / "a.tfrecord", suggested)
    assert found["score"] == [[1.0]] * 40 + [[]] and found["late"] == [[]] * 40 + [[1]]


def test_without_features_some_that_fit_are_named(tmp_path: Path):
    write_records(tmp_path / "a.tfrecord", [encode_example(GOOD)])
    with pytest.raises(
        SourceError, match=r"--features 'b:uint8\[\*\],f:float32\[2\],n:int64,t:str'"
    ) as caught:
        TfrecordSource(tmp_path / "a.tfrecord", SourceOptions())
    suggested = str(caught.value).partition("--features '")[2].partition("'")[0]
    assert read(tmp_path / "a.tfrecord", suggested)["t"] == ["a"]


def test_other_records_are_refused(tmp_path: Path):
    write_records(tmp_path / "a.tfrecord", [b"no message"])
    with pytest.raises(SourceError, match=r"record 0 at byte 0 is no tf.train.Example"):
        TfrecordSource(tmp_path / "a.tfrecord", SourceOptions(features="n:int64"))


def test_an_import_of_records(tmp_path: Path):
    _, _, records = image_records(100)
    write_records(tmp_path / "part.tfrecord-00000-of-00002", records[:60])
    write_records(tmp_path / "part.tfrecord-00001-of-00002", records[60:])
    paths = Paths(tmp_path / "home")
    (cache,) = import_cache(paths, "mnist", [str(tmp_path / "part*")], features=IMAGES, partitions=2)
    assert cache.rows == 100
    assert cache.columns == (Column("image", "uint8", (4, 4)), Column("label", "int64"))
    (more,) = import_cache(paths, "mnist", [str(tmp_path / "part*")], features=IMAGES, append=True)
    assert more.rows == 200


def test_options_of_another_format_are_refused(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"--features says which columns.*a\.npy of format npy"):
        import_cache(Paths(tmp_path / "home"), "a", [str(tmp_path / "a.npy")], features="n:int64")


def test_values_equal_those_of_tensorflow(tmp_path: Path):
    """Records that TensorFlow has written, and its own parser beside this one."""
    import tensorflow as tf

    rng = np.random.default_rng(0)
    records = []
    for _ in range(200):
        feature = {
            "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[rng.bytes(12)])),
            "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(rng.integers(-300, 300))])),
            "x": tf.train.Feature(float_list=tf.train.FloatList(value=rng.normal(size=3))),
            "ids": tf.train.Feature(
                int64_list=tf.train.Int64List(value=rng.integers(0, 1 << 40, rng.integers(0, 5)))
            ),
        }
        records.append(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    expected = tf.io.parse_example(
        tf.constant(records),
        {
            "image": tf.io.FixedLenFeature([], tf.string),
            "label": tf.io.FixedLenFeature([], tf.int64),
            "x": tf.io.FixedLenFeature([3], tf.float32),
            "ids": tf.io.RaggedFeature(tf.int64),
        },
    )
    found = read(path, "image:uint8[12],label:int64,x:float32[3],ids:int64[*]", 4000)
    raw = tf.io.decode_raw(expected["image"], tf.uint8).numpy()
    np.testing.assert_array_equal(np.stack(found["image"]), raw)
    np.testing.assert_array_equal(found["label"], expected["label"].numpy())
    np.testing.assert_array_equal(np.stack(found["x"]), expected["x"].numpy())
    assert found["ids"] == expected["ids"].to_list()
    with tf.io.TFRecordWriter(str(path), "GZIP") as writer:
        for record in records:
            writer.write(record)
    assert read(path, "label:int64")["label"] == found["label"]
