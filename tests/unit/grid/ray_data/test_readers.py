"""What `--reader` and `--reader-option` take."""

from __future__ import annotations

import pytest

from insitu.base.errors import InputError
from insitu.grid.ray_data.readers import READERS, parse_reader


def test_options_become_values() -> None:
    found = parse_reader("images", ["size=28,32", "mode=L", "include_paths=true", "num_cpus=0.5"])
    assert found is not None
    assert found.options == {"size": (28, 32), "mode": "L", "include_paths": True, "num_cpus": 0.5}
    assert found.reader is READERS["images"]
    assert found.describe() == ["images", "include_paths=true", 'mode="L"', "num_cpus=0.5", "size=[28, 32]"]
    assert parse_reader(None, []) is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (None, ["size=1,1"], "without --reader. Add --reader parquet"),
        ("png", [], "--reader must be one of parquet, csv, json.*Received: 'png'"),
        ("csv", ["size=1,1"], "--reader csv takes the options concurrency=TASKS, .*Received: 'size=1,1'"),
        ("images", ["size=28"], "has the form size=HEIGHT,WIDTH. Received: 'size=28'"),
        ("images", ["size=0,4"], "has the form size=HEIGHT,WIDTH"),
        ("images", ["mode"], "Received: 'mode'"),
        ("json", ["lines=yes"], "has the form lines=true|false"),
        ("parquet", ["columns=a,,b"], "has the form columns=NAME"),
        ("parquet", ["num_cpus=-1"], "has the form num_cpus=CPUS"),
        ("text", ["concurrency=0"], "has the form concurrency=TASKS"),
    ],
)
def test_what_is_no_option_of_the_reader_is_refused(
    name: str | None, options: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        parse_reader(name, options)
