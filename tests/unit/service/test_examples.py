"""The examples that can be started."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from insitu.base.errors import InputError
from insitu.service import find_example, list_examples

ROOT = Path(__file__).parents[3]


def test_each_example_has_its_script_and_comes_with_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    found = list_examples()
    assert len({each["name"] for each in found}) == len(found) >= 4
    for each in found:
        assert (Path(each["job_dir"]) / each["command"][0]).is_file()
        assert included[f"examples/{each['folder']}"] == f"insitu/examples/{each['folder']}"
        assert bool(each["data"]) == (each["cache"] != "-") and each["cache"].startswith(each["data"] or "-")


def test_an_unknown_example_is_refused_with_the_names_of_all() -> None:
    assert find_example("quickdraw")["command"][0] == "train.py"
    with pytest.raises(InputError, match=r"stripes, quickdraw, .*Received: nothing"):
        find_example("nothing")
