"""Names that can be, and entries as they are sent."""

from __future__ import annotations

from typing import Any

import pytest

from insitu.base.errors import InputError
from insitu.grid.shared_files import (
    BLOCK_BYTES,
    BLOCKS_A_LIST,
    Block,
    Entry,
    checksum_block,
    pack_blocks,
    parse_entry,
    split_path,
    unpack_blocks,
)

BLOCK = Block("0" * 32, 5, checksum_block(b"bytes"))
ENTRY = Entry(5, 1.5, 2, (), (BLOCK,), 7)


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
        "v" + "/x" * 41,
        "v/\ud800",
    ],
)
def test_names_that_lead_elsewhere_are_refused(url: str) -> None:
    with pytest.raises(InputError, match="Received"):
        split_path(url)


def test_entries_arrive_as_they_were_sent() -> None:
    assert parse_entry(ENTRY.to_json()) == ENTRY
    large = Entry(1 << 40, 1.5, 2, (BLOCK,), (BLOCK,), 7)
    assert parse_entry(large.to_json()) == large


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, -1),
        (0, 6),
        (1, float("nan")),
        (1, "1"),
        (2, 0),
        (2, 17),
        (3, {}),
        (3, [BLOCK.to_json()] * 65),
        (4, {}),
        (4, [["x", 5, BLOCK.checksum]]),
        (4, [[BLOCK.key, 0, BLOCK.checksum]]),
        (4, [[BLOCK.key, 5 << 20, BLOCK.checksum]]),
        (4, [[BLOCK.key, 5, "md5:0"]]),
        (4, [[BLOCK.key, 5]]),
        (5, True),
    ],
)
def test_entries_that_cant_be_are_refused(index: int, value: Any) -> None:
    sent = ENTRY.to_json()
    sent[index] = value
    for wrong in (sent, sent[:-1], {}):
        with pytest.raises(InputError, match="Received"):
            parse_entry(wrong)


def test_lists_of_blocks_are_read_as_they_were_written() -> None:
    blocks = tuple(Block(f"{n:032x}", n + 1, checksum_block(b"%d" % n)) for n in range(100))
    packed = pack_blocks(blocks)
    assert unpack_blocks(packed) == blocks and len(packed) == 3600
    assert BLOCKS_A_LIST * 36 <= BLOCK_BYTES < (BLOCKS_A_LIST + 1) * 36
    for wrong in (packed[:-1], bytes(36)):
        with pytest.raises(InputError, match="Received"):
            unpack_blocks(wrong)
