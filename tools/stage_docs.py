"""Collects the pages of the site in build/docs-pages, as they stand in the repository, and writes the one on
the command line out of the options that the commands declare. `make docs` runs it, then Sphinx.

A page finds its links there as in the repository. docs/README.md lists all pages, and is the site's contents.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath

import click

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "docs-pages"
EXTRA = PAGES / "extra"
"""Files that the site has beside its pages."""

MADE = {
    "Reference": {"Command line": "docs/reference/command-line", "Python": "docs/reference/python"},
}
"""Titles and pages that aren't in the repository, by their section of docs/README.md."""

LINK = re.compile(r"\]\(([^)#\s]+)")
START = '<!doctype html><title>insitu</title><meta http-equiv="refresh" content="0; url=README.html">\n'


def list_pages() -> list[Path]:
    """Return the Markdown files of the repository that are pages of the site."""
    patterns = ("*.md", "docs/*.md", "examples/*.md", "benchmarks/*.md", ":!benchmarks/results/*.md")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return [ROOT / line for line in sorted(set(listed.splitlines())) if (ROOT / line).is_file()]


def list_links(page: Path) -> Iterator[Path]:
    """Yield the files of the repository that a page links to, or shows."""
    for target in LINK.findall(page.read_text()):
        if "://" not in target and (path := (page.parent / target).resolve()).is_file():
            yield path


def stage_file(path: Path) -> None:
    """Copy a file of the repository to its place among the pages."""
    target = PAGES / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def list_contents(text: str) -> dict[str, dict[str, str]]:
    """Return the titles and pages that docs/README.md lists, by section. A page is its path from the root,
    without the ending."""
    sections: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            sections[line[3:]] = {}
        elif line.startswith("- "):
            for title, link in re.findall(r"\[([^]]+)\]\(([^)#]+)\.md", line):
                sections[next(reversed(sections))][title] = normpath(f"docs/{link}")
    return sections


def write_contents(sections: dict[str, dict[str, str]]) -> str:
    """Return the directives that make the site's contents."""
    trees = []
    for section, pages in sections.items():
        pages = {**pages, **MADE.get(section, {})}
        lines = "\n".join(f"{title[:1].upper()}{title[1:]} </{page}>" for title, page in pages.items())
        trees.append(f"\n```{{toctree}}\n:hidden:\n:caption: {section}\n\n{lines}\n```\n")
    return "".join(trees)


def stage() -> None:
    """Collect all pages and what they link to."""
    shutil.rmtree(PAGES, ignore_errors=True)
    pages = list_pages()
    for page in pages:
        for path in (page, *list_links(page)):
            stage_file(path)
    sections = list_contents((ROOT / "docs/README.md").read_text())
    with (PAGES / "README.md").open("a") as start:
        start.write(write_contents(sections))
    listed = {page for section in sections.values() for page in section.values()}
    for page in pages:
        staged = PAGES / page.relative_to(ROOT)
        staged.write_text(staged.read_text().replace("```mermaid", "```text"))
        name = page.relative_to(ROOT).with_suffix("").as_posix()
        if name not in listed and name != "README":
            staged.write_text("---\norphan: true\n---\n\n" + staged.read_text())
    EXTRA.mkdir(exist_ok=True)
    (EXTRA / "index.html").write_text(START)


def describe_option(option: click.Option) -> str:
    """Return the row of a table for an option of a command."""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag else f" `{option.make_metavar(click.Context(click.Command('')))}`"
    text = " ".join((option.help or "").split())
    return "| " + " | ".join(each.replace("|", "\\|") for each in (names + value, text)) + " |"


def describe_command(name: str, command: click.Command, depth: int) -> Iterator[str]:
    """Yield the lines of a command's section, and of those below it."""
    yield f"{'#' * depth} {name}\n"
    yield f"```text\n{' '.join([name, *command.collect_usage_pieces(click.Context(command))])}\n```\n"
    yield re.sub(r"\n{3,}", "\n\n", (command.help or "").replace("\b\n", "")).strip() + "\n"
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    if options:
        yield "\n".join(["| option | what it does |", "|---|---|", *map(describe_option, options), ""])
    if isinstance(command, click.Group):
        for below, each in command.commands.items():
            if not each.hidden:
                yield from describe_command(f"{name} {below}", each, depth + 1)


def write_command_line() -> str:
    """Return the page of the command line."""
    import typer.main

    from insitu.cli import build_app

    top = typer.main.get_command(build_app())  # type: ignore[arg-type]
    lines = [
        "# Command line\n",
        "`insitu COMMAND --help` prints the same. Exit codes: 0 done; 1 it failed; 2 the request can't be",
        "used; 3 the job has ended already; 130 the user interrupted. `start` and `attach` exit with the",
        "code of the training.\n",
        "| option | what it does |\n|---|---|",
        *(describe_option(each) for each in top.params if isinstance(each, click.Option) and not each.hidden),
        "",
    ]
    panel = ""
    for name, command in top.commands.items():
        if not command.hidden:
            section = getattr(command, "rich_help_panel", None) or "Other"
            if section != panel:
                panel = section
                lines.append(f"## {panel}\n")
            lines += describe_command(f"insitu {name}", command, 3)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Collect and write all pages."""
    stage()
    (PAGES / "docs/reference/command-line.md").write_text(write_command_line())


if __name__ == "__main__":
    sys.exit(main())
