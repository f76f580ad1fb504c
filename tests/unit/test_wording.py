"""Words go with the number before them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from insitu.base.wording import format_count, inflect

SOURCE = Path(__file__).parents[2] / "src" / "insitu"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes"), (12000, "12,000 nodes")]
)
def test_a_noun_goes_with_its_number(count: int, text: str) -> None:
    assert format_count(count, "node") == text


def test_nouns_and_verbs_may_have_forms_of_their_own() -> None:
    assert [format_count(n, "copy", "copies") for n in (1, 2)] == ["1 copy", "2 copies"]
    assert [inflect(n, "is", "are") for n in (0, 1, 2)] == ["are", "is", "are"]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_text_leaves_the_plural_to_its_reader(path: Path) -> None:
    texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    assert not [text for text in texts if isinstance(text, str) and re.search(r"(?<!\{)\w?\((s|es)\)", text)]
