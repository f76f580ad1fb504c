"""Prints statistics of a cache's columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from insitu.cli.console import format_cell, print_table


def print_statistics(found: Mapping[str, Any]) -> None:
    """Print what `describe_columns` of `insitu.service` returns."""
    rows, of_cache = f"{found['rows']:,}", f"{found['rows_of_cache']:,}"
    source = "all" if rows == of_cache else f"{rows} rows, drawn at random of"
    typer.echo(f"\nStatistics of {source} {of_cache} rows:")
    header = (
        "COLUMN",
        "SMALLEST",
        "LARGEST",
        "MEAN",
        "DEVIATION",
        "ZEROS",
        "NOT FINITE",
        "DIFFERENT",
        "FREQUENT",
    )
    print_table(header, (_format_row(column, found["rows"]) for column in found["columns"]))


def _format_row(column: Mapping[str, Any], rows: int) -> tuple[str, ...]:
    if column["dtype"] == "str":
        ends = [_format_number(column[name]) for name in ("shortest", "longest")]
        ends = [f"{end} characters" if end != "-" else end for end in ends]
    else:
        ends = [_format_number(column[name]) for name in ("minimum", "maximum")]
    frequent = ", ".join(f"{value} {count / rows:.0%}" for value, count in column["frequent"] or ())
    return (
        column["name"],
        *ends,
        _format_number(column["mean"]),
        _format_number(column["deviation"]),
        _format_share(column["zeros"]),
        _format_share(column["not_finite"]),
        _format_number(column["different"]),
        format_cell(frequent) or "-",
    )


def _format_number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _format_share(value: float | None) -> str:
    return "-" if not value else f"{value:.1%}"
