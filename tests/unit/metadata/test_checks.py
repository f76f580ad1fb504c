from __future__ import annotations

import pytest

from insitu.base.errors import InputError
from insitu.metadata.interface import MAX_KEY_BYTES, encode_key, find_end


def test_the_end_of_a_prefix_comes_after_all_keys_that_begin_with_it():
    for prefix in ("a", "a/", "é", "\U0010ffff", ""):
        start, end = prefix.encode(), find_end(prefix.encode())
        assert start <= (prefix + "\U0010ffff" * 9).encode() < end
    assert find_end(b"a/") == b"a0"


def test_keys_have_a_limit_in_bytes():
    assert encode_key("é" * (MAX_KEY_BYTES // 2)) == "é".encode() * (MAX_KEY_BYTES // 2)
    for key in ("", "é" * (MAX_KEY_BYTES // 2) + "a"):
        with pytest.raises(InputError, match=f"1 to {MAX_KEY_BYTES} bytes"):
            encode_key(key)
