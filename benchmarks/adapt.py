"""Preprocessing layers adapted to a cache: insitu.adapt compared with Keras' adapt, in one process each.

    python benchmarks/adapt.py [--quick] [--json FILE]

10 million rows of a float32 number and a word of 1000 are in partitions of four nodes
on this machine. Both read them from the page cache. Keras' adapt gets the batches of an insitu.dataset, of
65536 rows, for one layer after another; insitu.adapt reads each partition once for all layers. The figure is
seconds for all three: Normalization, Discretization with 100 bins, and the vocabulary of a StringLookup.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import common
import numpy as np

OURS, KERAS = "insitu.adapt", "Keras' adapt"


def import_rows(folder: Path, rows: int) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from insitu.base.paths import Paths
    from insitu.grid import bring_up, import_cache

    rng = np.random.default_rng(0)
    words = pa.array([f"word-{number}" for number in range(1000)])
    columns = {
        "number": rng.normal(size=rows).astype(np.float32),
        "word": pa.DictionaryArray.from_arrays(rng.zipf(1.5, rows) % 1000, words).cast(pa.string()),
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    paths = Paths(folder / "home")
    bring_up(paths, 4)
    import_cache(paths, "rows", [str(folder / "rows.parquet")], partitions=16)
    return paths


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    machine = common.machine()
    rows = 200_000 if options.quick else 10_000_000
    rounds = options.rounds or (1 if options.quick else 3)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras

    import insitu
    from insitu.base.context import Context

    with tempfile.TemporaryDirectory() as folder:
        paths = import_rows(Path(folder), rows)

        def data(name: str) -> Any:
            found = insitu.dataset("rows", features=name, label=None, context=Context(paths=paths))
            return found.map(lambda values: values[:, None]) if name == "number" else found

        def layers() -> dict[str, Any]:
            return {
                "normalization": keras.layers.Normalization(),
                "discretization": keras.layers.Discretization(num_bins=100),
                "lookup": keras.layers.StringLookup(),
            }

        def both() -> Any:
            held = insitu.dataset("rows", label=None, context=Context(paths=paths))
            return held.map(
                lambda batch: {
                    "normalization": batch["number"][:, None],
                    "discretization": batch["number"],
                    "lookup": batch["word"],
                }
            )

        def by_keras() -> None:
            made = layers()
            made["normalization"].adapt(iter(data("number").batch(65536)))
            for batch in data("number").batch(65536):
                made["discretization"].update_state(batch)
            made["discretization"].finalize_state()
            made["lookup"].adapt(batch.astype(str) for batch in data("word").batch(65536))

        contenders = {
            OURS: lambda: common.timed(lambda: insitu.adapt(layers(), both())),
            KERAS: lambda: common.timed(by_keras),
        }
        results = common.alternate(contenders, "s", rounds, warm_up=0 if options.quick else 1)
    print(common.machine_line(machine))
    print(f"\n{rows:,} rows\n")
    print(common.results_table(results, OURS, more_is_better=False, form="{:.2f}".format))
    common.save_json(options.json, "adapt", machine, rows=rows, results=common.results_json(results))


if __name__ == "__main__":
    main()
