"""Folders of images: a row each, in the order of their names; damaged ones are named together."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import numpy as np
import pytest
from image_files import encode, make_image, scale, write_images

from insitu.base.errors import DamagedImages, SizeNeeded, SourceError
from insitu.base.spec import Column
from insitu.grid.sources import FileGroup, find_sources, folder_name, group_images, open_sources
from insitu.grid.sources.base import Source, SourceOptions
from insitu.grid.sources.images import ImagesSource

SHAPE = (8, 10, 3)


def opened(source: object, **options: object) -> list[Source]:
    files = group_images(find_sources([str(source)], None))
    return open_sources(files, SourceOptions(**{"images": SHAPE, **options}))  # type: ignore[arg-type]


def read(source: Source, block_bytes: int = 1 << 20, start: int = 0) -> np.ndarray:
    return np.concatenate([block.columns["image"] for block in source.blocks(block_bytes, start)])


@pytest.mark.parametrize("block_bytes", [1, 1000, 1 << 20])
def test_rows_are_the_images_in_the_order_of_their_names(tmp_path: Path, block_bytes: int) -> None:
    names = [f"{i:02}.png" for i in range(40)]
    images = write_images(tmp_path, names)
    (source,) = opened(tmp_path)
    assert source.columns == (Column("image", "uint8", SHAPE),) and source.expected_rows == 40
    expected = np.stack([scale(image, SHAPE) for image in images])
    blocks = list(source.blocks(block_bytes))
    assert blocks[-1].source_bytes == source.path.stat().st_size and blocks[-1].next_start == 40
    np.testing.assert_array_equal(np.concatenate([b.columns["image"] for b in blocks]), expected)
    for block in blocks[:: max(1, len(blocks) // 3)]:
        if block.next_start < 40:
            np.testing.assert_array_equal(
                read(source, block_bytes, block.next_start), expected[block.next_start :]
            )


def test_names_may_hold_anything(tmp_path: Path) -> None:
    names = ["a b.png", "line\nend.png", "ünï 猫.png", "quo'te\".png", "UPPER.PNG", os.fsdecode(b"\xff.png")]
    images = dict(zip(names, write_images(tmp_path, names), strict=True))
    (source,) = opened(tmp_path)
    assert [file.name for file in source.path.files] == sorted(names)
    expected = np.stack([scale(images[name], SHAPE) for name in sorted(names)])
    np.testing.assert_array_equal(read(source), expected)
    again = FileGroup.parse(source.path.address)
    assert again.files == source.path.files and again.stat() == source.path.stat()


def test_a_group_has_files_of_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu.grid.sources.file_groups.MOST_FILES", 4)
    names = [f"train/{kind}/{i}.png" for kind in ("cat", "dog") for i in range(6)]
    write_images(tmp_path, [*names, "train/root.png"])
    found = [source.path for source in opened(tmp_path)]
    assert [(folder_name(group), len(group.files)) for group in found] == [
        *(("cat", 4), ("cat", 2), ("dog", 4), ("dog", 2), ("train", 1)),
    ]


def test_all_damaged_images_of_a_group_are_named(tmp_path: Path) -> None:
    images = write_images(tmp_path, [f"{i:02}.png" for i in range(30)])
    (tmp_path / "03.png").write_bytes(encode(images[3])[:100])
    (tmp_path / "20.png").write_bytes(b"")
    (tmp_path / "25.png").write_text("hello")
    (source,) = opened(tmp_path)
    with pytest.raises(DamagedImages) as error:
        read(source)
    assert [text.partition(" is ")[0] for text in error.value.problems] == [
        str(tmp_path / f"{i}.png") for i in ("03", "20", "25")
    ]
    assert "03.png is truncated" in error.value.message and "20.png is empty" in error.value.message
    (source,) = opened(tmp_path, skip_damaged=True)
    kept = [scale(image, SHAPE) for i, image in enumerate(images) if i not in (3, 20, 25)]
    np.testing.assert_array_equal(read(source, 1000), np.stack(kept))
    assert source.skipped == list(error.value.problems)  # type: ignore[attr-defined]


def test_a_message_names_twenty_damaged_images(tmp_path: Path) -> None:
    for number in range(23):
        (tmp_path / f"{number:02}.png").write_bytes(b"x")
    (source,) = opened(tmp_path)
    with pytest.raises(DamagedImages, match=r"23 damaged: .*19\.png is no [^;]*; and 3 more$") as error:
        read(source)
    assert "20.png" not in error.value.message


def test_without_a_size_the_most_common_one_is_suggested(tmp_path: Path) -> None:
    write_images(tmp_path, ["a.png", "b.png"], size=(30, 10))
    write_images(tmp_path, ["c.png"])
    with pytest.raises(SizeNeeded, match=r"3 images, most often of 10x30") as error:
        opened(tmp_path, images=None)
    assert error.value.shape == "10x30x3"
    with pytest.raises(SizeNeeded):
        ImagesSource(FileGroup([tmp_path / "a.png"]), SourceOptions())
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(b"x")
    with pytest.raises(SizeNeeded, match=r"3 images, of unknown sizes") as error:
        opened(tmp_path, images=None)
    assert error.value.shape == "224x224x3"


def test_a_file_that_cannot_be_read_is_no_damaged_image(tmp_path: Path) -> None:
    write_images(tmp_path, ["a.png", "b.png"])
    (source,) = opened(tmp_path, skip_damaged=True)
    (tmp_path / "b.png").unlink()
    with pytest.raises(SourceError, match=r"b\.png can't be read: No such file") as error:
        read(source)
    assert not isinstance(error.value, DamagedImages)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    write_images(tmp_path, ["a.png"])
    (tmp_path / "a.png").chmod(0)
    with pytest.raises(SourceError, match=r"a\.png can't be read: Permission denied"):
        read(*opened(tmp_path))


def test_images_behind_urls_are_read(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    folder = f"/pictures/{tmp_path.name}"
    images = [make_image(seed) for seed in range(3)]
    for number, image in enumerate(images):
        files.pipe(f"{folder}/cat/{number}.png", encode(image))
    (source,) = opened(f"memory:/{folder}")
    np.testing.assert_array_equal(read(source), np.stack([scale(image, SHAPE) for image in images]))
    assert folder_name(source.path) == "cat"
    assert FileGroup.parse(source.path.address).stat() == source.path.stat()


def test_folders_without_images_and_with_other_files(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"holds no file that ends in .*\.jpg.* Received: no files"):
        find_sources([str(tmp_path)], None)
    write_images(tmp_path, ["a.png"])
    (tmp_path / "notes.txt").write_text("not meant")
    (tmp_path / ".hidden.png").write_text("not meant")
    assert [file.name for file, _ in find_sources([str(tmp_path)], None)] == ["a.png"]
    (tmp_path / "labels.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SourceError, match=r"several formats: csv, images\..* --format"):
        find_sources([str(tmp_path)], None)
    assert [file.name for file, _ in find_sources([str(tmp_path)], "images")] == ["a.png"]
