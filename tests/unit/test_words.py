"""The glossary of ARCHITECTURE.md is kept: words that the field doesn't use must not come back as names."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "insitu"
MODULES = sorted(SOURCE.rglob("*.py"))

BANNED = json.loads(Path(__file__).with_name("banned_names.json").read_text())
"""`parts`: words that are never a part of a name, since the field has another for each. `names`: names that
must not come back, by the room that they stood in; "" is every room."""

BANNED_IN_PROSE = re.compile(
    r"\b(tether(ed|s)?|heed(s|ed)?|stiffen(s|ed)?|whereabouts|quarrel(s|led)?|deafen(s|ed)?|sabotage"
    r"|told|anew|whoever|wish(es)?|settle[sd]?|in\s+the\s+midst|undisturbed)\b",
    re.IGNORECASE,
)
"""Words that no comment, docstring or document uses."""


def names_in(path: Path) -> Iterator[str]:
    """Yield each name that the module makes: its own, of classes, functions, parameters and variables."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def parts_of(name: str) -> set[str]:
    """Split a name in snake_case or CamelCase into its words, in small letters."""
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_names_are_the_words_of_the_field(path: Path):
    room = path.relative_to(SOURCE).parts[0]
    banned = {*BANNED["names"][""], *BANNED["names"].get(room, [])}
    names = set(names_in(path))
    assert not names & banned
    assert not {name for name in names if parts_of(name) & set(BANNED["parts"])}


def test_a_name_is_split_into_its_words():
    assert parts_of("_wish_fileOf") == {"wish", "file", "of"}
    assert parts_of("JAXTether") == {"jax", "tether"}


@pytest.mark.parametrize(
    "path",
    # The page on style shows what isn't to be written.
    [
        *MODULES,
        *sorted(ROOT.glob("*.md")),
        *sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/style.md"}),
    ],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_texts_are_free_of_the_old_dialect(path: Path):
    found = [match.group() for match in BANNED_IN_PROSE.finditer(path.read_text())]
    assert not found
