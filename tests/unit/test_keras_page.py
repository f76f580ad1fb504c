"""docs/reference/keras.md names cases that exist, and each case that is refused."""

from __future__ import annotations

import re
from pathlib import Path

from keras_cases import CASES
from keras_known import KNOWN

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "keras.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")]


def test_the_page_names_cases_that_exist() -> None:
    last_cells = [row.split("|")[-2] for row in ROWS]
    named = {name for cell in last_cells for name in re.findall(r"`(\w+)`", cell)}
    assert named and named <= CASES.keys()


def test_the_page_says_what_is_refused() -> None:
    refused = {case for cases in KNOWN.values() for case, status in cases.items() if status == "refused"}
    told = {case for row in ROWS if "refused" in row for case in re.findall(r"`(\w+)`", row)}
    assert refused <= told
