"""How fast buffers are reduced between processes: insitu beside gloo, Open MPI and TensorFlow's RING.

    python benchmarks/exchange.py                        the table: 2 ranks, one core each
    python benchmarks/exchange.py --ranks 2 4 8 --curve  all sizes from 1 KB to 256 MB, for the plot
    python benchmarks/exchange.py --netns                over TCP between two network namespaces (root)

Contenders run in turn, each round in fresh processes pinned to one core each (round robin where ranks are
more than cores). A figure is the median over rounds of the median operation of rank 0. See README.md for
how to set the peers up; one that is missing is named as such. Horovod can't be installed on current Python.
"""

from __future__ import annotations

import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import Unavailable, machine, machine_line, parser, say, table

HERE = Path(__file__).parent / "exchange_peers"
TABLE_SIZES = (4096, 100_000, 100_000_000)
CURVE_SIZES = tuple(1024 * 4**power for power in range(10))  # 1 KB to 256 MB
QUICK_SIZES = (4096, 100_000, 4_000_000)
DEADLINE = 600.0
STREAM = "stream"

Figures = dict[int, float]


def free_ports(count: int) -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(s.getsockname()[1]) for s in sockets]


def run_all(commands: Sequence[Sequence[str]], environment: dict[str, str] | None = None) -> Figures:
    """Runs one process per rank to the end; what rank 0 printed."""
    import os

    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    try:
        output, errors = processes[0].communicate(timeout=DEADLINE)
        for process in processes[1:]:
            process.communicate(timeout=DEADLINE)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{' '.join(commands[0][:4])} failed: {errors[-800:]}")
    return {int(size): value for size, value in json.loads(lines[-1]).items()}


def python(kind: str, ranks: int, sizes: Sequence[int]) -> Figures:
    needed = {"gloo": "torch", "tensorflow": "tensorflow"}.get(kind)
    if needed and find_spec(needed) is None:
        raise Unavailable(f"{needed} is not installed")
    ports = ",".join(free_ports(ranks))
    script = str(HERE / "python_rank.py")
    return run_all(
        [
            [sys.executable, script, kind, str(rank), str(ranks), "127.0.0.1", ports, *map(str, sizes)]
            for rank in range(ranks)
        ],
        {"GLOO_SOCKET_IFNAME": "lo"},
    )


def mpi(transport: str, ranks: int, sizes: Sequence[int]) -> Figures:
    if not shutil.which("mpicc") or not shutil.which("mpirun"):
        raise Unavailable("mpicc and mpirun are not installed")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "mpi_rank")
        subprocess.run(["mpicc", "-O2", "-o", program, str(HERE / "mpi_rank.c")], check=True)
        options = ["--allow-run-as-root", "--oversubscribe", "--mca", "btl", f"{transport},self"]
        if transport == "tcp":
            options += ["--mca", "btl_tcp_if_include", "lo"]
        return run_all([["mpirun", *options, "-n", str(ranks), program, *map(str, sizes)]])


CONTENDERS: dict[str, Callable[[int, Sequence[int]], Figures]] = {
    "insitu shm": lambda ranks, sizes: python("shm", ranks, sizes),
    "insitu tcp": lambda ranks, sizes: python("tcp", ranks, sizes),
    "gloo": lambda ranks, sizes: python("gloo", ranks, sizes),
    "Open MPI shm": lambda ranks, sizes: mpi("vader", ranks, sizes),
    "Open MPI tcp": lambda ranks, sizes: mpi("tcp", ranks, sizes),
    "TensorFlow RING": lambda ranks, sizes: python("tensorflow", ranks, [s for s in sizes if s <= 10**8]),
}


@contextmanager
def namespaces() -> Any:
    """Two network namespaces joined by a veth pair: (names, addresses)."""
    names, hosts = ("insitu-bench-0", "insitu-bench-1"), ("10.213.7.1", "10.213.7.2")
    if not shutil.which("ip"):
        raise Unavailable("`ip` is not installed")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"no namespaces: {error.stderr.decode().strip()}") from error
        ip("link", "add", "ib0", "netns", names[0], "type", "veth", "peer", "ib1", "netns", names[1])
        for index, (name, host) in enumerate(zip(names, hosts, strict=True)):
            ip("-n", name, "addr", "add", f"{host}/24", "dev", f"ib{index}")
            ip("-n", name, "link", "set", f"ib{index}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names, hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def between_namespaces(kind: str, sizes: Sequence[int]) -> Figures:
    if kind == "gloo" and find_spec("torch") is None:
        raise Unavailable("torch is not installed")
    with namespaces() as (names, hosts):
        script, ports = str(HERE / "python_rank.py"), "29400,29401"
        inside = ("ip", "netns", "exec")
        return run_all(
            [
                [
                    *(*inside, names[rank], "env", f"GLOO_SOCKET_IFNAME=ib{rank}", sys.executable, script),
                    *(kind, str(rank), "2", ",".join(hosts), ports, *map(str, sizes)),
                ]
                for rank in range(2)
            ]
        )


def compete(
    contenders: dict[str, Callable[[Sequence[int]], Figures]], sizes: Sequence[int], rounds: int
) -> dict[str, Any]:
    """All contenders in turn, `rounds` times: name -> {size: [seconds]}, or why there is nothing."""
    results: dict[str, Any] = {name: {size: [] for size in sizes} for name in contenders}
    for turn in range(rounds):
        for name, run in contenders.items():
            if isinstance(results[name], str):
                continue
            say(f"  round {turn + 1}/{rounds}: {name}")
            try:
                for size, seconds in run(sizes).items():
                    results[name][size].append(seconds)
            except (Unavailable, RuntimeError, subprocess.SubprocessError) as error:
                results[name] = f"not measured: {error}"
    return results


def median(results: dict[str, Any], name: str, size: int) -> float | None:
    """None where there is none."""
    figures = results.get(name)
    return statistics.median(figures[size]) if isinstance(figures, dict) and figures.get(size) else None


def bandwidth(ranks: int, size: int) -> float:
    """Bytes per second that all ranks together move in memory."""
    return 2 * python(STREAM, 2, [size])[size]


def show(title: str, results: dict[str, Any], sizes: Sequence[int], floors: dict[int, float]) -> str:
    """A table of microseconds, with how many times faster the first contender is."""
    first = next(iter(results))
    rows = []
    if floors:
        rows.append(["floor", *(f"{floors[s] * 1e6:,.1f}" if s in floors else "" for s in sizes)])
    for name, figures in results.items():
        if isinstance(figures, str):
            rows.append([name, figures, *[""] * (len(sizes) - 1)])
            continue
        cells = []
        for size in sizes:
            value, base = median(results, name, size), median(results, first, size)
            text = "" if value is None else f"{value * 1e6:,.1f}"
            if value is not None and base and name != first:
                text += f" ({value / base:.1f}x)"
            cells.append(text)
        rows.append([name, *cells])
    header = ["microseconds", *(readable(size) for size in sizes)]
    return f"\n{title}\n\n{table(header, rows)}\n"


def readable(size: int) -> str:
    for unit, scale in (("MB", 10**6), ("KB", 10**3)):
        if size >= scale:
            return f"{size / scale:,.4g} {unit}"
    return f"{size} B"


def plot(all_results: dict[int, dict[str, Any]], path: Path) -> None:
    """Bandwidth (bytes of the buffer per second) against size, one panel per number of ranks."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        say("no plot: matplotlib is not installed")
        return
    figure, axes = pyplot.subplots(1, len(all_results), figsize=(6 * len(all_results), 5), squeeze=False)
    for axis, (ranks, results) in zip(axes[0], all_results.items(), strict=True):
        for name, figures in results.items():
            if isinstance(figures, dict):
                points = [
                    (size, size / statistics.median(times) / 1e9) for size, times in figures.items() if times
                ]
                axis.loglog(*zip(*points, strict=True), marker="o", label=name)
        axis.set(title=f"{ranks} ranks", xlabel="buffer, bytes", ylabel="GB/s of buffer reduced")
        axis.grid(True, which="both", alpha=0.3)
        axis.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    say(f"plot: {path}")


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--ranks", type=int, nargs="+", default=[2])
    options.add_argument("--curve", action="store_true", help="sizes from 1 KB to 256 MB")
    options.add_argument("--netns", action="store_true", help="TCP between two network namespaces")
    options.add_argument("--only", nargs="+", default=None, metavar="NAME", help="these contenders")
    options.add_argument("--plot", type=Path, default=None, metavar="FILE", help="PNG of bandwidth by size")
    chosen = options.parse_args()
    sizes = QUICK_SIZES if chosen.quick else CURVE_SIZES if chosen.curve else TABLE_SIZES
    rounds = chosen.rounds or (1 if chosen.quick else 3)
    where = machine()
    say(machine_line(where))
    report: dict[str, Any] = {"machine": where, "ranks": {}}
    tables, collected = [], {}
    if chosen.netns:
        pairs = {"insitu tcp": "tcp", "gloo": "gloo"}
        contenders = {n: lambda s, k=k: between_namespaces(k, s) for n, k in pairs.items()}
        results = compete(contenders, sizes, rounds)  # type: ignore[arg-type]
        report["namespaces"] = results
        tables.append(show("2 ranks in two network namespaces joined by veth", results, sizes, {}))
    for ranks in [] if chosen.netns else chosen.ranks:
        names = [n for n in CONTENDERS if not chosen.only or n in chosen.only]
        stream = bandwidth(ranks, max(sizes))
        floors = {size: 2 * ranks * size / stream for size in sizes if size > 32 * 10**6}
        results = compete({n: partial(CONTENDERS[n], ranks) for n in names}, sizes, rounds)  # type: ignore[misc]
        collected[ranks] = results
        report["ranks"][ranks] = {
            "stream_bytes_per_second": stream,
            "floor_seconds": floors,
            "seconds": results,
        }
        title = f"all_reduce of float32, {ranks} ranks; stream bandwidth {stream / 1e9:.1f} GB/s"
        tables.append(show(title, results, sizes, floors))
    print(machine_line(where), *tables, sep="\n")
    if chosen.plot and collected:
        plot(collected, chosen.plot)
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
