"""Imports of images: labels by folders, damaged ones, commands that errors print, nodes that read."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import encode, make_image, scale, write_images, write_tar
from store_hosts import StoreHosts

from insitu.base.context import Context
from insitu.base.errors import DamagedImages, InputError, SourceError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, Column
from insitu.grid import Catalog, bring_up, import_cache
from insitu.grid.caches.dataset_opening import dataset
from insitu.grid.importing.import_sources import find_source_files
from insitu.options import ImportOptions, parse_images

SHAPE = (8, 10, 3)
IMAGE = Column("image", "uint8", SHAPE)


def read_labelled(paths: Paths, name: str, feature: str) -> list[tuple[bytes, int]]:
    """Return (bytes of a feature, label) of each row."""
    rows = dataset(name, features=feature, label="label", paths=paths, context=Context(paths=paths)).batch(
        1000
    )
    return [
        (np.asarray(value).tobytes(), int(label))
        for values, labels in rows.batch(1000)
        for value, label in zip(values, labels, strict=True)
    ]


def make_folders(folder: Path, count: int = 5) -> dict[str, Any]:
    names = [
        f"{part}/{kind}/{i}.png"
        for part in ("train", "test")
        for kind in ("cat", "dog")
        for i in range(count)
    ]
    return dict(zip(names, write_images(folder, names), strict=True))


def checksums(cache: CacheSpec) -> list[tuple[int, str]]:
    return [(info.rows, info.checksum) for info in cache.partitions]


def test_the_folder_of_an_image_makes_its_label(paths: Paths, tmp_path: Path) -> None:
    images = make_folders(tmp_path / "p")
    (cache,) = import_cache(
        paths, "p", [str(tmp_path / "p")], images=SHAPE, label_from_folder=True, partitions=1
    )
    assert cache.columns == (IMAGE, Column("label", "int64")) and cache.labels == ("cat", "dog")
    expected = {(scale(image, SHAPE).tobytes(), int("/dog/" in name)) for name, image in images.items()}
    assert set(read_labelled(paths, "p", "image")) == expected


def test_folders_name_the_classes_of_other_files_too(paths: Paths, tmp_path: Path) -> None:
    for name in ("b/1.npy", "a/1.npy", "a/2.npy"):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "d" / name, np.full(3, ord(name[0])))
    (cache,) = import_cache(paths, "d", [str(tmp_path / "d")], label_from_folder=True, partitions=1)
    assert cache.labels == ("a", "b")
    assert set(read_labelled(paths, "d", "x")) == {(np.int64(97).tobytes(), 0), (np.int64(98).tobytes(), 1)}
    (tmp_path / "e" / "c").mkdir(parents=True)
    np.save(tmp_path / "e" / "c" / "a.npy", np.zeros(2, np.int64))
    more = [str(tmp_path / "e")]
    (cache,) = import_cache(paths, "d", more, append=True, label_from_folder=True)
    assert cache.labels == ("a", "b", "c")
    with pytest.raises(InputError, match=r"Labels come from .* files or of folders.* Leave one out"):
        import_cache(paths, "f", more, label_from_folder=True, label_from_filename=True)


def test_what_is_appended_says_what_names_its_classes(paths: Paths, tmp_path: Path) -> None:
    make_folders(tmp_path / "p", 2)
    source = [str(tmp_path / "p" / "train")]
    import_cache(paths, "p", source, images=SHAPE, label_from_folder=True)
    with pytest.raises(InputError, match=r"Give --label-from-folder if they do"):
        import_cache(paths, "p", source, images=SHAPE, append=True)
    (cache,) = import_cache(paths, "p", source, images=SHAPE, append=True, label_from_folder=True)
    assert cache.rows == 8 and cache.labels == ("cat", "dog")
    with pytest.raises(InputError, match=r"--label-from-filename takes one file per class"):
        import_cache(paths, "q", source, images=SHAPE, label_from_filename=True)
    import_cache(paths, "r", source, images=SHAPE)
    with pytest.raises(InputError, match=r"as it is\. Received: --label-from-folder"):
        import_cache(paths, "r", source, images=SHAPE, append=True, label_from_folder=True)


def command_of(error: pytest.ExceptionInfo[Any]) -> list[str]:
    """Return the arguments of the command that an error prints."""
    return shlex.split(error.value.message.partition("`")[2].rpartition("`")[0])


@pytest.mark.parametrize("folder", ["p", "with space & quote'"])
def test_errors_print_the_command_that_works(paths: Paths, tmp_path: Path, folder: str) -> None:
    make_folders(tmp_path / folder, 2)
    source = str(tmp_path / folder)
    with pytest.raises(SourceError, match="8 images, most often of 12x20") as error:
        import_cache(paths, "p", [source], partitions=3)
    expected = [
        "insitu",
        "import",
        "p",
        source,
        "--partitions",
        "3",
        "--label-from-folder",
        "--images",
        "12x20x3",
    ]
    assert command_of(error) == expected
    with pytest.raises(SourceError) as error:
        import_cache(paths, "p", [f"{source}/train/cat"])
    assert "--label-from-folder" not in command_of(error)
    (tmp_path / folder / "train" / "cat" / "0.png").write_bytes(encode(make_image())[:50])
    with pytest.raises(DamagedImages) as error:
        import_cache(paths, "p", [source], images=SHAPE)
    assert command_of(error) == ["insitu", "import", "p", source, "--images", "8x10x3", "--skip-damaged"]


def test_damaged_images_of_all_folders_are_named(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.grid.sources.file_groups.MOST_FILES", 3)
    make_folders(tmp_path / "p")
    for name in ("train/cat/4.png", "train/dog/0.png", "test/dog/4.png"):
        (tmp_path / "p" / name).write_bytes(b"x")
    source = [str(tmp_path / "p")]
    with pytest.raises(DamagedImages, match=r"3 damaged: .*test/dog/4.*train/cat/4.*train/dog/0"):
        import_cache(paths, "p", source, images=SHAPE)
    assert Catalog(paths).find("p") is None and not list(paths.staging.iterdir())
    with pytest.warns(UserWarning, match=r"left out: 3 damaged: .*test/dog/4.*train/cat/4.*train/dog/0"):
        (cache,) = import_cache(paths, "p", source, images=SHAPE, skip_damaged=True)
    assert cache.rows == 17
    with pytest.raises(InputError, match="--skip-damaged names all images"):
        import_cache(paths, "q", source, images=SHAPE, skip_damaged=True, resume=True)
    with pytest.raises(DamagedImages, match="1 damaged") as error:
        import_cache(paths, "q", [f"{source[0]}/train/cat/4.png"], images=SHAPE, skip_damaged=True)
    assert "`" not in error.value.message


def test_options_of_images_are_refused_for_other_files(paths: Paths, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(
        InputError, match=r"--images decodes .* Received: --images 8x10x3 for .*a\.npy of format npy"
    ):
        import_cache(paths, "a", [str(tmp_path / "a.npy")], images=SHAPE)
    with pytest.raises(
        InputError, match=r"--skip-damaged leaves out .* Received: --skip-damaged for .*a\.npy"
    ):
        import_cache(paths, "a", [str(tmp_path / "a.npy")], skip_damaged=True)


@pytest.mark.parametrize("text", ["64", "64x64", "64x64x2", "0x5x3", "axbx3", "99999x99999x3", "-1x2x3", ""])
def test_a_size_that_no_image_has_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--images is HEIGHTxWIDTHxCHANNELS, such as 64x64x3"):
        parse_images(text)
    assert parse_images("64X48x1 ") == (64, 48, 1)


def test_the_files_of_groups_are_sent_one_by_one(tmp_path: Path) -> None:
    images = make_folders(tmp_path / "p", 2)
    options = ImportOptions("p", (str(tmp_path / "p"),), images=SHAPE)
    assert sorted(find_source_files(options)) == sorted(str(tmp_path / "p" / name) for name in images)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[StoreHosts]:
    with contextlib.closing(StoreHosts(tmp_path, "a", "b", "c")) as found:
        yield found


@pytest.mark.parametrize("damaged", [False, True])
def test_nodes_read_groups_of_images(
    head: Paths, hosts: StoreHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    monkeypatch.setattr("insitu.grid.sources.file_groups.MOST_FILES", 3)
    make_folders(tmp_path / "p")
    source, options = [str(tmp_path / "p")], {"images": SHAPE, "label_from_folder": True, "partitions": 6}
    if damaged:
        for name in ("train/cat/4.png", "train/dog/0.png", "test/dog/4.png"):
            (tmp_path / "p" / name).write_bytes(b"x")
        with pytest.raises(DamagedImages, match=r"3 damaged: ") as error:
            import_cache(head, "p", source, remote=hosts.remote(), read_on="nodes", **options)
        assert "--skip-damaged" in command_of(error) and Catalog(head).find("p") is None
        options["skip_damaged"] = True
    local = Paths(tmp_path / "local")
    bring_up(local, 3)
    with pytest.warns(UserWarning) if damaged else contextlib.nullcontext() as warned:
        (cache,) = import_cache(head, "p", source, remote=hosts.remote(), read_on="nodes", **options)
        (expected,) = import_cache(local, "p", source, **options)
    assert checksums(cache) == checksums(expected) and cache.labels == ("cat", "dog")
    assert cache.rows == (17 if damaged else 20)
    if warned:
        found = [str(each.message) for each in warned]
        assert len(found) == 2 and found[0] == found[1]


def test_samples_with_texts_and_a_damaged_image(paths: Paths, tmp_path: Path) -> None:
    members: dict[str, bytes] = {}
    for number in range(6):
        members |= {f"{number}.png": encode(make_image(number)), f"{number}.txt": b"text"}
    members["0.png"] = members["4.png"] = b"x"
    path = str(write_tar(tmp_path / "a.tar", members))
    with pytest.raises(SourceError, match="most often of 12x20") as error:
        import_cache(paths, "a", [path])
    assert command_of(error) == ["insitu", "import", "a", path, "--images", "12x20x3"]
    with pytest.raises(DamagedImages, match=r"2 damaged: .*a\.tar: 0\.png is no .*4\.png is no"):
        import_cache(paths, "a", [path], images=SHAPE)
    with pytest.warns(UserWarning, match="left out: 2 damaged"):
        (cache,) = import_cache(paths, "a", [path], images=SHAPE, skip_damaged=True)
    assert cache.rows == 4 and cache.columns == (IMAGE, Column("text", "str"))
