"""From the loss of one of three hosts to the next step that all workers have completed.

Hosts are namespaces of this machine (tests/support/hosts_lab.py), so root and iproute2 are needed. Each host
runs one worker of three; the second one is lost, in two ways:
  processes killed   all processes of the host end at once; its system closes their connections
  link cut           nothing is said any more: packets to and from the host are lost, and nobody is told

Contenders, in turn:
  insitu          `insitu start --standby 1`, a cache with one backup: a loaded process of another host takes
                  the place, the others continue
  torchrun        torch.distributed.run --nnodes 2:3 --max-restarts, DistributedDataParallel over gloo: the
                  agents of the others form a smaller group, and all workers start again
  Ray Train v2    TorchTrainer with FailureConfig on a Ray cluster of the three hosts, two processors each

A round takes about a minute for insitu, and some for each peer. `--only CONTENDER --ways WAY --keep` measures
one of them, and takes all others from the file of --json, as they were measured before.

The head of insitu runs beside the hosts; the rendezvous of torchrun and Ray's head are on the first host.
A contender that needs longer than the patience is named with it. insitu runs Keras 3 on the backend of
KERAS_BACKEND (JAX if unset), with one thread per worker.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import common
import numpy as np

from insitu.base.paths import Paths
from insitu.base.progress import read_progress
from insitu.cluster import Journal

SUPPORT = Path(__file__).resolve().parent.parent / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

from agent_hosts import INSITU, insitu  # noqa: E402
from hosts_lab import Host, HostsLab, find_obstacle  # noqa: E402
from ray_hosts import RayLab  # noqa: E402

PEERS = Path(__file__).resolve().parent / "recovery_peers"
PATIENCE = 180.0
"""Seconds for each wait; those for the recovery of a peer have an option."""
STEPS_BEFORE = 20
LOST = 1
"""Index of the host that is lost."""

SCRIPT = """
import insitu, keras

strategy = insitu.MultiWorkerMirroredStrategy()
train = insitu.dataset("loss/rows").shuffle().batch(96)
with strategy.scope():
    model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(train, epochs=100000, verbose=0)
"""


wait_for = partial(common.wait_for, pause=0.02, patience=PATIENCE)


def kill_processes(host: Host) -> None:
    for pid in host.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, 9)


WAYS: dict[str, Callable[[Host], None]] = {"link cut": Host.cut, "processes killed": kill_processes}


class Bench:
    """Three hosts, and what runs on them."""

    def __init__(self, lab: HostsLab, patience: float) -> None:
        self.lab, self.patience = lab, patience
        self.root = lab.folder
        self.code = self.root / "code"
        self.code.mkdir()
        (self.code / "train.py").write_text(SCRIPT)
        rows = np.random.default_rng(0).random((3072, 784), dtype=np.float32)
        np.savez(self.root / "rows.npz", x=rows, label=np.arange(3072) % 10)
        self.turn = 0
        names = self.root / "names"
        names.write_text("".join(f"{address} {name}\n" for address, name in self._list_names()))
        for host in lab.hosts:  # peers look up their hosts' names
            launcher = lab.launcher.replace("{host}", host.address).split()
            subprocess.run([*launcher, f"mount --bind {names} /etc/hosts"], check=True)

    def _list_names(self) -> list[tuple[str, str]]:
        return [("127.0.0.1", "localhost"), *((host.address, host.name) for host in self.lab.hosts)]

    def lose(self, way: str) -> float:
        """Lose the host. Returns when, in seconds since 1970."""
        at = time.time()
        WAYS[way](self.lab.hosts[LOST])
        return at

    def insitu(self, way: str) -> float:
        self.lab.clear()
        self.turn += 1
        head = self.root / f"head-{self.turn}"
        hosts = self.root / "hosts.txt"
        hosts.write_text("".join(f"{host.address}\n" for host in self.lab.hosts))
        try:
            insitu(head, "up", "--hosts", str(hosts), "--launcher", self.lab.launcher, "--insitu", INSITU)
            insitu(head, "import", "loss/rows", str(self.root / "rows.npz"), "--backups", "1")
            options = ("--detach", "--workers", "3", "--threads", "1", "--standby", "1")
            environment = {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "jax")}
            started = insitu(head, "start", *options, "loss/rows", str(self.code), "train.py", **environment)
            return self._lose_worker(head, started.stdout.strip(), way)
        finally:
            for host in self.lab.hosts:
                host.heal()
            insitu(head, "down", "--force", code=None)

    def _lose_worker(self, head: Path, job_id: str, way: str) -> float:
        job = Paths(head).job(job_id)
        try:
            wait_for("the first steps", lambda: self._count_steps(head, job_id) >= STEPS_BEFORE, pause=0.1)
            for host in self.lab.hosts:
                wait_for("the standbys", partial(self._stands_by, host), pause=0.2)
            at = self.lose(way)
            done = wait_for(
                "the recovery",
                lambda: [r for r in Journal(job.journal).state().recoveries if r.ended is not None],
            )
            return float(done[-1].ended - at)
        finally:
            insitu(head, "stop", job_id, code=None)

    @staticmethod
    def _count_steps(head: Path, job_id: str) -> int:
        job = Paths(head).job(job_id)
        records = [read_progress(job.progress(task.task)) for task in Journal(job.journal).state().members]
        return min((r.epoch * 32 + r.step if r and r.elastic else -1 for r in records), default=-1)

    @staticmethod
    def _stands_by(host: Host) -> bool:
        """Whether a standby of the host has done its loading: it uses no more time."""

        def used(pid: int) -> int:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return int(words[11]) + int(words[12])

        for pid, command in host.processes().items():
            if "--standby" in command:
                before = used(pid)
                time.sleep(0.5)
                return before > 50 and used(pid) - before < 2
        return False

    # Peers

    def torchrun(self, way: str) -> float:
        if find_spec("torch") is None:
            raise common.Unavailable("PyTorch is not installed: pip install -r benchmarks/requirements.txt")
        first = self.lab.hosts[0].address
        options = "--nnodes 2:3 --nproc-per-node 1 --max-restarts 3 --monitor-interval 0.1 --rdzv-id loss"
        options += f" --rdzv-backend c10d --rdzv-endpoint {first}:29400"
        run = f"{sys.executable} -m torch.distributed.run {options}"
        launch = [
            (host, f"{run} --local-addr {host.address} {PEERS / 'torchrun_rank.py'}")
            for host in self.lab.hosts
        ]
        return self._measure_peer(way, launch, members=2)

    def ray_train(self, way: str) -> float:
        if find_spec("ray") is None:
            raise common.Unavailable("Ray is not installed: pip install -r benchmarks/requirements.txt")
        self.lab.clear()
        ray = RayLab(self.lab, processors=2)
        for host in self.lab.hosts:
            ray.start(host)
        program = f"env RAY_ADDRESS={ray.address} WORKERS=3 {sys.executable} {PEERS / 'ray_train.py'}"
        return self._measure_peer(way, [(self.lab.hosts[0], program)], members=3, clear=False)

    def _measure_peer(
        self, way: str, launch: list[tuple[Host, str]], *, members: int, clear: bool = True
    ) -> float:
        if clear:
            self.lab.clear()
        marks = Path(tempfile.mkdtemp(dir=self.root))
        with self._running([(h, f"{c} '[]' {shlex.quote(str(marks))}/{{host}}") for h, c in launch]):
            before = wait_for("the peer's first steps", lambda: self._all_at(marks, STEPS_BEFORE, 3))
            at = self.lose(way)
            after = wait_for(
                "the peer's recovery",
                lambda: self._all_at(marks, 1, members, set(before)),
                patience=self.patience,
            )
            return max(float(path.read_text().split()[0]) for path in after) - at

    @contextmanager
    def _running(self, launch: list[tuple[Host, str]]) -> Iterator[None]:
        log = self.root / "peer.log"
        with log.open("ab") as output:
            started = [
                subprocess.Popen(
                    [*self.lab.launcher.replace("{host}", host.address).split(), command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
                for host, command in launch
            ]
            try:
                yield
            finally:
                self.lab.clear()
                for process in started:
                    process.kill()
                    process.wait()

    @staticmethod
    def _all_at(marks: Path, steps: int, members: int, besides: set[Path] | None = None) -> list[Path]:
        """Return a file of marks of each rank, once all have done `steps` steps in other processes than
        `besides`."""
        found = {}
        for path in marks.glob("host*/*"):  # Ray has a folder beside these
            if path not in (besides or ()) and len(path.read_text().splitlines()) >= steps:
                found[path.name.split("-")[0]] = path
        return list(found.values()) if len(found) >= members else []


def read_kept(path: Path | None) -> dict[str, dict[str, common.Result]]:
    """Return what was measured before: contenders by the way of losing the host."""
    if path is None or not path.exists():
        return {}
    ways = json.loads(path.read_text())["ways"]
    for results in ways.values():
        for found in results.values():
            del found["median"]
    return {way: {n: common.Result(**found) for n, found in ways[way].items()} for way in WAYS if way in ways}


def main() -> None:
    made = common.parser(__doc__ or "")
    made.add_argument("--only", default="", help="contenders, separated by commas")
    made.add_argument("--ways", default=",".join(WAYS), help="ways to lose the host, separated by commas")
    made.add_argument("--keep", action="store_true", help="take the others from the file of --json")
    made.add_argument("--patience", type=float, default=PATIENCE, help="seconds for a peer's recovery")
    options = made.parse_args()
    if obstacle := find_obstacle():
        sys.exit(f"Several hosts can't be made here: {obstacle}")
    rounds = options.rounds or (1 if options.quick else 3)
    machine = common.machine()
    kept = read_kept(options.json) if options.keep else {}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        HostsLab(Path(folder), 3) as lab,
    ):
        bench = Bench(lab, options.patience)
        for way in options.ways.split(","):
            contenders: dict[str, Callable[[], float]] = {
                "insitu": partial(bench.insitu, way),
                "torchrun": partial(bench.torchrun, way),
                "Ray Train v2": partial(bench.ray_train, way),
            }
            wanted = options.only.split(",") if options.only else list(contenders)
            results = common.alternate(
                {name: contenders[name] for name in wanted}, "s to the next step of all", rounds
            )
            merged = kept.get(way, {}) | results
            kept[way] = {name: merged[name] for name in contenders if name in merged}
    print(common.machine_line(machine))
    for way, found in kept.items():
        shown = common.results_table(found, next(iter(found)), more_is_better=False, form="{:.2f}".format)
        print(f"\n{way}\n\n{shown}")
    saved = {way: common.results_json(found) for way, found in kept.items()}
    common.save_json(options.json, "host_loss", machine, ways=saved)


if __name__ == "__main__":
    main()
