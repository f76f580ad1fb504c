"""Writes the page of insitu's interface of Python, out of docstrings and signatures. Nothing of insitu is
imported: griffe reads the files. `make docs` runs it.

    python tools/python_reference.py FILE
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[1]
STARS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
HEAD = """# Python

All public names of `insitu`, out of their docstrings. `help(insitu.NAME)` prints the same.
"""


def load_package() -> griffe.Module:
    """Return insitu, with docstrings in sections."""
    return griffe.load(  # type: ignore[return-value]
        "insitu",
        search_paths=[ROOT / "src"],
        docstring_parser="google",
        docstring_options={"warnings": False},
        allow_inspection=False,
    )


def public_members(of: Any) -> Iterator[Any]:
    """Yield the members that others may use and that have a docstring, in the order of the source."""
    own = (name for name, each in of.members.items() if not name.startswith("_") and not each.is_alias)
    for name in of.exports or own:
        member = of.members.get(str(name))
        if member is None:
            continue
        member = member.final_target if member.is_alias else member
        if member.docstring is not None:
            yield str(name), member


def write_signature(name: str, member: Any) -> Iterator[str]:
    """Yield the code of a function's call, or nothing."""
    function = member.members.get("__init__") if member.is_class else member
    if function is None or not getattr(function, "parameters", None):
        return
    texts, named = [], False
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        stars = STARS.get(parameter.kind, "")
        if parameter.kind is griffe.ParameterKind.keyword_only and not named:
            texts.append("*")
        named = named or stars == "*" or parameter.kind is griffe.ParameterKind.keyword_only
        text = stars + parameter.name + (f": {parameter.annotation}" if parameter.annotation else "")
        given = parameter.default is not None and not stars
        texts.append(f"{text} = {parameter.default}" if given else text)
    result = f" -> {function.returns}" if not member.is_class and function.returns is not None else ""
    line = f"{name}({', '.join(texts)}){result}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){result}"
    yield f"```python\n{line}\n```\n"


def write_docstring(member: Any) -> Iterator[str]:
    """Yield a docstring: its text, and lists of what it takes, returns and raises."""
    for section in member.docstring.parsed:
        value = section.value
        if section.kind is griffe.DocstringSectionKind.text:
            yield value + "\n"
        elif section.kind is griffe.DocstringSectionKind.examples:
            yield "Example:\n\n```python\n" + "\n".join(text for _, text in value) + "\n```\n"
        elif section.kind is griffe.DocstringSectionKind.admonition:
            text = str(value.contents if hasattr(value, "contents") else value)
            code = re.sub("  # doctest: .*", "", text)
            code = f"```pycon\n{code}\n```" if text.startswith(">>>") else text
            yield f"{section.title or 'Note'}:\n\n{code}\n"
        else:
            yield f"{section.kind.value.replace('parameters', 'arguments').capitalize()}:\n"
            for each in value:
                name = getattr(each, "name", "") or str(getattr(each, "annotation", "") or "")
                text = "\n  ".join(each.description.splitlines())
                yield f"- `{name}`: {text}" if name else f"- {text}"
            yield ""


def write_member(path: str, member: Any, depth: int) -> Iterator[str]:
    """Yield the section of a public name, and of those in it."""
    yield f"{'#' * depth} {path}\n"
    if not member.is_module:
        yield from write_signature(path, member)
    yield from write_docstring(member)
    if member.is_class or member.is_module:
        for name, inner in public_members(member):
            if not inner.is_module:
                yield from write_member(f"{path}.{name}", inner, depth + 1)


def write_page() -> str:
    """Return the page."""
    package = load_package()
    members = dict(public_members(package))
    missing = {str(name) for name in package.exports or ()} - members.keys() - {"__version__"}
    if missing:
        raise SystemExit(f"Public names need a docstring. Received none for {', '.join(sorted(missing))}")
    lines = [HEAD]
    for name, member in members.items():
        lines += write_member(f"insitu.{name}", member, 2)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(write_page())
