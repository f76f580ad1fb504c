"""Rows of a sparse table, looked up and updated on one parameter server: 64 floats each, Zipf keys.

    python benchmarks/parameter_tables.py [--quick] [--rows 1e5 1e6 1e7 1e8] [--spaces 1e7 1e8] [--json FILE]

All contenders hold the same number of rows and get the same batches of distinct keys in turn. A batch holds
the distinct keys of 65,536 draws. The update is gradient descent.

    bare NumPy      np.take of rows by number, and rows[numbers] -= rate * gradient: the speed of the
                    memory. The numbers have the order of the keys, which is random, as in the table
    insitu table    keys are any int64, found through the index: the table itself, as it is on a server
    insitu server   the same through a worker's client: another process, with its transport
    TensorFlow      tf.Variable, embedding_lookup and scatter_sub by row number, compiled, in one process

The figures are rows per second, medians over alternating rounds, and the bytes of memory for each row. A
size is left out, and named, if the free memory can't hold it four times.

Then a table with a key space that no machine here could hold. Rows are created on first use, so the table
only needs memory for the keys that a run uses. The optimizer is Adagrad, whose slot is as large as the row.
Each batch is looked up, which creates rows, and updated.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import common
import numpy as np
import psutil

WIDTH = 64
DRAWS = 65_536
BATCHES = 8
PASSES = 5
"""How often all batches are taken in each turn: one pass takes milliseconds, and finds cold caches."""
RATE = 0.01
EXPONENT = 1.05
_SPREAD = np.int64(0x9E3779B97F4A7C1)


def zipf_batches(rows: int) -> list[Any]:
    """Distinct row numbers of each batch, ascending; the popular ones are anywhere."""
    rng = np.random.default_rng(0)
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT
    cumulated = np.cumsum(weights)
    place = rng.permutation(rows)
    drawn = (np.searchsorted(cumulated, rng.random(DRAWS) * cumulated[-1]) for _ in range(BATCHES))
    return [np.unique(place[ranks]) for ranks in drawn]


def keys_of(numbers: Any) -> Any:
    """Keys that say nothing about where a row is: a bijection of 64-bit words, in ascending order."""
    return np.sort(numbers.astype(np.int64) * _SPREAD)


def in_order_of_keys(numbers: Any) -> Any:
    """The row numbers in the order of what `keys_of` makes of them."""
    return numbers[np.argsort(numbers.astype(np.int64) * _SPREAD)]


Contender = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]
"""(look up the rows of a batch, update them by gradients)."""


def bare(rows: int) -> Contender:
    values = np.random.default_rng(1).random((rows, WIDTH), np.float32)
    out = np.empty((DRAWS, WIDTH), np.float32)

    def update(numbers: Any, gradients: Any) -> None:
        values[numbers] -= np.float32(RATE) * gradients

    return lambda numbers: np.take(values, numbers, axis=0, out=out[: len(numbers)], mode="clip"), update


def table(rows: int) -> tuple[Contender, float]:
    """The contender, and bytes of memory for each row."""
    from insitu.parameters.tables import RowStore

    held = RowStore(_table())
    out = np.zeros((DRAWS, WIDTH), np.float32)
    step = 1 << 16
    # What making rows needs besides, whatever their number, isn't the rows'.
    RowStore(_table()).pull(np.arange(step), out[:step])
    before = psutil.Process().memory_info().rss
    for low in range(0, rows, step):
        keys = keys_of(np.arange(low, min(rows, low + step)))
        held.pull(keys, out[: len(keys)])
    grown = psutil.Process().memory_info().rss - before

    def look_up(keys: Any) -> None:
        held.pull(keys, out[: len(keys)])

    return (look_up, held.push), max(held.nbytes, grown) / rows


def _table() -> Any:
    from insitu.parameters import Table

    return Table("rows", WIDTH, updater={"name": "sgd", "learning_rate": RATE})


def _serve(pipe: Any) -> None:
    from insitu.parameters import ParameterServer

    server = ParameterServer(secret=b"secret of a benchmark")
    pipe.send(server.address)
    server.serve()


@contextlib.contextmanager
def server(rows: int) -> Iterator[Contender]:
    from insitu.parameters import connect

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        with connect([here.recv()], secret=b"secret of a benchmark") as client:
            client.define_tables([_table()])
            step = 1 << 16
            for low in range(0, rows, step):
                keys = keys_of(np.arange(low, min(rows, low + step)))
                client.pull_rows("rows", keys).result()
            sequence = iter(range(1 << 40))

            def look_up(keys: Any) -> None:
                client.pull_rows("rows", keys).result()

            def update(keys: Any, gradients: Any) -> None:
                client.push_rows("rows", keys, gradients, next(sequence)).result()

            yield look_up, update
    finally:
        process.kill()
        process.join()


def tensorflow(rows: int) -> Contender:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise common.Unavailable(f"tensorflow is not installed ({error})") from error
    values = tf.Variable(tf.random.uniform((rows, WIDTH)))
    numbers_like = tf.TensorSpec([None], tf.int64)

    @tf.function(input_signature=[numbers_like])
    def look_up(numbers: Any) -> Any:
        return tf.nn.embedding_lookup(values, numbers)

    @tf.function(input_signature=[numbers_like, tf.TensorSpec([None, WIDTH], tf.float32)])
    def update(numbers: Any, gradients: Any) -> None:
        values.scatter_sub(tf.IndexedSlices(RATE * gradients, numbers))

    return lambda numbers: look_up(numbers).numpy(), lambda numbers, gradients: update(numbers, gradients)


def runs(contender: Contender, batches: list[Any], gradients: Any) -> dict[str, Callable[[], float]]:
    """Rows per second of looking up, and of updating, all batches."""
    look_up, update = contender
    total = PASSES * sum(len(batch) for batch in batches)

    def updates() -> None:
        for batch in PASSES * batches:
            update(batch, gradients[: len(batch)])

    return {
        "look up": lambda: total / common.timed(lambda: [look_up(batch) for batch in PASSES * batches]),
        "update": lambda: total / common.timed(updates),
    }


def measure(rows: int, rounds: int) -> tuple[dict[str, dict[str, common.Result]], float]:
    """Results by what is done and contender; bytes of memory for each row of the table."""
    drawn = zipf_batches(rows)
    keys = [keys_of(batch) for batch in drawn]
    numbers = [in_order_of_keys(batch) for batch in drawn]
    gradients = np.random.default_rng(2).random((DRAWS, WIDTH), np.float32)
    common.say(f"filling tables of {rows:,} rows")
    with contextlib.ExitStack() as stack:
        held, row_bytes = table(rows)
        by_name: dict[str, Any] = {
            "bare NumPy": runs(bare(rows), numbers, gradients),
            "insitu table": runs(held, keys, gradients),
            "insitu server": runs(stack.enter_context(server(rows)), keys, gradients),
        }
        try:
            by_name["TensorFlow"] = runs(tensorflow(rows), numbers, gradients)
        except common.Unavailable as error:
            by_name["TensorFlow"] = {"look up": _missing(error), "update": _missing(error)}
        return {
            what: common.alternate(
                {name: each[what] for name, each in by_name.items()}, "rows/s", rounds, warm_up=1
            )
            for what in ("look up", "update")
        }, row_bytes


def zipf_keys(space: int, batches: int) -> Iterator[Any]:
    """Distinct keys of each batch, drawn from `space` keys: ranks by the inverse of the distribution's
    integral, which needs no list of all keys."""
    rng = np.random.default_rng(0)
    power = 1 - EXPONENT
    for _ in range(batches):
        ranks = (1 + rng.random(DRAWS) * (float(space) ** power - 1)) ** (1 / power)
        yield keys_of(np.unique(ranks.astype(np.int64)))


def touch(space: int, batches: int) -> dict[str, float]:
    """What a run over `space` keys makes and costs."""
    from insitu.parameters import Table
    from insitu.parameters.tables import RowStore

    updater = {"name": "adagrad", "learning_rate": RATE}
    held = RowStore(Table("rows", WIDTH, updater=updater))
    out, gradients = np.zeros((DRAWS, WIDTH), np.float32), np.ones((DRAWS, WIDTH), np.float32)
    RowStore(Table("warm", WIDTH, updater=updater)).pull(np.arange(DRAWS), out)
    before, seconds, total = psutil.Process().memory_info().rss, 0.0, 0
    for keys in zipf_keys(space, batches):
        seconds += common.timed(lambda keys=keys: held.pull(keys, out[: len(keys)]))
        seconds += common.timed(lambda keys=keys: held.push(keys, gradients[: len(keys)]))
        total += len(keys)
    grown = psutil.Process().memory_info().rss - before
    row_bytes = max(held.nbytes, grown) / len(held)
    return {"rows": len(held), "rows_per_second": total / seconds, "row_bytes": row_bytes}


def compare_spaces(spaces: list[int], batches: int) -> dict[str, Any]:
    needed = 2 * WIDTH * 4 + 8
    results = {str(space): touch(space, batches) for space in spaces}
    rows = [
        [
            f"{space:,}",
            f"{results[str(space)]['rows']:,}",
            f"{results[str(space)]['rows_per_second']:,.0f}",
            f"{results[str(space)]['row_bytes']:.0f}",
            f"{results[str(space)]['row_bytes'] / needed:.2f}",
            f"{space * needed / 1e9:,.0f} GB",
        ]
        for space in spaces
    ]
    header = ["keys", "rows made", "rows looked up and updated/s", "bytes a row", "of value, slot and key"]
    print(f"{batches} batches of {DRAWS:,} draws\n\n{common.table([*header, 'all keys would need'], rows)}\n")
    return results


def _missing(error: common.Unavailable) -> Callable[[], float]:
    def run() -> float:
        raise error

    return run


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--rows", type=float, nargs="*", default=None, help="sizes (1e5 to 1e8)")
    parser.add_argument("--spaces", type=float, nargs="*", default=None, help="key spaces (1e7 1e8)")
    options = parser.parse_args()
    sizes = [int(size) for size in options.rows or ([1e4] if options.quick else [1e5, 1e6, 1e7, 1e8])]
    machine = common.machine()
    print(common.machine_line(machine) + "\n")
    results: dict[str, Any] = {}
    for rows in sizes:
        # The table, the server's, NumPy's and TensorFlow's; and what drawing the keys takes.
        needed = rows * (4 * WIDTH * 4 + 64)
        if needed > psutil.virtual_memory().available * 0.75:
            print(f"{rows:,} rows: not measured, {needed / 1e9:.0f} GB are needed for all contenders.\n")
            results[str(rows)] = {"missing": f"{needed} bytes needed"}
            continue
        results, row_bytes = measure(rows, options.rounds or (2 if options.quick else 5))
        bare_bytes = WIDTH * 4 + 8
        print(f"{rows:,} rows; {row_bytes:.0f} bytes each, {row_bytes / bare_bytes:.2f} of value and key\n")
        for what, by_name in results.items():
            print(f"{what}\n\n{common.results_table(by_name, 'insitu table', form='{:,.0f}'.format)}\n")
        results[str(rows)] = {
            "row_bytes": row_bytes,
            **{what: common.results_json(by_name) for what, by_name in results.items()},
        }
    spaces = [int(s) for s in options.spaces or ([1e8] if options.quick else [1e7, 1e8])]
    made = compare_spaces(spaces, 4 if options.quick else 60)
    common.save_json(options.json, "parameter_tables", machine, sizes=results, spaces=made)


if __name__ == "__main__":
    main()
