"""From `insitu start` to the first training step on Kubernetes, in the stores' pods and in pods of its own.

    python benchmarks/start_in_pods.py [--quick] [--json FILE]

The control plane is real: etcd, API server, controllers, scheduler and JobSet, on this machine. The nodes
aren't: their kubelet starts processes in namespaces, no containers. It pulls no image and attaches no disk,
so the figures don't have the time for both. It needs root, and `make ready-k8s`.

Three stores on three nodes hold the rows, and each contender has run once before: the cluster is warm.
Contenders, in turn: three workers in the pods of the stores, and three workers by `--engine k8s`. All share
the same processors. The figure is the time from launching the command in the head's pod until each of the
three workers has done its first step.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from start_on_hosts import SCRIPT, WORKERS

SPACE = "bench"
STORES, PODS = "the stores' pods", "pods of its own"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "jobset")
ROWS = """
import numpy as np
random = np.random.default_rng(0)
np.savez("/tmp/rows.npz", x=random.integers(0, 256, (3072, 28, 28, 1), dtype=np.uint8),
         label=random.integers(0, 10, 3072))
"""


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    machine = common.machine()
    import hosts_lab
    import k8s_binaries

    if obstacle := hosts_lab.find_obstacle() or k8s_binaries.find_obstacle(*PROGRAMS):
        sys.exit(f"Pods can't be made here: {obstacle}")
    import pytest
    from k8s_insitu import IMAGE, IN_PODS, SMALL, act_as_administrator, head, insitu
    from k8s_kubelet import Cluster

    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder), WORKERS, images=[IMAGE]) as cluster,
        pytest.MonkeyPatch.context() as patch,
    ):

        def start(*engine: str) -> float:
            """Return the seconds until all workers of a new job have done their first steps."""
            began = time.time()
            command = ("start", "--workers", str(WORKERS), "--threads", "1", *engine, "rows", "/tmp/job")
            printed = head(cluster, SPACE, "env", "KERAS_BACKEND=tensorflow", "insitu", *command, "train.py")
            steps = [float(at) for at in re.findall(r"first step at ([\d.]+)", printed)]
            if len(steps) != WORKERS:
                raise SystemExit(f"{len(steps)} of {WORKERS} workers did their first step:\n{printed}")
            return max(steps) - began

        cluster.plane.add_jobset()
        act_as_administrator(cluster, patch)
        where = ("--namespace", SPACE, "--create-namespace", "--nodes", str(WORKERS))
        code, _, said = insitu("up", *where, *SMALL)
        if code:
            raise SystemExit(said)
        write = ("sh", "-c", "mkdir /tmp/job && cat > /tmp/job/train.py")
        head(cluster, SPACE, *write, given=SCRIPT.encode())
        head(cluster, SPACE, "python", "-c", ROWS)
        head(cluster, SPACE, "insitu", "import", "rows", "/tmp/rows.npz", "--partitions", "6")
        contenders: dict[str, Callable[[], float]] = {STORES: start, PODS: lambda: start(*IN_PODS)}
        rounds = options.rounds or (1 if options.quick else 5)
        results = common.alternate(contenders, "seconds to the first step of all", rounds, warm_up=1)
    print(common.machine_line(machine))
    print(common.results_table(results, STORES, more_is_better=False, form="{:.2f}".format))
    common.save_json(options.json, "start_in_pods", machine, results=common.results_json(results))


if __name__ == "__main__":
    main()
