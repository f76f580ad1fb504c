"""The command that lists the examples."""

from __future__ import annotations

import shlex

import typer

from insitu.cli.console import JsonOption, print_json, print_notice


def examples(
    as_json: JsonOption = False,
) -> None:
    """List the examples that come with insitu, and the commands that run them.

    Examples:

    ```
    insitu examples
    insitu examples --json
    ```
    """
    from insitu.service import list_examples

    found = list_examples()
    if as_json:
        print_json(found)
        return
    if not found:
        print_notice("This installation has no examples. They are in the folder `examples` of the sources.")
    for each in found:
        typer.echo(f"{each['name']}: {each['about']}")
        if each["data"]:
            typer.echo(
                f"    insitu import --label-from-filename --split train=0.9,test=0.1 {each['data']} FOLDER"
            )
        servers = ["--ps", str(each["ps"])] if each["ps"] else []
        line = ["insitu", "start", "--workers", str(each["workers"]), *servers, each["cache"]]
        typer.echo(f"    {shlex.join([*line, each['job_dir'], *each['command']])}\n")


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(examples)
