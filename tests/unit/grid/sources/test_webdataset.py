"""Archives of samples: members of one name are a row; what is missing or damaged is named."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import encode, make_image, scale, write_tar

from insitu.base.errors import DamagedImages, SizeNeeded, SourceError
from insitu.base.spec import Column
from insitu.grid.sources import find_sources, open_sources
from insitu.grid.sources.base import Source, SourceOptions

SHAPE = (6, 8, 3)


def opened(path: Path, **options: Any) -> Source:
    (source,) = open_sources(find_sources([str(path)], None), SourceOptions(**{"images": SHAPE, **options}))
    return source


def read(source: Source, block_bytes: int = 1 << 20, start: int = 0) -> dict[str, Any]:
    blocks = list(source.blocks(block_bytes, start))
    return {
        column.name: [value for block in blocks for value in block.columns[column.name].tolist()]
        for column in source.columns
    }


def npy(array: np.ndarray) -> bytes:
    sink = io.BytesIO()
    np.save(sink, array)
    return sink.getvalue()


def sample(number: int) -> dict[str, bytes]:
    meta = {
        "width": number,
        "score": None if number % 3 else 1.5,
        "user": {"name": f"u{number}"},
        "box": [1, 2],
    }
    return {
        "png": encode(make_image(number)),
        "cls": f"{number % 4}\n".encode(),
        "json": json.dumps(meta).encode(),
        "txt": f"é {number}".encode(),
        "npy": npy(np.full((2, 3), number, ">f4")),
    }


def write(path: Path, rows: int, mode: str = "w", **changes: dict[str, bytes | None]) -> Path:
    """Write `rows` samples. `changes` names members, such as `_3`, and what takes their place, or None."""
    members: dict[str, bytes] = {}
    for number in range(rows):
        for kind, data in {**sample(number), **changes.get(f"_{number}", {})}.items():
            if data is not None:
                members[f"part/{number:04}.{kind}"] = data
    return write_tar(path, members, mode)


@pytest.mark.parametrize(("name", "mode"), [("a.tar", "w"), ("a.tar.gz", "w:gz"), ("a.tgz", "w:gz")])
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_members_of_one_name_are_a_row(tmp_path: Path, name: str, mode: str, block_bytes: int) -> None:
    source = opened(write(tmp_path / name, 50, mode))
    assert source.columns == (
        *(Column("image", "uint8", SHAPE), Column("label", "int64"), Column("width", "int64")),
        *(Column("score", "float64"), Column("user.name", "str"), Column("box", "int64", (2,))),
        *(Column("text", "str"), Column("x", "float32", (2, 3))),
    )
    found = read(source, block_bytes)
    images = [scale(make_image(number), SHAPE).tolist() for number in range(50)]
    assert found["image"] == images and found["label"] == [number % 4 for number in range(50)]
    assert found["width"] == list(range(50)) and found["text"] == [f"é {number}" for number in range(50)]
    assert found["user.name"][7] == "u7" and found["box"][7] == [1, 2] and found["x"][7][1] == [7.0] * 3
    assert np.isnan(found["score"][1]) and found["score"][3] == 1.5
    assert read(source, block_bytes, 20)["width"] == list(range(20, 50))


def test_a_part_of_a_name_names_a_column(tmp_path: Path) -> None:
    data = encode(make_image())
    members = {"1.left.png": data, "1.right.JPG": data, "1.a.cls": b"3", "1.meta.json": b'{"k": "v"}'}
    source = opened(write_tar(tmp_path / "a.tar", {**members, "._1.png": b"of macOS"}))
    assert [column.name for column in source.columns] == ["left", "right", "a", "meta.k"]
    assert read(source)["meta.k"] == ["v"]
    with pytest.raises(SourceError, match=r"Received: \.png and \.jpg for column 'image' of sample '1'"):
        opened(write_tar(tmp_path / "b.tar", {"1.png": data, "1.jpg": data}))
    with pytest.raises(
        SourceError, match=r"1\.json: each column comes from one member.* 'label' from several"
    ):
        opened(write_tar(tmp_path / "c.tar", {"1.cls": b"1", "1.json": b'{"label": 2}'}))


def test_without_a_size_one_is_suggested(tmp_path: Path) -> None:
    with pytest.raises(SizeNeeded, match=r"a\.tar with images, most often of 12x20") as error:
        opened(write(tmp_path / "a.tar", 3), images=None)
    assert error.value.shape == "12x20x3"
    source = opened(write_tar(tmp_path / "b.tar", {"1.txt": b"no image", "2.txt": b""}), images=None)
    assert read(source) == {"text": ["no image", ""]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cls": None, "json": None}, r"sample 'part/0003', which lacks \.cls, \.json\. Leave"),
        ({"jpg": b"", "png": None}, r"sample 'part/0003', which lacks \.png and has \.jpg"),
        ({"mp4": b""}, r"Received: 'part/0003\.mp4', of another kind"),
        ({"cls": b"cat"}, r"part/0003\.cls must be a whole number, .* Received: b'cat'"),
        ({"cls": b"9" * 30}, r"part/0003\.cls must be a whole number"),
        ({"json": b"{"}, r"part/0003\.json must be a JSON object"),
        ({"json": b"[1]"}, r"part/0003\.json must be a JSON object\. Received: list at its top"),
        ({"json": b'{"other": 1}'}, r"keys of \.json .* differ in box, other, score, user\.name, width"),
        ({"txt": b"\xff"}, r"part/0003\.txt must be text in UTF-8"),
        ({"npy": npy(np.zeros(2, "f4"))}, r"'x' has rows of float32\[2, 3\].* Received: float32\[2\]"),
        ({"npy": npy(np.array(["a"]))}, r"part/0003\.npy must hold numbers"),
        ({"npy": npy(np.array([{}], object))}, r"part/0003\.npy: column 'npy' holds Python objects"),
        ({"npy": b"\x93NUMPY"}, r"part/0003\.npy is not a whole \.npy file"),
    ],
)
@pytest.mark.parametrize("number", [3, 300])
def test_bad_members_are_named(tmp_path: Path, change: Any, message: str, number: int) -> None:
    path = write(tmp_path / "a.tar", number + 2, **{f"_{number}": change})
    with pytest.raises(SourceError, match=message.replace("0003", f"{number:04}")):
        read(opened(path))


def test_damaged_images_are_named_together_or_left_out(tmp_path: Path) -> None:
    cut = sample(4)["png"][:200]
    path = write(tmp_path / "a.tar", 300, _4={"png": cut}, _290={"png": b""})
    with pytest.raises(DamagedImages) as error:
        read(opened(path))
    assert error.value.problems[1] == f"{path}: part/0290.png is empty" and len(error.value.problems) == 2
    source = opened(path, skip_damaged=True)
    assert read(source)["width"] == [n for n in range(300) if n not in (4, 290)]
    assert source.skipped == list(error.value.problems)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
@pytest.mark.parametrize("part", [0.2, 0.5, 0.99])
def test_a_truncated_archive_is_refused(tmp_path: Path, name: str, part: float) -> None:
    path = write(tmp_path / name, 200, "w:gz" if name.endswith("gz") else "w")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(SourceError, match=r"a\.tar.* (truncated|can't be unpacked)"):
        read(opened(path))


def test_an_archive_that_ends_or_breaks_between_members_is_refused(tmp_path: Path) -> None:
    """tarfile takes both for the end, so rows would be missing in silence."""
    path = write(tmp_path / "a.tar", 20)
    with tarfile.open(path) as archive:
        header = archive.getmembers()[60].offset
    data = path.read_bytes()
    path.write_bytes(data[:header])
    with pytest.raises(SourceError, match="no whole archive of tar"):
        read(opened(path))
    path.write_bytes(data[:header] + b"junk" * 128 + data[header + 512 :])
    with pytest.raises(SourceError, match="no whole archive of tar"):
        read(opened(path))


def test_what_is_no_archive_of_samples_is_refused(tmp_path: Path) -> None:
    for name, data in (("a.tar", b"hello" * 300), ("b.tar.gz", gzip.compress(b"hello")), ("c.tgz", b"hello")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SourceError, match=name):
            opened(tmp_path / name)
    with pytest.raises(SourceError, match=r"d\.tar has no members"):
        opened(write_tar(tmp_path / "d.tar", {}))
    with tarfile.open(tmp_path / "e.tar", "w") as archive:
        link = tarfile.TarInfo("1.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(SourceError, match=r"'1\.png', which is no file, such as a link"):
        opened(tmp_path / "e.tar")


def test_whole_and_other_numbers_of_several_archives_agree(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"1.json": b'{"v": 1}'})
    write_tar(tmp_path / "b.tar", {"1.json": b'{"v": 1.5}'})
    sources = open_sources(find_sources([str(tmp_path)], None), SourceOptions())
    assert [read(source)["v"] for source in sources] == [[1.0], [1.5]]
    assert {source.columns[0].dtype for source in sources} == {"float64"}


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        ("1", "1.5", "'v' is of int64. Received: .*1.5"),
        ("1", "true", "'v' is of int64. Received: "),
        ("1", '"1"', "'v' is of int64. Received: "),
        ('"a"', "1", "'v' is of string. Received: "),
        ("1.5", "true", "'v' is of double. Received: "),
        ("[1, 2]", "[1, 2.5]", "'v' is of list.*int64"),
        ("[1, 2]", "[1]", "mixed shapes|mixed types"),
        ("1", "null", "has no value in row 399"),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_a_later_value_of_another_type_is_an_error(
    tmp_path: Path, first: str, later: str, message: str, block_bytes: int
) -> None:
    members = {f"{i:04}.json": f'{{"v": {first}}}'.encode() for i in range(400)}
    path = write_tar(tmp_path / "a.tar", {**members, "0399.json": f'{{"v": {later}}}'.encode()})
    with pytest.raises(SourceError, match=message):
        read(opened(path), block_bytes)
    path = write_tar(tmp_path / "b.tar", {**members, "0399.json": f'{{"v": {first}}}'.encode()})
    assert len(read(opened(path))["v"]) == 400
