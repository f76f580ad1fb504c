"""Only who has a key can sign."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from foreign_user import needs_root, open_folder, run_as

from insitu.base.disk.access import share_home
from insitu.base.disk.signatures import OtherKey, derive_key, read_user_key, sign, unsign
from insitu.base.errors import InputError
from insitu.base.paths import Paths

KEY, OTHER = b"k" * 32, b"o" * 32


def test_what_was_signed_is_read() -> None:
    state = {"epoch": 3, "arrays": [["<f4", [2, 3]]]}
    assert unsign(sign(state, KEY), KEY) == state
    assert KEY.hex() not in sign(state, KEY).decode()


def test_another_key_is_told_from_a_forgery() -> None:
    data = sign([1], KEY)
    with pytest.raises(OtherKey):
        unsign(data, OTHER)
    forged = {**json.loads(sign([2], OTHER)), "key": json.loads(data)["key"]}
    with pytest.raises(ValueError, match="its signature is wrong"):
        unsign(json.dumps(forged).encode(), KEY)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"7", b'{"key": 1}', b'{"key": "x", "hmac": []}'])
def test_anything_else_is_an_error(data: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        unsign(data, KEY)


def test_a_users_key_is_made_once_and_private(home: Path) -> None:
    paths = Paths(home)
    key = read_user_key(paths)
    (file,) = paths.keys.iterdir()
    assert read_user_key(paths) == key == file.read_bytes() and len(key) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(paths.keys.stat().st_mode) == 0o700


@pytest.mark.parametrize("change", ["mode", "length"])
def test_a_key_that_others_know_is_refused(home: Path, change: str) -> None:
    read_user_key(Paths(home))
    (file,) = Paths(home).keys.iterdir()
    if change == "mode":
        file.chmod(0o644)
    else:
        file.write_bytes(b"short")
    with pytest.raises(InputError, match="A key must be a file of 32 bytes"):
        read_user_key(Paths(home))


def test_keys_of_a_secret_differ_by_purpose() -> None:
    assert len({derive_key(KEY, "a"), derive_key(KEY, "b"), derive_key(OTHER, "a"), KEY}) == 4


@needs_root
def test_users_of_a_shared_home_have_keys_of_their_own() -> None:
    for folder in open_folder():
        paths = Paths(folder / "home")
        mine = read_user_key(paths)
        share_home(paths, "nogroup")
        theirs = run_as(lambda paths=paths: read_user_key(paths).hex(), user=4242)
        assert len(theirs) == 64 and bytes.fromhex(theirs) != mine
        assert run_as(lambda paths=paths: paths.key(0).read_bytes(), user=4242).startswith("PermissionError")
        assert run_as(lambda paths=paths: paths.key(0).unlink(), user=4242).startswith("PermissionError")
