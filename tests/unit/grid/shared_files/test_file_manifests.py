"""Manifests of files: what they say survives, and what is damaged isn't believed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from insitu.base.errors import InputError
from insitu.grid.shared_files import Block, Entry, FileManifest, checksum_block, parse_manifest, split_key
from insitu.grid.shared_files.entries import check_key, is_manifest, parse_block

BLOCK = Block("ab" * 16, 3, checksum_block(b"abc"))
ENTRY = Entry(3, 1234.5678901, 2, (), (BLOCK,))
WRITTEN = FileManifest("v", "d/näme", ENTRY, replaces=7)
CONFIRMED = replace(WRITTEN, entry=replace(ENTRY, version=9), store="0123abcd", generation=2, seen=11)


def test_what_a_manifest_says_comes_back() -> None:
    for manifest in (WRITTEN, CONFIRMED, FileManifest("v", "", Entry(0, 1.0, 16), files=40_000)):
        found = parse_manifest(manifest.encode())
        assert found == manifest and found.key == manifest.key
        assert is_manifest(check_key(manifest.key)) and len(manifest.encode()) < 1000
    assert not is_manifest(BLOCK.key)
    with pytest.raises(InputError):
        parse_block([WRITTEN.key, 3, BLOCK.checksum])  # it is no part of a file


def test_a_key_tells_content_name_and_store_apart() -> None:
    assert split_key(WRITTEN.key) == (WRITTEN.digest, "")
    assert split_key(CONFIRMED.key) == (WRITTEN.digest, "0123abcd")
    moved = replace(CONFIRMED, path="e")
    assert moved.key != CONFIRMED.key and split_key(moved.key) == split_key(CONFIRMED.key)
    other = replace(CONFIRMED, entry=replace(CONFIRMED.entry, modified=1234.5678902))
    assert other.digest != CONFIRMED.digest
    assert CONFIRMED.beside == BLOCK.key and replace(WRITTEN, entry=Entry(0, 1.0)).beside != BLOCK.key
    assert split_key(FileManifest("v", "", Entry(0, 1.0)).key) == ("", "")


def _seal(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return f"{checksum_block(body)}\n".encode() + body


def test_what_is_damaged_or_something_else_is_refused() -> None:
    whole = CONFIRMED.encode()
    for position in range(0, len(whole), 7):
        with pytest.raises(InputError):
            parse_manifest(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
    value = json.loads(whole.partition(b"\n")[2])
    for changed in (
        {**value, "path": "../x"},
        {**value, "volume": ".."},
        {**value, "seen": -1},
        {**value, "files": "many"},
        {**value, "store": "x"},
        {**value, "entry": []},
        {name: value[name] for name in value if name != "generation"},
        [],
        None,
    ):
        with pytest.raises(InputError):
            parse_manifest(_seal(changed))
    for data in (b"", b"\n", b"x" * 100, _seal({})[:-1], b"\xff\xfe\n{}"):
        with pytest.raises(InputError):
            parse_manifest(data)
    assert parse_manifest(_seal(value)) == CONFIRMED
