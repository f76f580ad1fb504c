"""One rank: `python_rank.py KIND RANK SIZE HOST PORTS BYTES...`; rank 0 prints JSON {bytes: seconds}.

Each operation is timed by itself, all_reduce after all_reduce, on a buffer of the contender's liking; the
figure is the median of rank 0.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BUDGET = float(os.environ.get("BENCHMARK_BUDGET", "1.0"))
"""Seconds that one size may take, roughly."""
PROFILED = 3000
"""Operations that are looked at."""


def repetitions(seconds: float) -> int:
    return max(5, min(3000, int(BUDGET / max(seconds, 1e-7))))


def measure(run: Callable[[], Any], agree: Callable[[int], int]) -> float:
    """Seconds of one operation. `agree` gives all ranks rank 0's number of repetitions."""
    for _ in range(2):
        run()
    times = _times(run, 5)
    times += _times(run, agree(repetitions(statistics.median(times))))
    return statistics.median(times)


def _times(run: Callable[[], Any], count: int) -> list[float]:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return times


def insitu(kind: str, rank: int, host: str, ports: list[str], sizes: list[int]) -> dict[int, float]:
    from insitu import exchange

    # Encrypted or not by what is asked for, on loopback as between namespaces.
    os.environ["INSITU_TLS"] = "always" if kind == "tls" else "never"
    transport = "tcp" if kind == "tls" else kind
    hosts = host.split(",")
    addresses = [f"{hosts[r % len(hosts)]}:{port}" for r, port in enumerate(ports)]
    results = {}
    with exchange.join(rank, addresses, transport=transport, secret=b"secret of a benchmark") as group:  # type: ignore[arg-type]

        def agree(value: int) -> int:
            return int(group.broadcast(np.array([value]))[0])

        for size in sizes:
            buffer = group.buffer(size // 4, np.float32)
            results[size] = measure(lambda b=buffer: group.all_reduce(b), agree)  # type: ignore[misc]
    return results


def gloo(rank: int, size: int, host: str, ports: list[str], sizes: list[int]) -> dict[int, float]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR=host.split(",")[0], MASTER_PORT=ports[0])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    results = {}

    def agree(value: int) -> int:
        tensor = torch.tensor([value])
        dist.broadcast(tensor, 0)
        return int(tensor[0])

    for count in sizes:
        tensor = torch.zeros(count // 4)
        results[count] = measure(lambda t=tensor: dist.all_reduce(t), agree)  # type: ignore[misc]
    dist.barrier()
    dist.destroy_process_group()
    return results


def tensorflow_ring(rank: int, host: str, ports: list[str], sizes: list[int]) -> dict[int, float]:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": [f"{host}:{port}" for port in ports]},
            "task": {"type": "worker", "index": rank},
        }
    )
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    results = {}

    def make(count: int) -> Callable[[], Any]:
        data = tf.zeros(count // 4)

        def replica(value: Any) -> Any:
            return tf.distribute.get_replica_context().all_reduce("SUM", value, options=options)

        step = tf.function(lambda: strategy.run(replica, args=(data,)))
        return lambda: step().numpy()

    def agree(value: int) -> int:
        return 20  # no cheap way to agree, so the same for all sizes

    for count in sizes:
        results[count] = measure(make(count), agree)
    return results


def sweep(rank: int, host: str, ports: list[str], sizes: list[int]) -> dict[int, float]:
    """The floor of shared memory. All ranks at once, from one barrier to the next, sweep in place over a
    buffer of the exchange's own: each byte goes from memory to a core and back, once."""
    from insitu import exchange

    results = {}
    with exchange.join(rank, [f"{host}:{port}" for port in ports], transport="shm") as group:

        def once(buffer: np.ndarray) -> None:
            np.add(buffer, 1.0, buffer)
            group.barrier()

        for size in sizes:
            buffer = group.buffer(size // 4, np.float32)
            results[size] = measure(lambda b=buffer: once(b), lambda value: 20)  # type: ignore[misc]
    return results


def memory(kind: str, rank: int, host: str, ports: list[str], sizes: list[int]) -> dict[int, float]:
    """Memory of a rank, in buffers, after all_reduce: pages that ranks share are counted in equal parts."""
    from insitu import exchange

    results = {}
    with exchange.join(rank, [f"{host}:{port}" for port in ports], transport=kind) as group:  # type: ignore[arg-type]
        for size in sizes:
            before = group.all_gather(np.array([_proportional_set()]))
            buffer = group.buffer(size // 4, np.float32)
            for _ in range(3):
                group.all_reduce(buffer)
            after = group.all_gather(np.array([_proportional_set()]))
            results[size] = float((after - before).max()) / size
            group.barrier()
    return results


def profile(kind: str, rank: int, host: str, ports: list[str], sizes: list[int]) -> dict[int, Any]:
    """Where the time of all_reduce goes: per operation of this rank, microseconds by the clock and of the
    processor (in this program, in the system), those waited for others, and how often the processor was
    given to another process."""
    from insitu import exchange

    results = {}
    with exchange.join(rank, [f"{host}:{port}" for port in ports], transport=kind) as group:  # type: ignore[arg-type]
        for size in sizes:
            buffer = group.buffer(size // 4, np.float32)
            _times(lambda b=buffer: group.all_reduce(b), 200)  # type: ignore[misc]
            waited, before = group.stats["all_reduce"].waiting, resource.getrusage(resource.RUSAGE_SELF)
            times = _times(lambda b=buffer: group.all_reduce(b), PROFILED)  # type: ignore[misc]
            after = resource.getrusage(resource.RUSAGE_SELF)
            waited = group.stats["all_reduce"].waiting - waited
            switches = after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw
            results[size] = {
                "median": statistics.median(times) * 1e6,
                "mean": statistics.mean(times) * 1e6,
                "program": (after.ru_utime - before.ru_utime) / PROFILED * 1e6,
                "system": (after.ru_stime - before.ru_stime) / PROFILED * 1e6,
                "waiting": waited / PROFILED * 1e6,
                "switches": switches / PROFILED,
            }
            group.barrier()
    return results


def alone(sizes: list[int]) -> dict[int, float]:
    """What a call costs that has nobody to reduce with."""
    from insitu import exchange

    group = exchange.join(0, ["127.0.0.1:1"])
    buffers = {size: group.buffer(size // 4, np.float32) for size in sizes}
    return {size: measure(lambda b=b: group.all_reduce(b), lambda v: v) for size, b in buffers.items()}  # type: ignore[misc]


def _proportional_set() -> int:
    """Bytes."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


def main() -> None:
    kind, rank, size, host, ports = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
    sizes = [int(text) for text in sys.argv[6:]]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if kind in ("shm", "tcp", "tls"):
        results = insitu(kind, rank, host, ports.split(","), sizes)
    elif kind == "gloo":
        results = gloo(rank, size, host, ports.split(","), sizes)
    elif kind == "tensorflow":
        results = tensorflow_ring(rank, host, ports.split(","), sizes)
    elif kind == "sweep":
        results = sweep(rank, host, ports.split(","), sizes)
    elif kind == "alone":
        results = alone(sizes)
    elif kind.startswith("profile-"):
        results = profile(kind.removeprefix("profile-"), rank, host, ports.split(","), sizes)
    else:
        results = memory(kind.removeprefix("memory-"), rank, host, ports.split(","), sizes)
    if rank == 0:
        print(json.dumps(results), flush=True)
    os._exit(0)  # TensorFlow's servers have no end


if __name__ == "__main__":
    main()
