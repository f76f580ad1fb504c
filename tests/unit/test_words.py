"""The glossary of ARCHITECTURE.md is kept: words that the field doesn't use must not come back as names. And
each field of a dataclass says what it is."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

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


def is_dataclass(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    """Return True for the definition of a dataclass."""
    return isinstance(node, ast.ClassDef) and any(
        ast.unparse(decorator).partition("(")[0] in ("dataclass", "dataclasses.dataclass")
        for decorator in node.decorator_list
    )


def find_undocumented_fields(source: str) -> list[str]:
    """Return `Class.field` for each field of a dataclass without a `#:` line above it or a docstring below.

    A class with one field is exempt: its own docstring says what the field is. So is an option, which has a
    help text.
    """
    lines, found = source.splitlines(), []
    for node in filter(is_dataclass, ast.walk(ast.parse(source))):
        fields = [
            (statement, below)
            for statement, below in itertools.zip_longest(node.body, node.body[1:])
            if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation)
            if not ast.unparse(statement.value or statement.target).startswith("option(")
        ]
        for field, below in fields if len(fields) > 1 else ():
            before = (line.strip() for line in lines[field.lineno - 2 :: -1])
            comment = itertools.takewhile(lambda line: line.startswith("#"), before)
            has_docstring = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if not has_docstring and not any(line.startswith("#:") for line in comment):
                found.append(f"{node.name}.{ast.unparse(field.target)}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_each_field_of_a_dataclass_is_documented(path: Path):
    assert not find_undocumented_fields(path.read_text())


def test_fields_without_documentation_are_found():
    source = """
@dataclass(frozen=True)
class Pair:
    #: Documented above,
    #: in two lines.
    a: int
    b: int
    c: int = 0
    "Documented below."

@dataclass
class Single:
    field: int

class Plain:
    a: int
    b: int
"""
    assert find_undocumented_fields(source) == ["Pair.b"]


def test_the_glossary_defines_each_word_once():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text.partition("## Glossary")[2].partition("\n## ")[0]
    words = [
        word.strip()
        for line in table.splitlines()[4:]
        if line.startswith("| ")
        for word in line.split("|")[1].split(",")
    ]
    assert len(words) > 30
    assert len(words) == len(set(words))
