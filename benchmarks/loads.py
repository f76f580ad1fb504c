"""What strangers at a job's ports cost its training: milliseconds a step of two workers, with and without.

A job trains (two workers; two workers and a parameter server in mode sync). This process, at the lowest
priority, loads each of its listeners in turn, at a bounded rate:

  refused   connections that greet as insitu does and bring a wrong proof, then wait to be cut off
  garbage   connections that bring 256 random bytes, 10,000 in all
  loris     200 connections to each listener that send one byte of a greeting every half second
  noise     connections that send random bytes for as long as they are taken, 1 GB in all

The generator takes processor time of the same cores. So each load is also sent to a listener that only
accepts and closes ("dummy"), while the job trains: what the job's own listeners cost is the difference.
The processor time that the job's tasks take for a step leaves the generator out altogether. "quiet" are the
seconds between. A job without any load shows that the weights are the same bits.

Listeners are the TCP ports in the job's roster, and the Unix sockets in the kernel's name space by which
memory is handed over. Workers listen only while they meet; in between their ports refuse.
"""

from __future__ import annotations

import itertools
import os
import secrets
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import common
import job_runs

from insitu.base.paths import Paths
from insitu.base.progress import read_progress
from insitu.base.roster import read_roster
from insitu.base.spec import TaskId
from insitu.exchange import handshake

Target = tuple[socket.AddressFamily, Any]
GARBAGE = 10_000
NOISE_BYTES = 1 << 30
CHUNK = secrets.token_bytes(1 << 16)
GREETING = handshake.MAGIC + bytes(handshake.NONCE_BYTES)
LORIS = 200
RATE = 2000
"""Connections per second at most."""
NOISE_RATE = 200 << 20
"""Bytes of noise per second at most."""
QUIET = 3.0
"""Seconds without load before each load."""
FIRST_STEPS = 100
"""Steps before the first load."""
CALIBRATION = 2000
"""Steps of the job that shows how long a step takes."""
KINDS = {"two workers": 0, "with a server": 1}


class Refused:
    """Counts what became of the connections of one load."""

    def __init__(self) -> None:
        self.opened = 0
        #: The port was closed.
        self.closed_port = 0
        self.bytes = 0


def connect(target: Target, count: Refused) -> socket.socket | None:
    """A connection, or None where nobody listens."""
    family, address = target
    connection = socket.socket(family)
    connection.settimeout(2.0)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        count.closed_port += 1
        return None
    count.opened += 1
    return connection


def paced(rate: float, until: float) -> Iterator[None]:
    """Yields at most `rate` times a second, until the time `until`."""
    started = time.monotonic()
    for number in itertools.count():
        now = time.monotonic()
        if now >= until:
            return
        if (ahead := started + number / rate - now) > 0:
            time.sleep(ahead)
        yield


def send_refused(targets: list[Target], seconds: float, count: Refused) -> None:
    for target, _ in zip(itertools.cycle(targets), paced(RATE, time.monotonic() + seconds), strict=False):
        if connection := connect(target, count):
            with closing(connection), suppress(OSError):
                connection.sendall(GREETING + bytes(64))
                while data := connection.recv(4096):
                    count.bytes += len(data)


def send_garbage(targets: list[Target], seconds: float, count: Refused) -> None:
    pace = paced(RATE, time.monotonic() + seconds)
    for number, target, _ in zip(range(GARBAGE), itertools.cycle(targets), pace, strict=False):
        if connection := connect(target, count):
            with closing(connection), suppress(OSError):
                connection.sendall(CHUNK[number : number + 256])


def send_loris(targets: list[Target], seconds: float, count: Refused) -> None:
    until = time.monotonic() + seconds
    open_ones: dict[int, tuple[socket.socket, int]] = {}
    with ExitStack() as stack:
        while time.monotonic() < until:
            began = time.monotonic()
            for number in range(LORIS * len(targets)):
                if number not in open_ones:
                    if connection := connect(targets[number % len(targets)], count):
                        open_ones[number] = stack.enter_context(closing(connection)), 0
                    continue
                connection, sent = open_ones[number]
                try:
                    connection.send(GREETING[sent : sent + 1])
                    open_ones[number] = connection, sent + 1
                except OSError:
                    connection.close()
                    del open_ones[number]
            time.sleep(max(0.0, 0.5 - (time.monotonic() - began)))


def send_noise(targets: list[Target], seconds: float, count: Refused) -> None:
    until, started = time.monotonic() + seconds, time.monotonic()
    for target in itertools.cycle(targets):
        if time.monotonic() >= until or count.bytes >= NOISE_BYTES:
            return
        connection = connect(target, count)
        if connection is None:
            time.sleep(0.001)
            continue
        with closing(connection), suppress(OSError):
            while time.monotonic() < until and count.bytes < NOISE_BYTES:
                count.bytes += connection.send(CHUNK)
                time.sleep(max(0.0, started + count.bytes / NOISE_RATE - time.monotonic()))


LOADS: dict[str, Callable[[list[Target], float, Refused], None]] = {
    "refused": send_refused,
    "garbage": send_garbage,
    "loris": send_loris,
    "noise": send_noise,
}


def list_jobs(paths: Paths) -> set[str]:
    """The ids of all jobs; one that is being made has no name yet."""
    return {name for name in os.listdir(paths.jobs) if not name.startswith(".")}


def find_targets(paths: Paths, known: set[str]) -> list[Target]:
    """The listeners of the job that isn't one of `known`; none before its tasks run."""
    for job in list_jobs(paths) - known:
        roster = read_roster(paths.job(job).roster)
        tasks = find_tasks(job)
        if roster is None or len(tasks) < len(roster.members):
            continue
        found: list[Target] = []
        for member in (*roster.members, *roster.others):
            host, _, port = member.address.rpartition(":")
            found.append((socket.AF_INET, (host, int(port))))
        return found + [(socket.AF_UNIX, "\0" + name) for name in find_unix_names(tasks)]
    return []


def is_training(paths: Paths, known: set[str]) -> bool:
    """Return whether the job that isn't one of `known` has made its first steps."""
    progress = (
        read_progress(paths.job(job).progress(TaskId("worker", 0))) for job in list_jobs(paths) - known
    )
    return any(found is not None and found.step >= FIRST_STEPS for found in progress)


def find_tasks(job: str) -> list[Path]:
    """The folders in /proc of the job's tasks."""
    mark, found = f"INSITU_JOB_ID={job}".encode(), []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdecimal() and mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def read_processor_time(job: str) -> float:
    """Seconds of processor time that the job's tasks have taken, the kernel's on their behalf included."""
    ticks = 0
    for process in find_tasks(job):
        with suppress(OSError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def find_unix_names(tasks: list[Path]) -> list[str]:
    """Names of these processes' sockets in the kernel's own name space. Others on the host may have some."""
    held = set()
    for process in tasks:
        with suppress(OSError):
            held |= {os.readlink(descriptor) for descriptor in (process / "fd").iterdir()}
    words = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted(
        {
            w[7].removeprefix("@")
            for w in words
            if w[7:] and w[7][:8] == "@insitu-" and f"socket:[{w[6]}]" in held
        }
    )


@contextmanager
def dummy() -> Iterator[list[Target]]:
    """The address of a process that accepts, reads once and closes."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        number = listener.fileno()
        process = subprocess.Popen([sys.executable, __file__, "--listen", str(number)], pass_fds=[number])
        try:
            yield [(socket.AF_INET, listener.getsockname())]
        finally:
            process.kill()
            process.wait()


def listen(descriptor: int) -> None:
    """The dummy's process."""
    listener = socket.socket(fileno=descriptor)
    listener.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                with suppress(OSError):
                    connection, _ = listener.accept()
                    connection.setblocking(False)
                    selector.register(connection, selectors.EVENT_READ)
                continue
            connection = key.fileobj
            with suppress(OSError):
                if len(connection.recv(4096)) == 1:
                    continue  # one that sends byte by byte
            selector.unregister(connection)
            connection.close()


class Recorder:
    """Notes each period of load or of quiet: its times, and the processor time of the job's tasks."""

    def __init__(self, job: str) -> None:
        self._job = job
        self.periods: list[dict[str, Any]] = []

    @contextmanager
    def period(self, load: str, over: threading.Event, count: Refused) -> Iterator[None]:
        processor, begun = read_processor_time(self._job), time.monotonic()
        yield
        end = time.monotonic()
        spent = read_processor_time(self._job) - processor
        if not over.is_set():  # what came after the job's end counts for nothing
            note = {"load": load, "begin": begun, "end": end, "processor": spent}
            self.periods.append({**note, **vars(count)})


def load_job(
    paths: Paths, known: set[str], seconds: float, rounds: int, over: threading.Event, stack: ExitStack
) -> list[dict[str, Any]]:
    """Load the job, which begins meanwhile, until `over`, in `rounds` turns. Returns each period."""
    control = stack.enter_context(dummy())
    # Of this thread alone.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    while not over.is_set() and not is_training(paths, known):
        time.sleep(0.2)
    recorder = Recorder(next(iter(list_jobs(paths) - known), ""))
    goals = list(itertools.product(LOADS, (("job", None), ("dummy", control))))
    for name, (where, targets) in goals * rounds:
        if over.is_set():
            break
        with recorder.period("quiet", over, Refused()):
            over.wait(QUIET)
        count = Refused()
        with recorder.period(f"{name}, {where}", over, count):
            LOADS[name](find_targets(paths, known) if targets is None else targets, seconds, count)
    return recorder.periods


def measure(paths: Paths, servers: int, steps: int | None, seconds: float, rounds: int) -> dict[str, Any]:
    """One job with loads and one without, of so many steps that all loads have room (None)."""
    request = {"ps": servers}
    schedule = 2 * rounds * len(LOADS) * (seconds + QUIET) + QUIET
    if steps is None:
        short = job_runs.run_job(paths, "loads_task.py", request=request, servers=servers, steps=CALIBRATION)[
            "ends"
        ][FIRST_STEPS:]
        steps = int(1.3 * schedule / (short[-1] - short[0]) * len(short))
    asked = {"servers": servers, "steps": steps, "patience": job_runs.PATIENCE + 4 * schedule}
    quiet = job_runs.run_job(paths, "loads_task.py", request=request, **asked)
    known, over, periods = list_jobs(paths), threading.Event(), []
    with ExitStack() as stack:
        loads = threading.Thread(
            target=lambda: periods.extend(load_job(paths, known, seconds, rounds, over, stack))
        )
        loads.start()
        try:
            loaded = job_runs.run_job(paths, "loads_task.py", request=request, **asked)
        finally:
            over.set()
            loads.join()
    durations: dict[str, list[float]] = {}
    for period in periods:
        ends = [t for t in loaded["ends"] if period["begin"] <= t <= period["end"]]
        period["steps"] = len(ends)
        steps_of_it = [1e3 * (b - a) for a, b in itertools.pairwise(ends)]
        durations.setdefault(period["load"], []).extend(steps_of_it)
    return {"durations": durations, "periods": periods, "same": quiet["weights"] == loaded["weights"]}


def summarize(steps: list[float]) -> dict[str, float]:
    """Return the number, median and mean of durations of steps, in milliseconds."""
    if not steps:
        return {"steps": 0}
    return {"steps": len(steps), "median": statistics.median(steps), "mean": statistics.fmean(steps)}


def processor_per_step(found: dict[str, Any], load: str) -> float:
    """Milliseconds of processor time that the job's tasks took for a step under `load`."""
    periods = [p for p in found["periods"] if p["load"] == load]
    return 1e3 * sum(p["processor"] for p in periods) / max(1, sum(p["steps"] for p in periods))


def print_figures(kind: str, found: dict[str, Any]) -> None:
    quiet = found["durations"].get("quiet") or [float("nan")]
    base = statistics.median(quiet)
    quiet_processor = processor_per_step(found, "quiet")
    rows = []
    for name, steps in found["durations"].items():
        if len(steps) < 10:
            rows.append([name, "too few steps", "", "", "", "", ""])
            continue
        periods = [p for p in found["periods"] if p["load"] == name]
        lasted = sum(p["end"] - p["begin"] for p in periods)
        opened = sum(p.get("opened", 0) for p in periods)
        refused = sum(p.get("closed_port", 0) for p in periods)
        sent = sum(p.get("bytes", 0) for p in periods) if "noise" in name else 0
        median, mean = statistics.median(steps), statistics.fmean(steps)
        processor = processor_per_step(found, name)
        rows.append(
            [
                name,
                f"{median:.3f} ({median / base - 1:+.1%})",
                f"{mean:.3f} ({mean / statistics.fmean(quiet) - 1:+.1%})",
                f"{processor:.3f} ({processor / quiet_processor - 1:+.1%})",
                f"{opened / lasted:,.0f}" if opened else "",
                f"{refused / lasted:,.0f}" if refused else "",
                f"{sent / lasted / 1e6:,.0f}" if sent else "",
            ]
        )
    header = ["load", "ms a step, median", "mean", "processor ms a step, all tasks"]
    header += ["connections/s", "at closed ports/s", "MB/s"]
    print(f"\n{kind}: {'the same bits' if found['same'] else 'OTHER BITS'}\n")
    print(common.table(header, rows))


def main() -> None:
    if sys.argv[1:2] == ["--listen"]:
        listen(int(sys.argv[2]))
    made = common.parser(__doc__ or "")
    made.add_argument(
        "--steps", type=int, default=None, help="steps of each job (so that all loads have room)"
    )
    made.add_argument("--seconds", type=float, default=None, help="most seconds of each load")
    options = made.parse_args()
    machine = common.machine()
    seconds = options.seconds or (1.0 if options.quick else 10.0)
    saved = {}
    with job_runs.home() as paths:
        for kind, servers in KINDS.items():
            common.say(kind)
            saved[kind] = measure(paths, servers, options.steps, seconds, options.rounds or 2)
    print(common.machine_line(machine))
    for kind, found in saved.items():
        print_figures(kind, found)
    for found in saved.values():
        found["durations"] = {name: summarize(steps) for name, steps in found["durations"].items()}
    common.save_json(options.json, "loads", machine, kinds=saved)


if __name__ == "__main__":
    main()
