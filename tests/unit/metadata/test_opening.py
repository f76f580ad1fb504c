from __future__ import annotations

from pathlib import Path

import pytest

from insitu.base.errors import InputError
from insitu.metadata import Put, open_store


def test_a_path_is_a_file_of_sqlite(tmp_path: Path):
    made = open_store(tmp_path / "m", "c", create=True)
    made.transact([], [Put("a", b"1")], "0" * 32)
    made.close()
    again = open_store(str(tmp_path / "m"), "c")
    assert again.get(["a"])[0]["a"].value == b"1"
    again.close()


def test_other_stores_are_refused():
    with pytest.raises(InputError, match="etcd://HOST:PORT"):
        open_store("redis://h1:2379", "c")
