"""Agents on the nodes of a real Ray cluster, on hosts of their own. Run by `make test-ray`."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_hosts
from agent_hosts import wait_until
from host_jobs import (
    IMPORT_OPTIONS,
    JOB_SECONDS,
    HostJobs,
    make_images,
    read_ledger,
    run_undisturbed_on_images,
)
from hosts_lab import Host, HostsLab, find_obstacle
from ray_hosts import RayLab, find_ours, find_processes, wait_until_none

from insitu.base.paths import Paths
from insitu.cluster.job_files import Journal, is_locked
from insitu.cluster.wire import records

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

AGENT = "insitu.cluster.nodes.agent_process"
HOLDER = "ray::AgentHolder"


@pytest.fixture(scope="module")
def whole_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayLab]:
    """A Ray cluster on two hosts; a third one has none yet."""
    if obstacle := find_obstacle() or ray_hosts.find_obstacle():
        pytest.skip(obstacle)
    with HostsLab(tmp_path_factory.mktemp("lab"), 3) as lab:
        ray = RayLab(lab)
        for host in lab.hosts[:2]:
            ray.start(host)
        yield ray


@pytest.fixture
def ray(whole_lab: RayLab) -> Iterator[RayLab]:
    yield whole_lab
    first, _, third = whole_lab.hosts
    whole_lab.insitu(first, "down", "--force", code=None)
    # Ray's nodes stay on the others. It hears of the end of this one, which it would else count as alive.
    for raylet in find_processes(third, "raylet/raylet"):
        os.kill(raylet, signal.SIGTERM)
    wait_until(lambda: not find_processes(third, "raylet/raylet"), "the end of Ray's node")
    third.clear()


def nodes(ray: RayLab) -> dict[str, dict[str, Any]]:
    listed = json.loads(ray.insitu(ray.hosts[0], "nodes", "--json").stdout)
    return {each["node"]: each for each in listed if each["state"]}


def states(ray: RayLab) -> dict[str, str]:
    return {name: node["state"] for name, node in nodes(ray).items()}


def up(ray: RayLab, code: int = 0) -> str:
    return " ".join(ray.insitu(ray.hosts[0], "up", "--engine", "ray", code=code).stderr.split())


def agent_of(host: Host) -> int:
    (pid,) = find_processes(host, AGENT)
    return pid


def read_process(pid: int) -> dict[str, str]:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return {
        **dict(line.split(":\t", 1) for line in status if ":\t" in line),
        **dict(pair.split("=", 1) for pair in environment if "=" in pair),
        "nice": str(os.getpriority(os.PRIO_PROCESS, pid)),
        "score": Path(f"/proc/{pid}/oom_score_adj").read_text().strip(),
    }


def test_each_node_of_ray_has_an_agent_until_down(ray: RayLab) -> None:
    first, second, _ = ray.hosts
    said = up(ray)
    assert "2 of 2 nodes up. The head is at " in said and "host2: host2 serves at " in said
    found = nodes(ray)
    assert {n: (f["state"], f["host"]) for n, f in found.items()} == {
        host.name: ("alive", host.name) for host in (first, second)
    }
    assert found["host2"]["address"].startswith(f"{second.address}:")
    # An agent is no worker of Ray's: neither slow, nor the first to be killed, nor without its signals.
    token = records.read_token(Paths(first.home))
    for host in (first, second):
        process = read_process(agent_of(host))
        assert (process["nice"], process["score"], process["OMP_NUM_THREADS"]) == ("0", "0", "7")
        assert int(process["SigBlk"], 16) == 0 and "CUDA_VISIBLE_DEVICES" not in process
        assert token not in " ".join(process.values())
        assert not any(token in command for command in host.processes().values())
    assert sorted(name.partition("-")[0] for name in ray.list_actors()) == ["agent", "agent", "controller"]
    logs = [path for host in (first, second) for path in (host.disk / "ray").rglob("*") if path.is_file()]
    assert logs and not [path for path in logs if token.encode() in path.read_bytes()]

    # Again: what runs stays.
    before = [agent_of(host) for host in (first, second)]
    assert "2 of 2 nodes up" in up(ray)
    assert [agent_of(host) for host in (first, second)] == before
    ray.insitu(first, "down")
    assert [find_ours(host) for host in (first, second)] == [{}, {}] and ray.list_actors() == []
    up(ray)
    assert {n: f["store_id"] for n, f in nodes(ray).items()} == {n: f["store_id"] for n, f in found.items()}
    assert "2 agents ended: host1, host2" in ray.insitu(first, "down", "--force").stderr
    assert [find_ours(host) for host in (first, second)] == [{}, {}] and ray.list_actors() == []
    assert [list(Paths(host.home).nodes.glob("*")) for host in (first, second)] == [[], []]


def test_agents_and_holders_that_are_killed_come_back(ray: RayLab) -> None:
    up(ray)
    second = ray.hosts[1]
    store = nodes(ray)["host2"]["store_id"]
    for victim in (AGENT, HOLDER):
        before = agent_of(second)
        (pid,) = find_processes(second, victim)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: find_processes(second, AGENT) not in ([], [before]), "another agent")  # noqa: B023
        wait_until(lambda: states(ray).get("host2") == "alive", "its return")
    assert nodes(ray)["host2"]["store_id"] == store


def test_a_node_that_joins_later_gets_an_agent_and_finds_its_store_when_it_returns(ray: RayLab) -> None:
    up(ray)
    *others, third = ray.hosts
    before = [agent_of(host) for host in others]
    (controller,) = find_processes(others[0], "ray::AgentController")
    os.kill(controller, signal.SIGKILL)  # Ray restarts it
    ray.start(third)
    wait_until(lambda: states(ray).get("host3") == "alive", "the third node")
    assert [agent_of(host) for host in others] == before
    store = nodes(ray)["host3"]["store_id"]
    (raylet,) = find_processes(third, "raylet/raylet")
    os.kill(raylet, signal.SIGKILL)
    wait_until_none(third)
    wait_until(lambda: states(ray)["host3"] in ("left", "lost"), "its loss")
    ray.start(third)
    wait_until(lambda: states(ray)["host3"] == "alive", "its return")
    assert nodes(ray)["host3"]["store_id"] == store


BROKEN = {
    "insitu 9.9 instead of": "import insitu.base._version; insitu.base._version.__version__ = '9.9'",
    "can't load this version of insitu (ModuleNotFoundError": (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] == 'insitu':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Refuse())"
    ),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_node_with_another_or_no_insitu_is_named(ray: RayLab, tmp_path: Path, problem: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN[problem])
    ray.start(ray.hosts[2], PYTHONPATH=str(tmp_path))
    said = up(ray, code=1)
    # Ray may still count the node that was on this host before as alive.
    assert said.count(" serves at ") == 2 and "host3: failed: " in said and problem in said
    assert states(ray) == {"host1": "alive", "host2": "alive"}


def test_without_ray_nothing_is_begun(ray: RayLab) -> None:
    third = ray.hosts[2]
    said = " ".join(ray.insitu(third, "up", "--engine", "ray", code=1).stderr.split())
    assert "--engine ray needs a Ray cluster that this machine is a node of" in said
    said = " ".join(
        ray.insitu(third, "up", "--engine", "ray", "--address", ray.address, code=1).stderr.split()
    )
    assert "that this machine is a node of" in said
    assert find_ours(third) == {} and not Paths(third.home).head.exists()


def test_ray_asks_for_its_own_token_and_its_end_ends_the_agents(ray: RayLab) -> None:
    third = ray.hosts[2]
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
    ray.start(third, alone=True, **access)
    refused = " ".join(ray.insitu(third, "up", "--engine", "ray", code=1).stderr.split())
    assert "Received: --address auto" in refused and find_ours(third) == {}
    said = ray.insitu(third, "up", "--engine", "ray", code=0, **access).stderr
    assert "1 of 1 node up" in said
    stopped = ray.run(third, f"{sys.executable} -m ray.scripts.scripts stop --force")
    assert stopped.returncode == 0, stopped.stderr
    wait_until(lambda: not find_processes(third, AGENT), "the end of the agent")
    # Nothing of Ray is left that could be asked.
    ray.insitu(third, "down", **access)
    assert find_ours(third) == {}


def reserve(ray: RayLab, job: str, gpus: int = 0, cores: int = 0) -> dict[str, Any]:
    """Reserve something of the third host, as a job's supervisor does."""
    first = ray.hosts[0]
    record = records.read_head(Paths(first.home))
    assert record is not None
    wanted = {"host3": {"gpus": gpus, "cores": cores}}
    request = {"address": ray.address, "cluster": record.cluster, "job": job, "wanted": wanted}
    program = f"{sys.executable} -P -m insitu.cluster.ray.ray_reserving"
    done = ray.run(first, f"echo {shlex.quote(json.dumps(request))} | {program}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def wait_until_returned(ray: RayLab) -> None:
    wait_until(
        lambda: not [name for name in ray.list_actors() if name.startswith("reserved-")], "their return"
    )


def test_ray_gives_nobody_else_the_gpus_of_a_job_until_it_has_ended(ray: RayLab) -> None:
    third = ray.hosts[2]
    ray.start(third, gpus=2)
    up(ray)
    lock = Paths(third.home).job("one").engine_lock("host3")
    lock.parent.mkdir(parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as the process does that runs the tasks of the job there
        given = reserve(ray, "one", 1)
        assert given == {"gpus": {"host3": ["0"]}, "failed": {}}
        assert reserve(ray, "one", 1) == given, "it has them already"
        refused = reserve(ray, "two", 2)
        assert refused["gpus"] == {}
        assert refused["failed"] == {"host3": "2 more GPUs needed, and Ray has 1 of 2 free (job one has 1)"}
    wait_until_returned(ray)
    assert sorted(reserve(ray, "two", 2)["gpus"]["host3"]) == ["0", "1"]


def start_job(ray: RayLab, jobs: HostJobs, *options: str, cache: str = "-") -> str:
    """Start the job of `HostJobs` on the first host. Returns its id."""
    fixed = ("--detach", "--threads", "1", "--standby", "0", *options)
    script = (cache, str(jobs.code), "train.py", str(jobs.meeting))
    done = ray.insitu(ray.hosts[0], "start", *fixed, *script, KERAS_BACKEND="jax", NO_COLOR="1")
    return done.stdout.strip()


def wait_for_end(jobs: HostJobs, job: str) -> int:
    """Wait until nothing of a job runs. Returns its exit code."""
    folder = Paths(jobs.home).job(job)
    wait_until(lambda: not is_locked(folder.controller), "the end of the job", JOB_SECONDS)
    code = Journal(folder.journal).state().exit_code
    assert code is not None
    return code


WORK = """
import ray
ray.init("{address}")
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
(node,) = [n["NodeID"] for n in ray.nodes() if n["NodeManagerHostname"] == "host3" and n["Alive"]]
there = NodeAffinitySchedulingStrategy(node, soft=False)
work = ray.remote(lambda: 1).options(num_cpus=1, scheduling_strategy=there).remote()
print("DONE", len(ray.wait([work], timeout={seconds})[0]))
"""


def runs_work(ray: RayLab, seconds: float) -> bool:
    """Return whether Ray runs other work on the third host, that takes a processor, within `seconds`.

    A busy machine needs more than ten seconds to start a process of Ray's.
    """
    program = shlex.quote(WORK.format(address=ray.address, seconds=seconds))
    ran = ray.run(ray.hosts[0], f"{sys.executable} -c {program}")
    assert "DONE " in ran.stdout, (ran.stdout, ran.stderr)
    return "DONE 1" in ran.stdout


def test_ray_gives_nobody_else_the_processors_of_a_job_until_it_has_ended(
    ray: RayLab, tmp_path: Path
) -> None:
    """All of a node's, although a part of one is the holder's."""
    first, _, third = ray.hosts
    ray.start(third, processors=2)
    up(ray)
    jobs = HostJobs(first.home, tmp_path / "job")
    options = ("--workers", "1", "--node", "host3", "--cores-per-worker", "2")
    job = start_job(ray, jobs, *options)
    jobs.wait_in_the_middle(job, 1)
    taken = f"1 more processor needed, and Ray has 0 of 2 free (job {job} has 2)"
    assert reserve(ray, "two", cores=1)["failed"] == {"host3": taken}
    assert not runs_work(ray, 10)
    # Another job is refused, and says who has them.
    other = HostJobs(first.home, tmp_path / "other")
    refused = start_job(ray, other, *options[:-1], "1")
    assert wait_for_end(other, refused) != 0 and taken in other.output(refused)
    jobs.let_go()
    assert wait_for_end(jobs, job) == 0
    wait_until_returned(ray)
    assert runs_work(ray, 90)
    # What no node has is refused before anything starts.
    cores = nodes(ray)["host3"]["cores"]
    code = (*options[:-1], str(cores + 1), "-", str(jobs.code), "train.py", str(jobs.meeting))
    done = ray.insitu(first, "start", "--detach", *code, code=2)
    assert f"host3 has {cores} for 1 task" in " ".join(done.stderr.split())


def test_the_raylet_of_a_host_of_a_job_is_killed_and_the_job_goes_on(ray: RayLab, tmp_path: Path) -> None:
    first, _, third = ray.hosts
    undisturbed = run_undisturbed_on_images(tmp_path / "alone", 3)
    ray.start(third)
    up(ray)
    ray.insitu(first, "import", "images", str(make_images(tmp_path / "images")), *IMPORT_OPTIONS)
    jobs = HostJobs(first.home, tmp_path / "job")
    job = start_job(ray, jobs, "--workers", "3", cache="images")
    jobs.wait_in_the_middle(job, 3)
    (raylet,) = find_processes(third, "raylet/raylet")
    os.kill(raylet, signal.SIGKILL)
    wait_until_none(third)
    jobs.let_go()
    assert wait_for_end(jobs, job) == 0, jobs.output(job)
    weights = {line.split("RESULT ")[1] for line in jobs.output(job).splitlines() if "] RESULT " in line}
    report = ray.insitu(first, "describe", job, "--ledger", "--json").stdout
    assert (weights, read_ledger(report)) == undisturbed
    assert json.loads(report)["attempt"] == 1
    said = jobs.output(job)
    assert "host3 has ended the connection: its tasks count as killed" in said
    assert "replacing worker:2" in said and json.loads(report)["task_list"][2]["node"] != "host3"
    ray.start(third)
    wait_until(lambda: states(ray)["host3"] == "alive", "its return")


def test_a_node_that_ray_takes_away_is_drained_and_stays_when_it_returns(ray: RayLab) -> None:
    third = ray.hosts[2]
    ray.start(third)
    up(ray)
    find = f"import ray; ray.init({ray.address!r}); print(ray.get_runtime_context().get_node_id())"
    node = ray.run(third, f"{sys.executable} -c {shlex.quote(find)}").stdout.split()[-1]
    drained = ray.run(
        third,
        f"{sys.executable} -m ray.scripts.scripts drain-node --address {ray.address} --node-id {node} "
        f"--reason DRAIN_NODE_REASON_PREEMPTION --reason-message spot --deadline-remaining-seconds 200",
    )
    assert drained.returncode == 0, drained.stderr
    wait_until(lambda: states(ray)["host3"] in ("draining", "drained"), "the drain")
    left = nodes(ray)["host3"]["leave_by"] - time.time()
    assert 0 < left <= 200
    (raylet,) = find_processes(third, "raylet/raylet")
    os.kill(raylet, signal.SIGKILL)
    wait_until_none(third)
    ray.start(third)
    wait_until(lambda: states(ray)["host3"] == "alive", "its return")
