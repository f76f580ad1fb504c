"""Coverage-guided fuzzing of what servers of Apache Ignite send. A run ends by the first finding.

    pip install --target /tmp/atheris atheris
    export PYTHONPATH=/tmp/atheris:src:tests/support
    .venv/bin/python tests/fuzz/fuzz_ignite.py page -max_total_time=1200

The first argument is what is sent: page (rows, whose first byte says how many), answer (any other message,
whose first byte says which), or arrow (byte[] with an Arrow IPC stream). The rest goes to libFuzzer. A
finding is any exception but those that become a SourceError, a signal, or more than 2 GiB of memory.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["insitu"]):
    import numpy as np
    import pyarrow as pa
    from ignite_recording import RECORDED

    from insitu.base.errors import InputError, SourceError
    from insitu.extensions.ignite import protocol
    from insitu.extensions.ignite.arrow_values import find_arrow_columns, unpack_arrow
    from insitu.extensions.ignite.fields import decode_rows, find_fields
    from insitu.extensions.ignite.objects import UnknownSchema
    from insitu.extensions.ignite.rows import find_rows
    from insitu.extensions.ignite.source import digest_rows, order_rows, take_rows
    from insitu.extensions.ignite.wire import Malformed
    from insitu.grid.sources import ColumnOptions, SourceOptions

MESSAGES = {name: bytes.fromhex(text) for name, text in json.loads(RECORDED.read_text()).items()}
AS_ERROR = (ValueError, LookupError, ArithmeticError)
"""What `IgniteSource` turns into a SourceError while it decodes rows."""
DECODERS: dict[str, Callable[[memoryview], Any]] = {
    "names": protocol.decode_names,
    "configuration": protocol.decode_configuration,
    "endpoints": protocol.decode_endpoints,
    "type": protocol.decode_type,
    "handshake": protocol.decode_handshake,
    "response": protocol.decode_response,
    "partitions": lambda contents: protocol.decode_partitions(contents, 1),
    "page": lambda contents: protocol.decode_page(contents, None),
    "size": protocol.decode_size,
}


def read_page() -> tuple[Callable[[bytes], None], list[bytes]]:
    """Rows of all types, decoded and put into order as an import does."""
    made = [protocol.decode_type(memoryview(m)) for name, m in MESSAGES.items() if name.startswith("type ")]
    types = {kind.number: kind for kind in made if kind}
    configuration = protocol.decode_configuration(memoryview(MESSAGES["configuration"]))

    def read(data: bytes) -> None:
        contents = data[1:]
        with suppress(SourceError, InputError, UnknownSchema, *AS_ERROR):
            rows = find_rows(contents, data[0] if data else 0)
            fields = find_fields(
                rows, configuration, types.__getitem__, ColumnOptions(), SourceOptions(), partly=True
            )
            values = decode_rows(fields, rows, types.__getitem__)
            order = order_rows(rows, np.zeros(len(rows.keys), np.int64))
            found = {name: take_rows(column, order) for name, column in values.items()}
            digest_rows(list(found), found, np.array([0, len(order)]))

    page = protocol.decode_page(memoryview(MESSAGES["page"]), None)
    rows = find_rows(page.data, page.rows)
    few = [bytes([n]) + bytes(page.data[: int(rows.ends[n - 1])]) for n in (1, 2, min(5, page.rows))]
    return read, few


def read_answer() -> tuple[Callable[[bytes], None], list[bytes]]:
    decoders = list(DECODERS.values())

    def read(data: bytes) -> None:
        with suppress(Malformed, SourceError):
            decoders[(data[0] if data else 0) % len(decoders)](memoryview(data[1:]))

    return read, [bytes([n]) + message for n in range(len(decoders)) for message in MESSAGES.values()]


def read_arrow() -> tuple[Callable[[bytes], None], list[bytes]]:
    """The same stream in three rows."""
    sink = io.BytesIO()
    schema = pa.schema({"x": pa.int32(), "text": pa.string(), "list": pa.list_(pa.int16(), 2)})
    with pa.ipc.new_stream(sink, schema) as writer:
        for first in (0, 2):
            numbers = range(first, first + 2)
            writer.write_batch(
                pa.record_batch(
                    [
                        pa.array(numbers, pa.int32()),
                        pa.array([f"t{n}" for n in numbers]),
                        pa.array([[n, 1] for n in numbers], pa.list_(pa.int16(), 2)),
                    ],
                    schema=schema,
                )
            )

    def read(data: bytes) -> None:
        values = pa.array([data, data, data], pa.large_binary())
        with suppress(SourceError, InputError, *AS_ERROR):
            columns = find_arrow_columns(values, "value", frozenset(["list", "text"]))
            _, found = unpack_arrow(values, columns, "value")
            for column in found.values():
                take_rows(column, np.arange(len(column))[::-1])

    return read, [sink.getvalue()]


TARGETS = {"page": read_page, "answer": read_answer, "arrow": read_arrow}


def main() -> None:
    read, examples = TARGETS[sys.argv.pop(1)]()
    corpus = Path(tempfile.mkdtemp(prefix="insitu-fuzz-"))
    for number, example in enumerate(examples):
        (corpus / str(number)).write_bytes(example)
    atheris.Setup([sys.argv[0], str(corpus), "-rss_limit_mb=2048", "-max_len=8192", *sys.argv[1:]], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
