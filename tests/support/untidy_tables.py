"""Tables as people have them: delimiters, decimal commas, encodings, nulls, nested types, folders."""

from __future__ import annotations

import bz2
import csv
import datetime
import gzip
import io
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 2000


def make_columns() -> dict[str, list[Any]]:
    """Return a table with a column of each kind that a CSV has. None: a value is missing."""
    rng = np.random.default_rng(0)
    hour = datetime.timedelta(hours=1)
    gaps = rng.random((2, ROWS)) < 0.1
    return {
        "Kunde Nr.": list(range(ROWS)),
        "city": rng.choice(["Köln", "Łódź", "東京", "O'Hara", "A;B"], ROWS).tolist(),
        "since": [datetime.datetime(2019, 1, 1) + i * hour for i in range(ROWS)],
        "calls": [None if gap else int(rng.integers(0, 90)) for gap in gaps[0]],
        "income": [None if gap else round(float(rng.normal(50, 10)), 2) for gap in gaps[1]],
        "zip": [f"{number:05d}" for number in rng.integers(0, 99999, ROWS)],
        "left": rng.integers(0, 2, ROWS).tolist(),
    }


def write_texts(folder: Path) -> dict[str, Path]:
    """Write the table as text of many kinds. Returns the files by their kind."""
    kinds: dict[str, dict[str, Any]] = {
        "semicolon.csv": {"delimiter": ";"},
        "decimal_comma.csv": {"delimiter": ";", "decimal": ","},
        "tabs.csv": {"delimiter": "\t"},
        "tabs.tsv": {"delimiter": "\t"},
        "bars.csv": {"delimiter": "|"},
        "comma.csv": {"encoding": "utf-8-sig"},
        "utf16.csv": {"encoding": "utf-16"},
        "no_header.csv": {"header": False},
        "packed.csv.gz": {"pack": gzip.compress},
        "packed.csv.bz2": {"pack": bz2.compress},
        "latin.csv": {"encoding": "cp1252"},
    }
    for name, options in kinds.items():
        _write_text(folder / name, **options)
    return {name: folder / name for name in kinds}


def _write_text(
    path: Path,
    delimiter: str = ",",
    decimal: str = ".",
    encoding: str = "utf-8",
    header: bool = True,
    pack: Callable[[bytes], bytes] = bytes,
) -> None:
    columns, text = make_columns(), io.StringIO()
    columns["income"] = [
        "" if each is None else str(each).replace(".", decimal) for each in columns["income"]
    ]
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    if header:
        writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    path.write_bytes(pack(text.getvalue().encode(encoding, "replace")))


def write_nested(folder: Path) -> dict[str, Path]:
    """Write nested tables as Parquet, JSON lines and a partitioned folder. Returns them by their kind."""
    count = range(ROWS)
    at = [datetime.datetime(2019, 1, 1) + datetime.timedelta(hours=i) for i in count]
    table = pa.table(
        {
            "id": list(count),
            "at": at,
            "day": [each.date() for each in at],
            "price": pa.array([None if i % 7 == 0 else Decimal(i) for i in count], pa.decimal128(21, 2)),
            "geo": [{"lat": 1.5, "lon": float(i)} for i in count],
            "tags": pa.array([["a", "b"][: i % 3] for i in count]),
            "plan": pa.array(["free" if i % 2 else "paid" for i in count]).dictionary_encode(),
            "blob": [bytes([i % 256]) * 4 for i in count],
            "text": [None if i % 11 == 0 else f"word {i}" for i in count],
            "label": pa.array([i % 2 for i in count], pa.int8()),
        }
    )
    pq.write_table(table, folder / "nested.parquet")
    with (folder / "nested.jsonl").open("w", encoding="utf-8-sig") as lines:
        for i in count:
            user = {"name": f"u{i}", "age": None if i % 9 == 0 else i % 80}
            lines.write(json.dumps({"id": i, "user": user, "words": ["x"] * (i % 4), "y": i % 2}) + "\n")
    for label in (0, 1):
        (folder / "hive" / f"label={label}").mkdir(parents=True)
        part = pa.table({"i": [label, label + 2], "x": [0.5, 1.5]})
        pq.write_table(part, folder / "hive" / f"label={label}" / "part-0.parquet")
    return {name: folder / name for name in ("nested.parquet", "nested.jsonl", "hive")}
