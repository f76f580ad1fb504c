"""Prints the ledger of a job: which rows of each epoch have entered the model."""

from __future__ import annotations

from typing import Any

import typer

from insitu.cli.console import print_notice, print_table


def print_ledger(epochs: list[dict[str, Any]], servers: list[dict[str, Any]]) -> None:
    """Print the audit of each epoch, and what parameter servers left out."""
    typer.echo("")
    if not epochs:
        print_notice(
            "No rows have been accounted for yet. There is no ledger of data that a script brings itself, "
            "nor of datasets with filter or take."
        )
        return
    left_out = any(e["left_out"] for e in epochs)
    versions = len({e["version"] for e in epochs}) > 1
    print_table(
        (
            "EPOCH",
            *(("VERSION",) if versions else ()),
            "ROWS",
            "COUNTED",
            *(("LEFT OUT",) if left_out else ()),
            "LOST",
            "REPEATED",
            "VERDICT",
        ),
        (
            (
                str(e["epoch"] + 1),
                *((str(e["version"]),) if versions else ()),
                f"{e['expected']:,}",
                f"{e['counted']:,}",
                *((f"{e['left_out']:,}",) if left_out else ()),
                f"{e['lost']:,}",
                f"{e['repeated']:,}",
                ("each row once" if e["complete"] else "under way") if e["clean"] else "DOESN'T ADD UP",
            )
            for e in epochs
        ),
    )
    if left_out:
        print_notice(
            "Rows left out were counted, but their gradients entered no update: they came too late for their "
            "step, or weren't finite."
        )
    # Each server decides the same of each gradient.
    if servers and servers[0]["dropped_rows"]:
        shards = ", ".join(f"{count:,} of shard {shard}" for shard, count in servers[0]["dropped_by_shard"])
        print_notice(
            f"Gradients of {servers[0]['dropped_rows']:,} rows came too late for their step: {shards}."
        )
