"""The documents agree with the repository: links, pictures, variables, versions. They stay readable."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer.main
from draw_pictures import PICTURES, draw
from stage_docs import list_contents, list_pages, write_command_line

from insitu.base.config import DeviceSettings
from insitu.cli import build_app

ROOT = Path(__file__).parents[2]
DOCS, SOURCE = ROOT / "docs", ROOT / "src" / "insitu"
PAGES = list_pages()
HOW_TO = sorted((DOCS / "how-to").glob("*.md"))
LONGEST, MEAN = 30, 15  # words of a sentence
PROSE = [page for page in PAGES if page != ROOT / "benchmarks" / "RESULTS.md"]
"""Pages that people write. The results are printed by a program."""
UNUSUAL = re.compile(
    r"^(What|Of|From|Where)\b(?!.*\?$)|\b(hears?|heard|obeys?|go(es)? on|of before|lies?|away)\b",
    re.IGNORECASE,
)
"""Beginnings of sentences, and words, that docs/style.md replaces by others."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors_in(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-") for text in texts}


def sentences_in(page: Path) -> Iterator[str]:
    """Yield the sentences of a page's paragraphs and lists, without code, tables and headings."""
    text = re.sub(r"^(\||#|!\[).*$", "", without_code(page.read_text()), flags=re.MULTILINE)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    for paragraph in re.split(r"\n\s*\n|^\s*(?:- |\d+\. )", text, flags=re.MULTILINE):
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split()).replace("*", "")):
            if sentence:
                yield sentence


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", without_code(page.read_text())):
        path = page.parent / target if target else page
        if "://" in target:
            continue
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors_in(path)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def test_the_contents_have_all_pages() -> None:
    sections = list_contents((DOCS / "README.md").read_text())
    listed = {page for pages in sections.values() for page in pages.values()}
    there = {name_of(page.with_suffix("")) for page in DOCS.rglob("*.md")} - {"docs/README"}
    assert there - listed == set()


def test_the_page_of_the_command_line_has_all_commands() -> None:
    page = write_command_line()
    top = typer.main.get_command(build_app())  # type: ignore[arg-type]
    assert isinstance(top, click.Group)
    named = {name for name, command in top.commands.items() if not command.hidden}
    assert named == set(re.findall(r"^### insitu (\S+)$", page, re.MULTILINE))
    assert "| `--workers` `INTEGER` | Worker tasks. |" in page
    assert page.count("\n\n    insitu ") > 20  # examples


def commands_in(page: Path) -> Iterator[list[str]]:
    """Yield the words behind `insitu` of each command in a page's consoles."""
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in re.findall(r"^\$ (?:\w+=\S+ )*insitu (.*)$", block.replace("\\\n", ""), re.MULTILINE):
            yield shlex.split(line, comments=True)


def parse(command: click.Command, words: list[str]) -> tuple[dict[str, object], list[str], object]:
    context = click.Context(command, **command.context_settings)
    return command.make_parser(context).parse_args(list(words))


def test_commands_have_the_options_that_a_page_gives() -> None:
    top = typer.main.get_command(build_app())  # type: ignore[arg-type]
    wrong = []
    for page in PAGES:
        for words in commands_in(page):
            command, rest = top, words
            try:
                while isinstance(command, click.Group):
                    _, rest, _ = parse(command, rest)
                    inner = command.get_command(click.Context(command), rest[0])
                    command, rest = command.commands[rest[0]] if inner is None else inner, rest[1:]
                parse(command, rest)
            except (click.UsageError, KeyError) as error:
                wrong.append(f"{name_of(page)}: insitu {' '.join(words)}: {error}")
    assert wrong == []


def test_documents_that_the_code_names_exist() -> None:
    named = {
        (name_of(path), name)
        for folder in ("src", "tests", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"(?<![\w/.])docs/[\w./-]+\.(?:md|json|svg)", path.read_text())
    }
    assert len(named) > 40
    assert {(path, name) for path, name in named if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("source", sorted(PICTURES.glob("*.toml")), ids=lambda path: path.stem)
def test_pictures_are_drawn_from_their_sources(source: Path) -> None:
    """`python tools/draw_pictures.py` draws them again."""
    assert source.with_suffix(".svg").read_text() == draw(tomllib.loads(source.read_text()))


def variables_in_code() -> set[str]:
    """Return the variables of the environment that the code names."""
    found = set(DeviceSettings(("cpu", 2), True, 1, True, True, (1, 1)).to_environment())
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"^\$?(INSITU_[A-Z_]*[A-Z])$", node.value))
    return {name for name in found if name.startswith("INSITU_")} - {"INSITU_IGNITE"}  # begins others


def test_the_page_on_the_environment_has_all_variables() -> None:
    page = (DOCS / "reference" / "environment.md").read_text()
    rows = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    listed = set(re.findall(r"`(INSITU_\w+)`", rows))
    code = variables_in_code()
    assert len(code) > 40
    assert listed == code


def test_the_page_on_compatibility_has_the_versions_of_the_project() -> None:
    page = (DOCS / "reference" / "compatibility.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lock = (ROOT / "requirements.lock").read_text()
    assert f"| {project['requires-python']} |" in rows["Python"]
    for requirement in (
        *project["dependencies"],
        *extras["tensorflow"],
        *extras["jax"],
        *extras["torch"],
        *extras["ray"],
    ):
        name, allowed = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()  # type: ignore[union-attr]
        if name in rows:
            assert f"| {allowed} |" in rows[name]
            locked = re.search(rf"^{name}(?:-cpu)?==([\d.]+)", lock, re.MULTILINE)
            assert locked is None or f"| {locked[1]} |" in rows[name]
    assert {"keras", "numpy", "pyarrow", "tensorflow", "jax", "torch", "ray"} <= set(rows)


def test_the_readme_is_short_and_begins_with_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 700
    first = re.search(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert first and re.findall(r"^make \w+", first[1], re.MULTILINE) == ["make demo", "make test"]


def test_the_changes_of_a_version_are_few() -> None:
    versions = re.split(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    bullets = {
        name: len(re.findall(r"^- ", text, re.MULTILINE))
        for name, text in zip(versions[::2], versions[1::2], strict=True)
    }
    assert bullets and max(bullets.values()) <= 80


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_sentences_have_the_words_of_the_style(page: Path) -> None:
    assert [sentence for sentence in sentences_in(page) if UNUSUAL.search(sentence)] == []


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_sentences_are_short(page: Path) -> None:
    lengths = {sentence: len(sentence.split()) for sentence in sentences_in(page)}
    assert {sentence for sentence, length in lengths.items() if length > LONGEST} == set()
    assert sum(lengths.values()) <= MEAN * len(lengths)


@pytest.mark.parametrize("page", HOW_TO, ids=name_of)
def test_a_how_to_is_a_short_page(page: Path) -> None:
    assert len(page.read_text().split()) <= 400


@pytest.mark.parametrize("page", sorted((DOCS / "concepts").glob("*.md")), ids=name_of)
def test_a_concept_is_a_short_page_with_a_picture(page: Path) -> None:
    text = page.read_text()
    assert len(text.split()) <= 400
    assert len(re.findall(r"!\[[^]]+\]\(\.\./pictures/\w[\w-]*\.svg\)", text)) == 1
