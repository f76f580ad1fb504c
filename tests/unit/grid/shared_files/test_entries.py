"""Names that can be, and entries as they are sent."""

from __future__ import annotations

from typing import Any

import pytest

from insitu.errors import InputError
from insitu.grid.shared_files import (
    FILE,
    Block,
    Entry,
    checksum_block,
    encode_entries,
    parse_entries,
    parse_entry,
    split_path,
)

BLOCK = Block("0" * 32, 5, checksum_block(b"bytes"))
ENTRY = Entry("a/b", 7, "node-0", FILE, 1.5, 2, (BLOCK,))


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("insitu://", ("", "")),
        ("insitu://v", ("v", "")),
        ("insitu://v//a///b/", ("v", "a/b")),
        ("v/a b/ü.txt", ("v", "a b/ü.txt")),
    ],
)
def test_what_a_url_names(url: str, parts: tuple[str, str]) -> None:
    assert split_path(url) == parts


@pytest.mark.parametrize(
    "url",
    [
        "insitu://../x",
        "insitu://v/../x",
        "v/./a",
        "v/a\nb",
        "v/a\0",
        "-v/a",
        "~/a",
        f"v/{'x' * 256}",
        "v/\ud800",
    ],
)
def test_names_that_lead_elsewhere_are_refused(url: str) -> None:
    with pytest.raises(InputError, match="Received"):
        split_path(url)


def test_entries_arrive_as_they_were_sent() -> None:
    assert parse_entries(encode_entries([ENTRY])) == [ENTRY]
    assert ENTRY.size == 5 and ENTRY.order == (7, "node-0")


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, ""),
        (0, "../a"),
        (0, 3),
        (1, -1),
        (1, True),
        (2, "a/b"),
        (3, "link"),
        (4, float("nan")),
        (5, 0),
        (5, 17),
        (6, {}),
        (6, [["x", 5, BLOCK.checksum]]),
        (6, [[BLOCK.key, 0, BLOCK.checksum]]),
        (6, [[BLOCK.key, 5 << 20, BLOCK.checksum]]),
        (6, [[BLOCK.key, 5, "md5:0"]]),
        (6, [[BLOCK.key, 5]]),
    ],
)
def test_entries_that_cant_be_are_refused(index: int, value: Any) -> None:
    sent = ENTRY.to_json()
    sent[index] = value
    with pytest.raises(InputError, match="Received"):
        parse_entry(sent)


def test_a_list_that_is_none_is_refused() -> None:
    for sent in ({}, [3], [[1, 2]]):
        with pytest.raises(InputError, match="Received"):
            parse_entries(sent)
