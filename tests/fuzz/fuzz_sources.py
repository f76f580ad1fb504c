"""Coverage-guided fuzzing of the readers of files that `insitu import` has. A run ends by the first finding.

    pip install --target /tmp/atheris atheris
    export PYTHONPATH=/tmp/atheris:src:tests/support
    .venv/bin/python tests/fuzz/fuzz_sources.py npy -max_total_time=1200

The first argument is the format: one of arrow, arrows, parquet, csv, npy, npz, tfrecord, ndjson, txt, tar,
or record, a record of TFRecord with right checksums. The rest goes to libFuzzer. A
finding is any exception but SourceError, a signal, or more than 2 GiB of memory.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["insitu.grid", "numpy.lib", "zipfile"]):
    from malformed_files import format_of, make_files, make_records, read_all, write_tfrecord


def main() -> None:
    suffix = sys.argv.pop(1)
    folder = Path(tempfile.mkdtemp(prefix="insitu-fuzz-"))
    corpus = folder / "corpus"
    corpus.mkdir()
    for name, data in make_files().items():
        if name.endswith(f".{suffix}"):
            (corpus / name).write_bytes(data)
    path = folder / ("input.tfrecord" if suffix == "record" else f"input.{suffix}")
    if suffix == "record":  # checksums would refuse most changes of a file
        for number, record in enumerate(make_records()):
            (corpus / f"{number}.record").write_bytes(record)

    def read_one(data: bytes) -> None:
        path.write_bytes(write_tfrecord([data]) if suffix == "record" else data or b"\0")
        read_all(path, format_of(path.name))

    atheris.Setup([sys.argv[0], str(corpus), "-rss_limit_mb=2048", "-max_len=65536", *sys.argv[1:]], read_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
