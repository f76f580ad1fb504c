"""The describe command: everything about one job, or about one cache."""

from __future__ import annotations

import typer

from insitu.cli.jobs import complete_cache, complete_job


def complete_either(incomplete: str) -> list[str]:
    """For the shell: jobs and caches that begin with what was typed."""
    return [*complete_cache(incomplete), *complete_job(incomplete)]


def register(app: typer.Typer) -> None:
    """Adds this module's command."""
