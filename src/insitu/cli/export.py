"""The export command: rows of a cache into a table of another system, or a model out of a job's folder."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from insitu.base.errors import InputError, UnknownJob
from insitu.base.export_formats import KERAS, list_suffixes
from insitu.base.paths import Paths
from insitu.base.plugins import EXTENSIONS, load_plugin
from insitu.cli.connected import ConfigOption, find_address
from insitu.cli.console import format_time, print_notice
from insitu.cli.describe import complete_either

if TYPE_CHECKING:
    from insitu.cluster import ExportedModel


def export(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A cache's name, or a job's id or enough of its beginning.",
            autocompletion=complete_either,
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="Of a cache, as ignite://HOST[:PORT][,HOST...]/NAME. Of a job, a path, or a folder.",
        ),
    ],
    best: Annotated[bool, typer.Option("--best", help="Of a job: the model of its BestExporter.")] = False,
    exporter: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a job: the newest model of this exporter.")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Of a job: keras, tf_saved_model, onnx, stablehlo or a plug-in. A .keras file is converted.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="The column of the keys.", show_default="key, else the row's number"
        ),
    ] = None,
    type_name: Annotated[
        str | None, typer.Option("--type", metavar="CLASS", help="The class of values.", show_default="NAME")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="A column that is left out.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted command.")] = False,
    config: ConfigOption = None,
) -> None:
    """Put the rows of a cache into a cache of Apache Ignite, or copy the newest model of a job.

    A model is converted by the backend that KERAS_BACKEND names, and compared.
    The cache of Ignite is made if need be. A row replaces the one under its key, so the command can be given
    again. Columns are fields of objects; a single column `value` is the value itself.

    Models of a job are those that its exporters have published. If it has none, the one that its script has
    saved last is taken. The copy gets its name when it is whole, and replaces nothing.

    Examples:

    ```
    insitu export people-3fa9c1 model.keras --best
    insitu export people-3fa9c1 model.onnx --format onnx
    insitu export digits ignite://grid-1,grid-2/DIGITS --key id
    insitu export predictions ignite://grid-1/PREDICTIONS --resume
    ```
    """
    from insitu.grid.sources import find_connector

    address = find_address(target, config)
    of_cache = {"--key": key, "--type": type_name, "--without": without, "--resume": resume}
    if find_connector(address) is not None:
        _refuse("a job's models", {"--best": best, "--exporter": exporter, "--format": format}, address)
        _export_rows(name, address, key, type_name, without or [], resume)
    else:
        _refuse("rows that go to another system", of_cache, target)
        _export_model(name, target, best, exporter, format)


def _refuse(what: str, options: Mapping[str, object], target: str) -> None:
    """Raise InputError if one of the options is given, which are for something else."""
    given = [option for option, value in options.items() if value]
    if given:
        raise InputError(f"{given[0]} is said of {what}. Received: {given[0]}, to {target}. Leave it out")


def _export_rows(
    cache: str, address: str, key: str | None, type_name: str | None, without: list[str], resume: bool
) -> None:
    from insitu.grid import export_cache

    done = export_cache(
        Paths.default(), cache, address, key=key, type_name=type_name, without=without, resume=resume
    )
    before = f", {done.rows - done.sent:,} of them before" if done.sent < done.rows else ""
    print_notice(f"Exported {done.rows:,} rows of {cache} version {done.version} to {done.address}{before}")


def _export_model(name: str, target: str, best: bool, exporter: str | None, format: str | None) -> None:
    from insitu.cluster import copy_export, find_export, find_job
    from insitu.grid import Catalog

    paths = Paths.default()
    try:
        job = find_job(paths, name)
    except UnknownJob:
        if not any(cache.name == name for cache in Catalog(paths).caches()):
            raise
        raise InputError(
            f"Rows of a cache go to ignite://HOST[:PORT][,HOST...]/NAME. Received: {target}. Files of a "
            f"cache are read by `insitu.dataset`"
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
