"""docs/reference/tf-distribute.md has all public names of `tf.distribute`, and names tests that exist."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "reference" / "tf-distribute.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line[:1] == "|"
]


def codes_in(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def public_names(module: Any, prefix: str = "") -> Iterator[str]:
    """Yield the names of a module, of those inside it, and of the methods of its classes."""
    for name in dir(module):
        value, path = getattr(module, name), prefix + name
        if name.startswith("_"):
            continue
        if isinstance(value, types.ModuleType):
            yield from public_names(value, path + ".")
            continue
        yield path
        if isinstance(value, type):
            yield from (f"{path}.{own}" for own in own_names(value, module))


def own_names(value: type, module: Any) -> Iterator[str]:
    """Yield what a class has beside its bases in the same module and in Python."""
    bases = [
        b for b in value.__mro__[1:] if b.__module__ == "builtins" or getattr(module, b.__name__, 0) is b
    ]
    inherited = {name for base in bases for name in dir(base)}
    yield from (name for name in dir(value) if not name.startswith("_") and name not in inherited)


def spellings(name: str) -> Iterator[str]:
    """Yield how the page may write a name: methods without their module, and those of any strategy as of
    `Strategy`."""
    yield name
    owner, _, member = name.rpartition(".")
    if owner.rpartition(".")[2][:1].isupper():
        yield f"{owner.rpartition('.')[2]}.{member}"
        if owner.endswith("Strategy"):
            yield f"Strategy.{member}"


def test_the_page_has_all_names_of_tf_distribute() -> None:
    tf = pytest.importorskip("tensorflow")
    told = {name for row in ROWS for name in codes_in(row[0])}
    assert {name for name in public_names(tf.distribute) if not told & set(spellings(name))} == set()


def test_the_tests_that_the_page_names_exist() -> None:
    named = {code for row in ROWS for code in codes_in(row[-1]) if "::" in code}
    assert named
    for place in named:
        path, _, test = place.partition("::")
        assert re.search(rf"^def {test}\(", (TESTS / path).read_text(), re.MULTILINE), place


def test_each_row_names_a_test_or_says_that_it_is_refused() -> None:
    for row in ROWS:
        if row[0].startswith("-") or row[-1] == "test":
            continue
        assert "::" in row[-1] or "not here" in row[1], row[0]
