"""Commands about the rows of a cache: head, stats and diff."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.base.paths import Paths
from insitu.base.wording import format_count
from insitu.cli.completion import complete_cache
from insitu.cli.console import (
    JsonOption,
    escape_controls,
    format_cell,
    print_json,
    print_notice,
    print_table,
    shown_bytes,
)
from insitu.cli.data import format_column

if TYPE_CHECKING:
    from insitu.base.spec import CacheSpec

_SHOWN_VALUES = 4
"""Numbers of one value that are shown; of more their mean is."""
_BARS = " ▁▂▃▄▅▆▇█"
_PLAIN_BARS = " .:-=+*%#"
_SHOWN_FREQUENT = 3
_DIFFERENT = 1
"""Exit code of `diff` for versions that differ."""
_Cache = Annotated[
    str,
    typer.Argument(
        metavar="CACHE", help="Its name, such as orders or orders@3.", autocompletion=complete_cache
    ),
]


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command()(head)
    app.command()(stats)
    app.command()(diff)


# head


def head(
    cache: _Cache,
    count: Annotated[int, typer.Option("-n", "--rows", metavar="N", min=1, help="Rows to show.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Show the first rows of a cache.

    Examples:

    ```
    insitu head orders
    insitu head orders@3 -n 3 --json
    ```
    """
    from insitu.service import plain_row, read_first_rows

    spec, rows = read_first_rows(Paths.default(), cache, count)
    if as_json:
        shown = {"name": spec.name, "version": spec.version, "labels": list(spec.labels)}
        print_json(shown | {"rows": [plain_row(row) for row in rows]})
        return
    names = [column.name for column in spec.columns]
    print_table(names, [[format_value(row[name], _labels_of(spec, name)) for name in names] for row in rows])
    if len(rows) < spec.rows:
        print_notice(f"The first {len(rows):,} of {spec.rows:,} rows of {spec.name} version {spec.version}.")


def _labels_of(cache: CacheSpec, name: str) -> Sequence[str]:
    return cache.labels if name == "label" else ()


def format_value(value: Any, labels: Sequence[str] = ()) -> str:
    """Return a value of a row for a cell: of many numbers the type, the shape and the mean."""
    import numpy as np

    if isinstance(value, str):
        return format_cell(value)
    array = np.asarray(value)
    if array.ndim == 0:
        number = _format_number(array.item())
        is_class = array.dtype.kind in "iu" and 0 <= array.item() < len(labels)
        return f"{number} {labels[array.item()]}" if is_class else number
    if array.ndim == 1 and array.size <= _SHOWN_VALUES:
        return "[" + ", ".join(_format_number(each) for each in array.tolist()) + "]"
    shape = ",".join(map(str, array.shape))
    return f"{array.dtype}[{shape}] mean {float(array.astype(np.float64).mean()):.4g}"


def _format_number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# stats


def stats(
    cache: _Cache,
    sample: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Rows to draw at random.", show_default="all rows"),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Other rows of --sample.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Show what the columns of a cache hold: NaN, least, greatest, mean, distinct values and a histogram.

    All rows are read, or N of them, each drawn at random. The number of distinct values is an estimate from
    4,096 on (~), mostly within 3 percent.

    Examples:

    ```
    insitu stats orders
    insitu stats orders@3 --sample 10000
    insitu stats orders --json
    ```
    """
    from insitu.service import measure_columns

    with shown_bytes(f"read {cache}") as show:
        found = measure_columns(Paths.default(), cache, sample, seed, show)
    if as_json:
        print_json(found)
    else:
        print_statistics(found)


def print_statistics(found: Mapping[str, Any]) -> None:
    """Print what `measure_columns` of `insitu.service` returns."""
    rows, of_cache = f"{found['rows']:,}", f"{found['rows_of_cache']:,}"
    source = "all" if rows == of_cache else f"{rows} rows, drawn at random, of"
    typer.echo(f"{found['name']} version {found['version']}, {source} {of_cache} rows:")
    header = ("COLUMN", "MIN", "MAX", "MEAN", "DEVIATION", "NOT FINITE", "ZEROS", "DISTINCT")
    rows_shown = [_format_row(column, found["rows"]) for column in found["columns"]]
    print_table((*header, "HISTOGRAM", "FREQUENT"), rows_shown)


def _format_row(column: Mapping[str, Any], rows: int) -> tuple[str, ...]:
    if column["dtype"] == "str":
        ends = [_format_fact(column[name]) for name in ("shortest", "longest")]
        ends = [f"{end} characters" if end != "-" else end for end in ends]
    else:
        ends = [_format_fact(column[name]) for name in ("minimum", "maximum")]
    shares = (column["frequent"] or ())[:_SHOWN_FREQUENT]
    frequent = ", ".join(f"{value} {count / rows:.0%}" for value, count in shares)
    kinds = (("nan", "NaN"), ("infinite", "infinite"))
    not_finite = [f"{column[name]:,} {word}" for name, word in kinds if column[name]]
    distinct = _format_fact(column["different"])
    return (
        column["name"],
        *ends,
        _format_fact(column["mean"]),
        _format_fact(column["deviation"]),
        ", ".join(not_finite) or "-",
        f"{column['zeros']:.1%}" if column["zeros"] else "-",
        f"~{distinct}" if column["is_estimate"] else distinct,
        draw_bars(column["histogram"]["counts"]) if column["histogram"] else "-",
        format_cell(frequent) or "-",
    )


def _format_fact(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def draw_bars(counts: Sequence[int]) -> str:
    """Return a bar for each count, as high as its share of the greatest; none for a count of zero."""
    bars = _BARS
    try:
        bars.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        bars = _PLAIN_BARS
    most, steps = max(counts), len(bars) - 1
    return "|" + "".join(bars[-(-count * steps // most)] for count in counts) + "|"


# diff


def diff(
    before: Annotated[
        str, typer.Argument(metavar="CACHE@N", help="The earlier version.", autocompletion=complete_cache)
    ],
    after: Annotated[
        str, typer.Argument(metavar="CACHE@M", help="The later version.", autocompletion=complete_cache)
    ],
    key: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Column by which rows belong together.", show_default="position"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two versions of a cache, or two caches: columns, rows and values.

    Values are compared bit by bit. The exit code is 0 for equal versions, 1 for others, and 2 if they can't
    be compared. A version is there while it is the latest, or a job uses it.

    Examples:

    ```
    insitu diff orders@2 orders@3
    insitu diff orders@2 orders --key id --json
    ```
    """
    from insitu.service import compare_versions

    with shown_bytes(f"compare {before} with {after}") as show:
        found = compare_versions(Paths.default(), before, after, key, show)
    if as_json:
        print_json(found)
    else:
        print_difference(found)
    if not found["equal"]:
        raise typer.Exit(_DIFFERENT)


def print_difference(found: Mapping[str, Any]) -> None:
    """Print what `compare_versions` of `insitu.service` returns."""
    named = [f"{each['name']}@{each['version']}" for each in (found["before"], found["after"])]
    typer.echo(f"{' and '.join(named)} {'are equal' if found['equal'] else 'differ'}")
    columns = found["columns"]
    for kind in ("added", "removed"):
        if columns[kind]:
            typer.echo(f"columns {kind}: {escape_controls(', '.join(map(format_column, columns[kind])))}")
    for each in columns["changed"]:
        pair = f"{format_column(each['before'])} is now {format_column(each['after'])}"
        typer.echo(f"column changed: {escape_controls(pair)}")
    if found["labels"]:
        typer.echo("the classes of column label differ, so its numbers have other meanings")
    counts = found["rows"]
    by = f"by key {found['key']}" if found["key"] else "by position"
    text = ", ".join(f"{counts[kind]:,} {kind}" for kind in ("added", "removed", "changed"))
    typer.echo(f"rows {escape_controls(by)}: {text}, {counts['same']:,} the same")
    if found["changed_by_column"]:
        typer.echo()
        rows = [(name, format_count(count, "row")) for name, count in found["changed_by_column"].items()]
        print_table(("COLUMN", "CHANGED"), rows)
    if found["examples"]:
        typer.echo()
        header = ("EXAMPLE", "KEY" if found["key"] else "ROW", "COLUMN", "BEFORE", "AFTER")
        print_table(header, [row for each in found["examples"] for row in _list_example(each)])


def _list_example(example: Mapping[str, Any]) -> list[tuple[str, ...]]:
    number = example["row_after"] if example["row_before"] is None else example["row_before"]
    place = format_cell(str(number if example["key"] is None else example["key"]))
    values = [
        (example["kind"], place, name, *(_format_plain(each) for each in pair))
        for name, pair in example["values"].items()
    ]
    return values or [(example["kind"], place, "-", "-", "-")]


def _format_plain(value: Any) -> str:
    return "many numbers" if value is None else format_value(value)
