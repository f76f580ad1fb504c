"""Synchronous training by two processes, one core each, compared with other libraries: rows per second.

  insitu, 2 workers       MultiWorkerMirroredStrategy, Keras 3 on TensorFlow; also on JAX and on PyTorch
  insitu, 1 worker        the same on one core. With one replica outside of a job, insitu leaves fit to Keras
  1 worker, twice         two of these at once without a connection: the most that two cores allow
  Keras alone, 1 process  Keras 3 on TensorFlow without insitu
  tf_keras, 2 workers     tf.distribute.MultiWorkerMirroredStrategy (RING), which needs the legacy Keras
  JAX + gloo, 2 workers   one program over a global mesh (jax.distributed), a loop without Keras' fit
  torch DDP, 2 workers    DistributedDataParallel over gloo, a loop without Keras

There are two models: a convolutional network with 225,034 parameters and a dense one with 19,643,370. SGD
with momentum, 64 rows a step for each process, random images. insitu runs in the environment that `insitu
start` gives its tasks, which asks the allocator for large pages. The other libraries run in their default
environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import common

TWICE = "insitu, 1 worker, twice at once"
TABLE = ("insitu, 2 workers", "insitu, 1 worker", TWICE, "tf_keras, 2 workers", "torch DDP, 2 workers")
"""What the claims are about: two rounds by default. The others run once: five minutes in all."""
PEERS = Path(__file__).parent / "training_peers"
PATIENCE = 400.0
CONTENDERS = {
    "insitu, 2 workers": ("insitu_rank.py", 2, "insitu", "tensorflow"),
    "insitu, 1 worker": ("insitu_rank.py", 1, "insitu", "tensorflow"),
    TWICE: ("insitu_rank.py", 2, "insitu", "tensorflow"),
    "Keras alone, 1 process": ("plain_rank.py", 1, "keras", "tensorflow"),
    "tf_keras, 2 workers": ("tf_keras_rank.py", 2, "tf_keras", "tensorflow"),
    "insitu on JAX, 2 workers": ("insitu_rank.py", 2, "insitu", "jax"),
    "JAX + gloo, 2 workers": ("jax_rank.py", 2, "jax", "jax"),
    "insitu on PyTorch, 2 workers": ("insitu_rank.py", 2, "insitu", "torch"),
    "torch DDP, 2 workers": ("torch_rank.py", 2, "torch", "torch"),
}


def contender(
    script: str, processes: int, module: str, backend: str, model: str, *more: str, apart: bool = False
) -> Callable[[], float]:
    """Runs `script MODEL MORE...` once in each of `processes` processes; the rows per second of them all.

    `apart`: each trains alone, on a core of its own.
    """

    def run() -> float:
        for needed in (module, backend):
            if importlib.util.find_spec(needed) is None:
                raise common.Unavailable(f"{needed} isn't installed")
        workers, cores = common.addresses(processes), sorted(os.sched_getaffinity(0))
        started = []
        for index in range(processes):
            own, group = (0, workers[index : index + 1]) if apart else (index, workers)
            task = {"cluster": {"worker": group}, "task": {"type": "worker", "index": own}}
            threads = dict.fromkeys(
                ("OMP_NUM_THREADS", "NPROC", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1"
            )
            own = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if module == "insitu" else {}
            environment = {
                **os.environ,
                **threads,
                **own,
                "TF_CONFIG": json.dumps(task),
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "KERAS_BACKEND": backend,
            }
            kept = ["taskset", "--cpu-list", str(cores[index % len(cores)])] if apart else []
            command = [*kept, sys.executable, str(PEERS / script), model, *more]
            started.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        try:
            outputs = [process.communicate(timeout=PATIENCE)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        rates = []
        for output in outputs if apart else outputs[:1]:
            found = re.search(r"RATE ([\d.]+)", output)
            if found is None:
                raise SystemExit(f"{script} failed:\n{output[-3000:]}")
            rates.append(float(found[1]))
        return sum(rates)

    return run


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    rounds = options.rounds or (1 if options.quick else 2)
    machine = common.machine()
    print(common.machine_line(machine))
    figures = {}
    for model in ("cnn", "mlp"):
        common.say(f"{model}:")
        contenders = {name: contender(*what, model, apart=name == TWICE) for name, what in CONTENDERS.items()}
        often = {name: run for name, run in contenders.items() if name in TABLE}
        seldom = {name: run for name, run in contenders.items() if name not in TABLE}
        found = common.alternate(often, "rows/s", rounds)
        found |= common.alternate(seldom, "rows/s", options.rounds or 1)
        results = {name: found[name] for name in CONTENDERS}
        print(f"\n{model}\n\n{common.results_table(results, 'insitu, 2 workers', form='{:,.0f}'.format)}")
        figures[model] = common.results_json(results)
    common.save_json(options.json, "training", machine, models=figures)


if __name__ == "__main__":
    main()
