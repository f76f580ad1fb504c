"""The options of `import` that name a reader of Ray Data."""

from __future__ import annotations

import pytest

from insitu.base.errors import InputError
from insitu.cli.data import find_reader


def test_no_option_is_no_reader_and_a_wrong_one_an_error() -> None:
    assert find_reader(None, None) is None and find_reader(None, []) is None
    found = find_reader("images", ["size=4,5"])
    assert found is not None and found.request.options == {"size": (4, 5)}
    with pytest.raises(InputError, match=r"without --reader"):
        find_reader(None, ["size=4,5"])
    with pytest.raises(InputError, match=r"--reader must be one of"):
        find_reader("lance", None)
