"""What the page costs: seconds of its answers with 1,000 jobs on disk and 50 viewers of a running job, and
what they cost that job's steps.

  answers  50 viewers follow the job by server-sent events; each asks for a page or for JSON now and then
  steps    the training's step, in turns without viewers and with them, in the same job
  views    the first list of jobs of a server that has just started, and a cache of 10,000 partitions

The training has one core, the server and the viewers have another one where there are two.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np

from insitu.base.measure.task_samples import read_samples
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, Column, NodeId, PartitionInfo, TaskId
from insitu.grid import Catalog

TRAIN = """
import os, time
os.environ.setdefault("KERAS_BACKEND", "jax")
import keras
import insitu
strategy = insitu.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
train = insitu.dataset("rows", features="x", label="y").shuffle().batch(256)
model.fit(train, epochs=100000, verbose=0)
"""
PATHS = (
    "/",
    "/jobs/{job}",
    "/api/v1/jobs",
    "/api/v1/jobs/{job}",
    "/api/v1/jobs/{job}/logs",
    "/data",
    "/nodes",
)


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument(
        "--follow", nargs=4, help=argparse_suppress(), metavar=("URL", "TOKEN", "JOB", "SECONDS")
    )
    options = parser.parse_args()
    if options.follow:
        url, token, job, seconds = options.follow
        print(json.dumps(asyncio.run(follow(url, token, job, float(seconds), options.viewers))))
        return
    machine = common.machine()
    rounds = options.rounds or (1 if options.quick else 5)
    jobs, seconds = (30, 5.0) if options.quick else (1000, 20.0)
    figures = measure(jobs, options.viewers, rounds, seconds)
    latencies = sorted(figures["latencies"])
    shares = [with_them / without - 1 for without, with_them in figures["steps"]]
    rows = [
        ["first list of jobs", f"{1e3 * figures['first']:.0f} ms"],
        ["cache of 10,000 partitions", f"{1e3 * figures['cache']:.0f} ms"],
        ["answers, median", f"{1e3 * statistics.median(latencies):.1f} ms of {len(latencies):,}"],
        ["answers, 99th percentile", f"{1e3 * latencies[int(0.99 * len(latencies))]:.1f} ms"],
        ["a step, without viewers", f"{1e3 * statistics.median(a for a, _ in figures['steps']):.3f} ms"],
        ["a step, with them", f"{1e3 * statistics.median(b for _, b in figures['steps']):.3f} ms"],
        ["what viewers cost a step", f"{statistics.median(shares):+.2%}"],
    ]
    print(common.machine_line(machine))
    print()
    print(common.table([f"{jobs:,} jobs, {options.viewers} viewers", ""], rows))
    common.save_json(options.json, "page_load", machine, jobs=jobs, viewers=options.viewers, **figures)


def argparse_suppress() -> str:
    import argparse

    return argparse.SUPPRESS


def measure(jobs: int, viewers: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Return the figures of one home."""
    with tempfile.TemporaryDirectory() as folder, running_job(Path(folder)) as (paths, environment, job):
        fill(paths, jobs)
        with served(paths, environment) as (url, token):
            first = common.timed(lambda: fetch(url, token, "/"))
            cache = common.timed(lambda: fetch(url, token, "/data/many"))
            latencies: list[float] = []
            steps = []
            for turn in range(rounds):
                common.say(f"  round {turn + 1}/{rounds}: without viewers, then with {viewers}")
                without = measure_steps(paths, job, seconds)
                command = [sys.executable, __file__, "--viewers", str(viewers), "--follow", url, token, job]
                process = subprocess.Popen(
                    [*command, str(seconds + 4)], stdout=subprocess.PIPE, text=True, preexec_fn=use_last_core
                )
                time.sleep(3)  # until all of them follow
                with_them = measure_steps(paths, job, seconds)
                latencies += json.loads(process.communicate(timeout=120)[0])
                steps.append((without, with_them))
    return {"first": first, "cache": cache, "latencies": latencies, "steps": steps}


def measure_steps(paths: Paths, job: str, seconds: float) -> float:
    """Return the seconds of a step over the next `seconds`, as the task itself counts them."""
    began = time.time()
    time.sleep(seconds)
    samples = [s for s in read_samples(paths.job(job).samples(TaskId("worker", 0))) if s.at >= began]
    return (samples[-1].at - samples[0].at) / (samples[-1].steps - samples[0].steps)


def use_first_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def use_last_core() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


@contextlib.contextmanager
def running_job(folder: Path) -> Iterator[tuple[Paths, dict[str, str], str]]:
    """A home with a training that runs on one core until the end."""
    paths = Paths(folder / "home")
    environment = {**os.environ, "INSITU_HOME": str(paths.home), "NO_COLOR": "1"}
    code = folder / "job"
    code.mkdir()
    (code / "train.py").write_text(TRAIN)
    random = np.random.default_rng(0)
    np.savez(folder / "rows.npz", x=random.normal(size=(20_000, 64)).astype("f4"), y=np.zeros(20_000, "f4"))
    insitu = [sys.executable, "-m", "insitu"]
    subprocess.run(
        [*insitu, "import", "rows", str(folder / "rows.npz")], env=environment, check=True, stdout=2
    )
    start = [*insitu, "start", "--detach", "--workers", "1", "--threads", "1", "--standby", "0", "rows"]
    done = subprocess.run(
        [*start, str(code), "train.py"],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=use_first_core,
    )
    job = done.stdout.strip()
    try:
        deadline = time.monotonic() + 120
        while not any(s.steps > 50 for s in read_samples(paths.job(job).samples(TaskId("worker", 0)))):
            if time.monotonic() > deadline:
                raise SystemExit("the training doesn't begin")
            time.sleep(0.5)
        yield paths, environment, job
    finally:
        subprocess.run([*insitu, "stop", job], env=environment, check=False, stderr=subprocess.DEVNULL)


def fill(paths: Paths, jobs: int) -> None:
    """Put jobs that have ended beside the one that runs, and a cache of 10,000 partitions that the catalogue
    alone knows."""
    template = paths.home.parent / "ended"
    environment = {**os.environ, "INSITU_HOME": str(template), "NO_COLOR": "1"}
    code = paths.home.parent / "short"
    code.mkdir()
    (code / "train.py").write_text("print('done')\n")
    command = [
        sys.executable,
        "-m",
        "insitu",
        "start",
        "--workers",
        "2",
        "--standby",
        "0",
        "--name",
        "old",
        "-",
    ]
    subprocess.run([*command, str(code), "train.py"], env=environment, check=True, capture_output=True)
    (source,) = (template / "jobs").glob("old-*")
    for number in range(jobs):
        name = f"old-{number:06x}"
        target = paths.job(name).root
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.sock", "code"))
        described = json.loads(paths.job(name).spec.read_text())
        paths.job(name).spec.write_text(json.dumps(described | {"job_id": name}))
    infos = tuple(PartitionInfo(i, 10, 100, "crc32:00000000", (NodeId("node-0"),)) for i in range(10_000))
    Catalog(paths).publish([CacheSpec("many", 1, (Column("x", "uint8", (4,)),), infos, 0, None, 0.0)])


@contextlib.contextmanager
def served(paths: Paths, environment: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The page of a home, with a token that may view."""
    command = [sys.executable, "-m", "insitu", "ui", "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, preexec_fn=use_last_core)
    record = paths.ui(os.geteuid())
    try:
        while not record.exists():
            if process.poll() is not None:
                raise SystemExit("the page doesn't start")
            time.sleep(0.05)
        found = json.loads(record.read_text())
        yield found["url"], found["view"]
    finally:
        process.terminate()
        process.wait()


def fetch(url: str, token: str, path: str) -> bytes:
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


async def follow(url: str, token: str, job: str, seconds: float, viewers: int) -> list[float]:
    """Follow a job by as many viewers. Return the seconds of all answers that they asked for besides."""
    latencies: list[float] = []
    ends = time.monotonic() + seconds
    await asyncio.gather(*(view(url, token, job, ends, number, latencies) for number in range(viewers)))
    return latencies


async def view(url: str, token: str, job: str, ends: float, number: int, latencies: list[float]) -> None:
    """Hold a stream open, and ask for something each two seconds."""
    host, port = url.rpartition("/")[2].split(":")
    stream = asyncio.create_task(hold(host, int(port), token, f"/live/jobs/{job}", ends))
    await asyncio.sleep(2 * number / 50)
    turn = number
    while time.monotonic() < ends - 1:
        path = PATHS[turn % len(PATHS)].format(job=job)
        turn += 1
        began = time.perf_counter()
        status = await ask(host, int(port), token, path)
        latencies.append(time.perf_counter() - began)
        if status != 200:
            raise SystemExit(f"{path} was answered by {status}")
        await asyncio.sleep(2)
    await stream


async def hold(host: str, port: int, token: str, path: str, ends: float) -> None:
    reader, writer = await open_request(host, port, token, path)
    with contextlib.suppress(asyncio.TimeoutError):
        while await asyncio.wait_for(reader.read(1 << 16), max(0.0, ends - time.monotonic())):
            pass
    writer.close()


async def ask(host: str, port: int, token: str, path: str) -> int:
    reader, writer = await open_request(host, port, token, path, "close")
    answer = await reader.read(1 << 24)
    while more := await reader.read(1 << 24):
        answer += more
    writer.close()
    return int(answer.split(b" ", 2)[1])


async def open_request(host: str, port: int, token: str, path: str, connection: str = "keep-alive") -> Any:
    reader, writer = await asyncio.open_connection(host, port)
    lines = (f"GET {path} HTTP/1.1", f"Host: {host}:{port}", f"Authorization: Bearer {token}")
    writer.write("\r\n".join((*lines, f"Connection: {connection}", "", "")).encode())
    return reader, writer


if __name__ == "__main__":
    main()
