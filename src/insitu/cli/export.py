"""The export command: rows of a cache into a file or a table, or a model out of a job's folder."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.base.errors import InputError, UnknownJob
from insitu.base.export_formats import KERAS, list_suffixes
from insitu.base.paths import Paths
from insitu.base.plugins import EXTENSIONS, load_plugin
from insitu.base.wording import hide_password
from insitu.cli.connected import ConfigOption, find_address
from insitu.cli.console import format_time, print_notice, shown_bytes
from insitu.cli.describe import complete_either

if TYPE_CHECKING:
    from insitu.cluster import ExportedModel
    from insitu.grid import Export


def export(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A cache's name, such as orders or orders@3, or a job's id or enough of its beginning.",
            autocompletion=complete_either,
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="For a cache: a file .parquet, .csv or .arrow, a FOLDER/, or the URL of a table. For a job: "
            "a path, or a folder.",
        ),
    ],
    columns: Annotated[
        str | None, typer.Option(metavar="A,B", help="For a cache: its columns.", show_default="all")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="For a cache: its first rows.", show_default="all")
    ] = None,
    row_id: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For a cache: add a column with the number of each row."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="For a cache: replace what is there.")
    ] = False,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="For Ignite: the column of keys.",
            show_default="key, else the row's number",
        ),
    ] = None,
    type_name: Annotated[
        str | None,
        typer.Option("--type", metavar="CLASS", help="For Ignite: the class of values.", show_default="NAME"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="For Ignite: continue an interrupted command.")
    ] = False,
    config: ConfigOption = None,
    best: Annotated[bool, typer.Option("--best", help="For a job: the model of its BestExporter.")] = False,
    exporter: Annotated[
        str | None, typer.Option(metavar="NAME", help="For a job: the newest model of this exporter.")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="For a job: keras, tf_saved_model, onnx, stablehlo or a plug-in; converts a .keras file.",
        ),
    ] = None,
) -> None:
    """Write the rows of a cache into a file or a table, or copy the newest model of a job.

    Rows come in the order of the partitions. A FOLDER/ gets a Parquet file a partition. Tables are
    delta://PATH, postgresql://[USER@]HOST[:PORT]/DATABASE/[SCHEMA.]TABLE and
    ignite://HOST[:PORT][,HOST...]/NAME. A file, folder or table gets all rows at once, or none. In Ignite
    a row replaces the one under its key; columns are fields of objects, a single column `value` is the value
    itself.

    Models of a job are those that its exporters have published. If it has none, the one that its script has
    saved last is taken. The copy gets its name when it is whole, and replaces nothing. A model is converted
    by the backend that KERAS_BACKEND names, and compared.

    Examples:

    ```
    insitu export orders orders.parquet
    insitu export orders@3 orders.csv --columns id,price --limit 1000 --row-id row
    insitu export orders delta:///data/orders --overwrite
    insitu export orders postgresql://me@db-1/shop/public.orders
    insitu export digits ignite://grid-1,grid-2/DIGITS --key id
    insitu export people-3fa9c1 model.keras --best
    insitu export people-3fa9c1 model.onnx --format onnx
    ```
    """
    from insitu.grid import takes_rows
    from insitu.grid.sources import find_connector

    address = find_address(target, config)
    of_rows: dict[str, object] = {"--columns": columns, "--limit": limit}
    of_files: dict[str, object] = {"--row-id": row_id, "--overwrite": overwrite}
    of_keys: dict[str, object] = {"--key": key, "--type": type_name, "--resume": resume}
    of_models = {"--best": best, "--exporter": exporter, "--format": format}
    chosen = columns.split(",") if columns is not None else []
    if takes_rows(address) and ("://" in address or _is_cache(name)):
        _refuse("a job's models", of_models, address)
        _refuse("rows that go under keys, into Ignite", of_keys, address)
        _export_rows(name, address, chosen, limit, row_id, overwrite)
    elif find_connector(address) is not None:
        _refuse("a job's models", of_models, address)
        _refuse("rows that go to a file or a table as a whole", of_files, address)
        _export_under_keys(name, address, key, type_name, chosen, limit, resume)
    else:
        _refuse("the rows of a cache", of_rows | of_files | of_keys, target)
        _export_model(name, target, best, exporter, format)


def _is_cache(name: str) -> bool:
    from insitu.base.spec import split_version
    from insitu.grid import Catalog

    return Catalog(Paths.default()).find(split_version(name)[0]) is not None


def _refuse(what: str, options: Mapping[str, object], target: str) -> None:
    """Raise InputError if one of the options is given, which are for something else."""
    given = [option for option, value in options.items() if value]
    if given:
        raise InputError(
            f"{given[0]} is said of {what}. Received: {given[0]}, to {hide_password(target)}. Leave it out"
        )


def _export_rows(
    name: str, target: str, columns: list[str], limit: int | None, row_id: str | None, overwrite: bool
) -> None:
    from insitu.grid import Catalog, export_rows

    paths = Paths.default()
    cache = Catalog(paths).get_named(name)
    options: dict[str, Any] = {"columns": columns, "limit": limit, "row_id": row_id, "overwrite": overwrite}
    with shown_bytes(f"export {name}") as show:
        done = export_rows(paths, cache, target, progress=show, **options)
    _print_exported(cache.name, done)


def _export_under_keys(
    name: str,
    address: str,
    key: str | None,
    type_name: str | None,
    columns: list[str],
    limit: int | None,
    resume: bool,
) -> None:
    from insitu.grid import export_cache

    options: dict[str, Any] = {"key": key, "type_name": type_name, "columns": columns, "limit": limit}
    with shown_bytes(f"export {name}") as show:
        done = export_cache(Paths.default(), name, address, resume=resume, progress=show, **options)
    _print_exported(name.partition("@")[0], done)


def _print_exported(cache: str, done: Export) -> None:
    before = f", {done.rows - done.sent:,} of them before" if done.sent < done.rows else ""
    print_notice(f"Exported {done.rows:,} rows of {cache} version {done.version} to {done.address}{before}")


def _export_model(name: str, target: str, best: bool, exporter: str | None, format: str | None) -> None:
    from insitu.cluster import copy_export, find_export, find_job

    try:
        job = find_job(Paths.default(), name)
    except UnknownJob:
        if not _is_cache(name):
            raise
        raise InputError(
            f"Rows of a cache go to a file .parquet, .csv or .arrow, to a FOLDER/, or to delta://, "
            f"postgresql:// or ignite://. Received: {hide_password(target)}. Give such a target"
        ) from None
    if best and exporter is not None:
        raise InputError(f"--best names an exporter too. Received: --exporter {exporter}. Leave one out")
    suffixes = list_suffixes()
    if format is not None and format not in suffixes:
        raise InputError(f"--format is one of {', '.join(suffixes)}. Received: {format}")
    if format is None and not Path(target).is_dir():
        # The end of a name says the format; a SavedModel's has none, and any is taken then.
        format = {suffix: each for each, suffix in suffixes.items() if suffix}.get(Path(target).suffix)
    model = find_export(job, best=best, exporter=exporter, format=format)
    if format is None or model.format == format:
        copy = copy_export(model, Path(target))
    else:
        copy = _convert(model, Path(target), format)
    at = f"{model.exporter} of {job.root.name} at step {model.step:,}"
    saved = f"{model.path.relative_to(job.root)} of {job.root.name}, of {format_time(model.step)}"
    print_notice(f"Exported {copy}: {at if model.exporter else saved}")


def _convert(model: ExportedModel, target: Path, format: str) -> Path:
    """Put a copy of a model in another format at the path `target`. Returns its path."""
    from insitu.cluster import ExportedModel, copy_export

    if model.format != KERAS:
        raise InputError(
            f"A .keras file is converted. Received: {model.path}, the newest export, for --format {format}. "
            f"Add an exporter with format={format!r} to the script, or one of .keras files"
        )
    load_plugin(EXTENSIONS, "estimator")  # registers its layers
    convert = load_plugin(EXTENSIONS, "exports").convert_export
    with tempfile.TemporaryDirectory(prefix="insitu-") as folder:
        made = convert(model.path, Path(folder), model.step, format)
        return copy_export(ExportedModel(made, model.step, model.exporter), target)


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(export)
