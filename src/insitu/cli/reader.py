"""The options of `import` that have Ray Data read the files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from insitu.grid.ray_data import RayReader

ReaderOption = Annotated[
    str | None,
    typer.Option(
        metavar="READER",
        help="Have Ray Data read: parquet, csv, json, text, tfrecords, images or webdataset.",
        show_default="insitu reads",
    ),
]
ReaderSettingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--reader-option", metavar="NAME=VALUE", help="What the reader takes, such as size=64,64 of images."
    ),
]

TensorOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN=DTYPE[SHAPE]", help="Of Ignite, or with --reader: bytes as image=uint8[28,28]."
    ),
]
WithoutOption = Annotated[
    list[str] | None,
    typer.Option(metavar="COLUMN", help="Of Ignite, or with --reader: a column that is left out."),
]


def find_reader(name: str | None, options: list[str] | None) -> RayReader | None:
    """Return the reader that the options name, or None. Raises InputError."""
    if name is None and not options:
        return None
    from insitu.grid.ray_data import RayReader, parse_reader

    request = parse_reader(name, options or ())
    return None if request is None else RayReader(request)
