"""How fast buffers are reduced between processes: insitu, gloo, Open MPI and TensorFlow's RING.

    python benchmarks/exchange.py          the table for 2 ranks, the same between two network namespaces
                                           (root), a coarse curve for 2, 4 and 8 ranks, memory: 5 minutes
    python benchmarks/exchange.py --curve  the curve with all sizes from 1 KB to 256 MB: half an hour
    python benchmarks/exchange.py --parts table namespaces memory curve   some of them
    python benchmarks/exchange.py --profile  where the time of small buffers goes: half a minute

Contenders run in turn. Each round has fresh processes that are pinned to one core each, round robin if
there are more ranks than cores. A figure is the median over rounds of the median operation of rank 0.
README.md says how to install the other libraries; one that is missing is named in the table. Horovod can't
be installed on current Python.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from json import loads
from pathlib import Path
from typing import Any

from common import Unavailable, addresses, machine, machine_line, parser, save_json, say, table

HERE = Path(__file__).parent / "exchange_peers"
PLOT = Path(__file__).parent / "results" / "exchange.png"
PARTS = ("table", "namespaces", "memory", "curve")
TABLE_SIZES = (4096, 100_000, 100_000_000)
NAMESPACE_SIZES = (100_000, 100_000_000)
COARSE_SIZES = (1024, 16_384, 262_144, 4_194_304, 67_108_864)
CURVE_SIZES = tuple(1024 * 4**power for power in range(10))  # 1 KB to 256 MB
QUICK_SIZES = (4096, 100_000, 4_000_000)
PROFILE_SIZES = (1024, 16_384, 100_000, 262_144)
HEADER_BYTES = 160
"""Of the exchange, over TCP, before each message."""
CURVE_BUDGET = "0.25"
"""Seconds that one size of the curve may take, roughly; of the table it is one second."""
BEYOND_CACHES = 48_000_000
"""Bytes from which a buffer is sure not to stay in a cache, so that the floor means something."""
DEADLINE = 600.0

Figures = dict[int, float]
Results = dict[str, Any]
"""By contender: {size: [seconds]}, or why there is nothing."""


def run_all(commands: Sequence[Sequence[str]], environment: dict[str, str] | None = None) -> Figures:
    """Runs one process per rank to the end; what rank 0 printed."""
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
    return {int(size): value for size, value in loads(lines[-1]).items()}


def python(kind: str, ranks: int, sizes: Sequence[int]) -> Figures:
    needed = {"gloo": "torch", "tensorflow": "tensorflow"}.get(kind)
    if needed and find_spec(needed) is None:
        raise Unavailable(f"{needed} is not installed")
    ports = ",".join(address.rpartition(":")[2] for address in addresses(ranks))
    script = str(HERE / "python_rank.py")
    return run_all(
        [
            [sys.executable, script, kind, str(rank), str(ranks), "127.0.0.1", ports, *map(str, sizes)]
            for rank in range(ranks)
        ],
        {"GLOO_SOCKET_IFNAME": "lo"},
    )


def sweep(ranks: int, sizes: Sequence[int]) -> Figures:
    beyond = [size for size in sizes if size >= BEYOND_CACHES]
    return python("sweep", ranks, beyond) if beyond else {}


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
    "floor (sweep in place)": sweep,
    "insitu shm": partial(python, "shm"),
    "insitu tcp": partial(python, "tcp"),
    "insitu tls": partial(python, "tls"),
    "gloo": partial(python, "gloo"),
    "Open MPI shm": partial(mpi, "vader"),
    "Open MPI tcp": partial(mpi, "tcp"),
    "TensorFlow RING": lambda ranks, sizes: python("tensorflow", ranks, [s for s in sizes if s <= 10**8]),
}
PEERS = {"insitu shm": ("gloo", "Open MPI shm"), "insitu tcp": ("gloo", "Open MPI tcp")}
"""Whom each transport must be ahead of."""


@contextmanager
def namespaces(control: str | None) -> Any:
    """Two network namespaces joined by a veth pair: (names, addresses). `control` is the congestion control
    that the system has there by default (None: that of this machine)."""
    names, hosts = ("insitu-bench-0", "insitu-bench-1"), ("10.213.7.1", "10.213.7.2")
    if not shutil.which("ip"):
        raise Unavailable("`ip` is not installed")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "ib0", "netns", names[0], "type", "veth", "peer", "ib1", "netns", names[1])
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"no namespaces: {error.stderr.decode().strip()}") from error
        for index, (name, host) in enumerate(zip(names, hosts, strict=True)):
            ip("-n", name, "addr", "add", f"{host}/24", "dev", f"ib{index}")
            ip("-n", name, "link", "set", f"ib{index}", "up")
            ip("-n", name, "link", "set", "lo", "up")
            if control is not None:
                setting = f"net.ipv4.tcp_congestion_control={control}"
                ip("netns", "exec", name, "sysctl", "-q", "-w", setting)
        yield names, hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def between_namespaces(kind: str, control: str | None, sizes: Sequence[int]) -> Figures:
    if kind == "gloo" and find_spec("torch") is None:
        raise Unavailable("torch is not installed")
    with namespaces(control) as (names, hosts):
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
) -> Results:
    """All contenders in turn, `rounds` times."""
    results: Results = {name: {size: [] for size in sizes} for name in contenders}
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


def median(results: Results, name: str, size: int) -> float | None:
    """None if there is none."""
    figures = results.get(name)
    return statistics.median(figures[size]) if isinstance(figures, dict) and figures.get(size) else None


def show(title: str, results: Results, sizes: Sequence[int], first: str) -> str:
    """A table of microseconds, with how many times longer than `first` each takes."""
    rows = []
    for name, figures in results.items():
        if isinstance(figures, str):
            rows.append([name, figures, *[""] * (len(sizes) - 1)])
            continue
        cells = []
        for size in sizes:
            value, base = median(results, name, size), median(results, first, size)
            text = "" if value is None else f"{value * 1e6:,.1f}"
            if value is not None and base and name != first:
                text += f" ({value / base:.2g}x)" if value < 100 * base else f" ({value / base:.0f}x)"
            cells.append(text)
        if any(cells):
            rows.append([name, *cells])
    header = ["microseconds", *(readable(size) for size in sizes)]
    return f"\n{title}\n\n{table(header, rows)}\n"


def readable(size: int) -> str:
    for unit, scale in (("MB", 10**6), ("KB", 10**3)):
        if size >= scale:
            return f"{size / scale:,.4g} {unit}"
    return f"{size} B"


def behind(by_ranks: dict[int, Results], sizes: Sequence[int]) -> list[str]:
    """Where a peer is faster, in words."""
    found = []
    for ranks, results in by_ranks.items():
        for name, peers in PEERS.items():
            for size in sizes:
                own = median(results, name, size)
                for peer in peers:
                    theirs = median(results, peer, size)
                    if own and theirs and theirs < own:
                        where = f"{name}, {ranks} ranks, {readable(size)}"
                        found.append(f"{where}: {peer} is {own / theirs:.2f} times faster")
    return found


def per_byte(by_ranks: dict[int, Results], sizes: Sequence[int]) -> str:
    """Time per byte of all ranks' buffers, as a multiple of that of 2 ranks."""
    rows = []
    for name in PEERS:
        for ranks in [r for r in by_ranks if r > 2]:
            cells = []
            for size in sizes:
                own, two = median(by_ranks[ranks], name, size), median(by_ranks[2], name, size)
                cells.append(f"{own / two * 2 / ranks:.2f}" if own and two else "")
            rows.append([f"{name}, {ranks} ranks", *cells])
    header = ["time per byte against 2 ranks", *(readable(size) for size in sizes)]
    return f"\n{table(header, rows)}\n"


def plot(by_ranks: dict[int, Results], path: Path) -> None:
    """Bandwidth (bytes of the buffer per second) against size, one panel per number of ranks."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        say("no plot: matplotlib is not installed")
        return
    figure, axes = pyplot.subplots(1, len(by_ranks), figsize=(6 * len(by_ranks), 5), squeeze=False)
    for axis, (ranks, results) in zip(axes[0], by_ranks.items(), strict=True):
        for name, figures in results.items():
            if isinstance(figures, dict):
                points = [
                    (size, size / statistics.median(times) / 1e9) for size, times in figures.items() if times
                ]
                style = "k--" if "floor" in name else "-"
                if points:
                    axis.loglog(*zip(*points, strict=True), style, marker="o", label=name)
        axis.set(title=f"{ranks} ranks", xlabel="buffer, bytes", ylabel="GB/s of buffer reduced")
        axis.grid(True, which="both", alpha=0.3)
        axis.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    say(f"plot: {path}")


def congestion_control() -> str:
    path = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return path.read_text().strip() if path.exists() else "unknown"


def the_table(chosen: Any, report: dict[str, Any]) -> str:
    sizes = QUICK_SIZES if chosen.quick else TABLE_SIZES
    names = [n for n in CONTENDERS if not chosen.only or n in chosen.only]
    contenders = {n: partial(CONTENDERS[n], 2) for n in names}
    results = compete(contenders, sizes, chosen.rounds or (1 if chosen.quick else 3))  # type: ignore[arg-type]
    report["table"] = results
    title = f"all_reduce of float32, 2 ranks, one core each; the system's TCP has {congestion_control()}"
    return show(title, results, sizes, "insitu shm")


def the_namespaces(chosen: Any, report: dict[str, Any]) -> str:
    sizes = QUICK_SIZES[1:] if chosen.quick else NAMESPACE_SIZES
    contenders = {
        "insitu tcp": partial(between_namespaces, "tcp", None),
        "insitu tls": partial(between_namespaces, "tls", None),
        "gloo": partial(between_namespaces, "gloo", None),
        "gloo where the system has reno": partial(between_namespaces, "gloo", "reno"),
    }
    results = compete(contenders, sizes, chosen.rounds or (1 if chosen.quick else 2))  # type: ignore[arg-type]
    report["namespaces"] = results
    title = f"2 ranks in two network namespaces joined by veth; the system's TCP has {congestion_control()}"
    return show(title, results, sizes, "insitu tcp")


def the_memory(chosen: Any, report: dict[str, Any]) -> str:
    size = max(QUICK_SIZES if chosen.quick else TABLE_SIZES)
    found = {kind: python(f"memory-{kind}", 2, [size])[size] for kind in ("shm", "tcp")}
    report["memory_in_buffers"] = found
    rows = [[f"insitu {kind}", f"{value:.2f}"] for kind, value in found.items()]
    return f"\n{table(['2 ranks, ' + readable(size), 'memory of a rank, in buffers'], rows)}\n"


def the_curve(chosen: Any, report: dict[str, Any]) -> str:
    sizes = QUICK_SIZES if chosen.quick else CURVE_SIZES if chosen.curve else COARSE_SIZES
    left_out = ("TensorFlow RING", "insitu tls")
    names = [n for n in CONTENDERS if (n in chosen.only if chosen.only else n not in left_out)]
    by_ranks = {}
    os.environ["BENCHMARK_BUDGET"] = CURVE_BUDGET
    for ranks in chosen.ranks:
        say(f"{ranks} ranks")
        contenders = {n: partial(CONTENDERS[n], ranks) for n in names}
        by_ranks[ranks] = compete(contenders, sizes, chosen.rounds or (3 if chosen.curve else 1))  # type: ignore[arg-type]
    slower = behind(by_ranks, sizes)
    report["curve"], report["behind"] = by_ranks, slower
    plot(by_ranks, chosen.plot)
    tables = [show(f"{ranks} ranks", found, sizes, "insitu shm") for ranks, found in by_ranks.items()]
    if 2 in by_ranks and len(by_ranks) > 1:
        tables.append(per_byte(by_ranks, sizes))
    lines = [f"- {line}" for line in slower] or ["- nowhere"]
    if chosen.plot == PLOT and PLOT.exists():
        tables.append("![Bandwidth against size](results/exchange.png)\n")
    return "\n".join([*tables, "Where another library is faster over the same transport:", "", *lines])


def floor(sizes: Sequence[int]) -> Figures:
    """What two bare C programs need to exchange so many bytes (0: a word in shared memory)."""
    if not shutil.which("cc"):
        raise Unavailable("cc is not installed")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "floor")
        subprocess.run(["cc", "-O2", "-o", program, str(HERE / "floor.c")], check=True)
        return run_all([[program, *map(str, sizes)]])


def the_profile(chosen: Any, report: dict[str, Any]) -> str:
    sizes = PROFILE_SIZES[:2] if chosen.quick else PROFILE_SIZES
    bare = floor([0, *(size + HEADER_BYTES for size in sizes)])
    own = python("alone", 1, sizes)
    rows, report["profile"] = [], {"floor": bare, "alone": own}
    for ranks in chosen.ranks:
        for kind in ("shm", "tcp"):
            found: dict[int, Any] = python(f"profile-{kind}", ranks, sizes)
            report["profile"][f"{kind}, {ranks} ranks"] = found
            for size in sizes:
                least = bare[0 if kind == "shm" else size + HEADER_BYTES] if ranks == 2 else None
                parts = found[size]
                rows.append(
                    [
                        f"{kind}, {ranks} ranks, {readable(size)}",
                        f"{parts['median']:,.1f}",
                        "" if least is None else f"{least * 1e6:,.1f}",
                        f"{own[size] * 1e6:.1f}",
                        *(f"{parts[name]:,.1f}" for name in ("mean", "waiting", "program", "system")),
                        f"{parts['switches']:.2f}",
                    ]
                )
    header = ["microseconds of rank 0", "median", "bare C", "Python's call", "mean", "of it waiting"]
    header += ["processor, program", "processor, system", "switches"]
    return f"\n{table(header, rows)}\n"


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="of the curve")
    options.add_argument("--curve", action="store_true", help="all sizes from 1 KB to 256 MB, three rounds")
    options.add_argument("--only", nargs="+", default=None, metavar="NAME", help="these contenders")
    options.add_argument("--plot", type=Path, default=PLOT, metavar="FILE", help="PNG of bandwidth by size")
    options.add_argument("--profile", action="store_true", help="where the time of small buffers goes")
    chosen = options.parse_args()
    where = machine()
    say(machine_line(where))
    report: dict[str, Any] = {"congestion_control": congestion_control()}
    print(machine_line(where))
    parts = dict(zip(PARTS, (the_table, the_namespaces, the_memory, the_curve), strict=True))
    if chosen.profile:
        print(the_profile(chosen, report), flush=True)
        chosen.parts = []
    for name, part in parts.items():
        if name in chosen.parts:
            print(part(chosen, report), flush=True)
    save_json(chosen.json, "exchange", where, **report)


if __name__ == "__main__":
    main()
