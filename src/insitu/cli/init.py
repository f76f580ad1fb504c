"""The command that writes a training script for a cache: init."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.base.errors import InputError, UnknownCache
from insitu.base.paths import Paths
from insitu.cli.completion import complete_cache
from insitu.cli.console import print_notice

if TYPE_CHECKING:
    from insitu.base.spec import CacheSpec, Column
    from insitu.service import FeatureFacts, LabelFacts

_SAMPLE_ROWS, _SAMPLE_BLOCKS = 4096, 256
_SCANNED_ROWS = 1 << 16
_BAR_ROWS = 1 << 22
"""Rows of a cache from which on a bar shows that its labels are read."""
_HELD_OUT = {"test": ("test",), "validation": ("validation", "val", "valid")}
"""Names of the parts of a cache beside the one that trains."""


def init(
    job_dir: Annotated[Path, typer.Argument(metavar="MY_JOB", help="Folder to make.")],
    cache: Annotated[
        str, typer.Option(metavar="CACHE", help="The cache to train on.", autocompletion=complete_cache)
    ],
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column to predict.", show_default="label")
    ] = None,
) -> None:
    """Write a folder with a script that trains on a cache, as it is, on TensorFlow, JAX and PyTorch.

    The model follows from the columns: a convolutional network for images, else numbers, names and texts
    together. Labels that are texts or few whole numbers are classes; other numbers are predicted. All labels
    of the cache are read, and a sample of its rows. Of caches CACHE/train and CACHE/test the first one
    trains, and the second one is held out; the best epoch is chosen by CACHE/validation, if there is one.

    Examples:

        insitu init my_job --cache digits
        insitu init my_job --cache people/train --label income
    """
    from insitu.base.disk.durable import published
    from insitu.service import make_template, render_script

    if job_dir.exists() or job_dir.is_symlink():
        raise InputError(
            f"MY_JOB is a folder that isn't there yet. Received: {job_dir}. Name another one, or remove it"
        )
    paths = Paths.default()
    spec, held_out = find_caches(paths, cache)
    facts = read_facts(paths, spec, label, [name for name in held_out.values() if name])
    template = make_template(spec.name, held_out["test"], held_out["validation"], *facts)
    given = str(job_dir) if job_dir.is_absolute() or str(job_dir)[:1] == "." else f"./{job_dir}"
    folder = Path(os.path.abspath(job_dir))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with published(folder.parent, folder.name) as staged:
        (staged / "train.py").write_text(render_script(template, given))
        staged.chmod(0o755)
    for name, reason in template.left_out:
        print_notice(f"Column {name} is left out: {reason}.")
    if not template.test:
        print_notice(
            f"No rows are held out: there is no {template.train.removesuffix('/train')}/test, which "
            "`insitu import --split train=0.9,test=0.1` makes."
        )
    kind = f"{len(template.classes)} classes" if template.classes is not None else "a number"
    print_notice(f"Wrote {job_dir / 'train.py'}, which predicts {template.label} ({kind}). Run it by:")
    typer.echo(shlex.join(["insitu", "start", "--workers", "2", spec.name, given, "train.py"]))


def find_caches(paths: Paths, name: str) -> tuple[CacheSpec, dict[str, str]]:
    """Return the cache that trains, and by `test` and `validation` the names of the others; "" for none.

    `name` is that of a cache, or the first part of NAME/train. Raises UnknownCache.
    """
    from insitu.grid import Catalog

    known = {each.name: each for each in Catalog(paths).caches()}
    spec = known.get(name) or known.get(f"{name}/train")
    if spec is None:
        Catalog(paths).get(name)  # says which names are similar
        raise UnknownCache(f"There is no cache {name}")
    base = spec.name.removesuffix("/train")
    found = {}
    for part, endings in _HELD_OUT.items():
        found[part] = next((n for e in endings if (n := f"{base}/{e}") in known and n != spec.name), "")
    return spec, found


def read_facts(
    paths: Paths, cache: CacheSpec, label: str | None, held_out: Sequence[str] = ()
) -> tuple[LabelFacts, list[FeatureFacts]]:
    """Return what all labels of a cache show, and what a sample of its rows shows of the other columns.

    Labels of the caches `held_out` count, too. Raises InputError, GridError.
    """
    from insitu.grid import Catalog, sample_rows
    from insitu.service import LabelFacts, choose_label

    column = choose_label(cache.columns, label, cache.name)
    if not cache.rows:
        raise InputError(f"A cache to train on has rows. Received: {cache.name} with none. Import some")
    names = cache.labels if column.name == "label" else ()
    caches = [cache, *(Catalog(paths).get(name) for name in held_out)]
    values = None if names else _read_values(paths, caches, column)
    sample = sample_rows(paths, cache.name, _SAMPLE_ROWS, 0, _SAMPLE_BLOCKS)
    facts = [_look_at(each, sample.columns[each.name]) for each in cache.columns if each.name != column.name]
    return LabelFacts(column, values, cache.rows, names), facts


def _read_values(paths: Paths, caches: Sequence[CacheSpec], column: Column) -> tuple[Any, ...] | None:
    """Return the different values of a column in order, by all rows; None if there are too many."""
    import numpy as np

    from insitu.base.context import Context
    from insitu.grid import dataset
    from insitu.service import MOST_CLASSES

    found: set[Any] = set()
    with _shown_rows(sum(each.rows for each in caches)) as report:
        for cache in caches:
            rows = dataset(cache.name, features=column.name, label=None, paths=paths, context=Context(paths))
            for batch in rows.batch(_SCANNED_ROWS):
                values = np.asarray(batch)
                if values.dtype.kind == "f" and not np.isfinite(values).all():
                    raise InputError(
                        f"A label is a number in each row. Received: one in column {column.name} of "
                        f"{cache.name} that is missing or not finite. Import without such rows, or give "
                        "--label with another column"
                    )
                report(len(values))
                if len(found) <= MOST_CLASSES:
                    found.update(_list_values(values))
    return tuple(sorted(found)) if len(found) <= MOST_CLASSES else None


def _list_values(values: Any) -> Iterator[Any]:
    """Yield the different values of an array as Python has them."""
    import numpy as np

    if values.dtype == object:
        yield from {each.decode() if isinstance(each, bytes) else str(each) for each in values}
    else:
        yield from np.unique(values).tolist()


@contextlib.contextmanager
def _shown_rows(rows: int) -> Iterator[Callable[[int], None]]:
    """Show how many labels have been read, if that takes long and a terminal is there."""
    if rows < _BAR_ROWS or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("read labels", total=rows)
        yield lambda done: bar.update(task, advance=done)


def _look_at(column: Column, values: Any) -> FeatureFacts:
    import numpy as np

    from insitu.service import FeatureFacts

    if column.dtype == "str":
        texts = [each.decode(errors="replace") if isinstance(each, bytes) else str(each) for each in values]
        words = np.array([len(text.split()) for text in texts])
        return FeatureFacts(column, len(set(texts)), float(words.mean()), int(np.percentile(words, 95)))
    if column.shape or values.dtype.kind not in "biuf":
        is_uint8 = column.dtype == "uint8" and len(values) > 0
        return FeatureFacts(column, largest=int(values.max()) if is_uint8 else 0)
    return FeatureFacts(column, len(np.unique(values)), has_missing=not np.isfinite(values).all())


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(init)
