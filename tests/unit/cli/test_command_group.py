"""Mistyped commands."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from insitu.cli import build_app


def test_a_command_is_suggested_once() -> None:
    app: Any = build_app()
    result = CliRunner().invoke(app, ["scael"])
    assert result.exit_code == 2
    assert result.output.count("Did you mean") == 1 and "'scale'" in result.output
