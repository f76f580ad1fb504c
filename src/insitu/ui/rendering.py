"""Renders templates. Their values are escaped: nothing of a job or a cache becomes markup."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi.responses import HTMLResponse
from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PrefixLoader, StrictUndefined

from insitu.service import (
    format_duration,
    format_position,
    format_size,
    format_split,
    format_staleness,
    format_time,
)

_folders: dict[str, FileSystemLoader] = {}
_own = FileSystemLoader(Path(__file__).parent / "templates")
_environment = Environment(
    loader=ChoiceLoader([_own, PrefixLoader(_folders)]),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def _lasted(job: Mapping[str, Any]) -> str:
    """Return how long a job runs, or ran."""
    return format_duration((job["ended"] or time.time()) - job["created"])


_environment.filters |= {
    "duration": format_duration,
    "position": format_position,
    "size": format_size,
    "split": format_split,
    "staleness": format_staleness,
    "time": format_time,
    "number": lambda value: f"{value:,}",
    "percent": lambda value: f"{value:.0%}",
    "lasted": _lasted,
}


def add_folder(prefix: str, folder: Path) -> None:
    """Have the templates in a folder be found as `prefix/...`."""
    _folders.setdefault(prefix, FileSystemLoader(folder))


def share_value(name: str, value: Any) -> None:
    """Have all templates find a value."""
    _environment.globals[name] = value


def render(name: str, **values: Any) -> str:
    """Return a template filled in."""
    return _environment.get_template(name).render(**values)


def render_page(name: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page as an answer."""
    return HTMLResponse(render(name, **values), status)
