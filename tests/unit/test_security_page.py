"""docs/explanations/security.md names a test for each attack. They must be there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanations" / "security.md"


def named_tests() -> Iterator[tuple[str, str]]:
    """(file, part of a test's name) of what the last column of each table names."""
    file = ""
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            continue
        for full_name in re.findall(r"`([^`]+)`", line.split("|")[-2]):
            name = re.sub(r"^(\w+/)+(?=test_)", "", full_name)  # without its folder
            place, found, test = name.rpartition("::")
            if not found and name.startswith("test_"):
                place, test = name, ""
            elif not found and not re.fullmatch(r"…?\w+…?", name):
                continue  # a command, or a file that is no test
            file = place.removesuffix(".py") if place.strip("…") else file
            yield file, test.strip("…").removeprefix("test_")


def test_each_test_that_is_named_exists() -> None:
    texts: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        texts[path.stem] = texts.get(path.stem, "") + path.read_text()
    named = list(named_tests())
    assert len(named) > 120
    missing = [
        (file, test)
        for file, test in named
        if file not in texts or (test and not re.search(rf"def test_\w*{test}", texts[file]))
    ]
    assert missing == []
