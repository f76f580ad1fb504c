"""Jobs on agents of this machine, each with a home of its own. tests/fault/test_host_jobs.py has some on
hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from agent_hosts import LoopbackHosts, insitu, is_running, wait_until
from host_jobs import CACHE_SCRIPT, HostJobs, make_images, run_undisturbed

from insitu.base.paths import Paths
from insitu.base.process.processes import open_process
from insitu.base.spec import TaskId
from insitu.cluster.chaos.injector import Fault, FaultInjector
from insitu.cluster.job_files import read_controller, read_supervisor
from insitu.cluster.leases.job_terms import read_term
from insitu.cluster.wire.records import is_locked, read_head, read_holder
from insitu.service import JobIndex, build_job_report, list_nodes
from insitu.ui.numbers_view import read_numbers
from insitu.ui.pages import render_fragments


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[LoopbackHosts]:
    with contextlib.closing(LoopbackHosts(tmp_path, ("a", "b"))) as found:
        found.up()
        yield found


@pytest.fixture
def jobs(hosts: LoopbackHosts, tmp_path: Path) -> HostJobs:
    return HostJobs(hosts.head, tmp_path / "job")


def list_left(hosts: LoopbackHosts, job: str) -> list[str]:
    """What hosts still have of a job: files, processes."""
    files = [str(path) for home in hosts.homes.values() for path in Paths(home).jobs.glob("*")]
    mark = f"INSITU_JOB_ID={job}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if mark in (entry / "environ").read_bytes().split(b"\0") or job.encode() in words:
                    files.append(f"{entry.name}: {b' '.join(words)!r}")
    return files


@pytest.mark.long
def test_a_task_that_dies_on_a_host_is_replaced_and_the_bits_are_those_of_one_machine(
    hosts: LoopbackHosts, jobs: HostJobs, tmp_path: Path
) -> None:
    jobs.let_go()
    job = jobs.start(workers=2, kill="worker:1")
    found, weights = jobs.finish(job)
    assert weights == run_undisturbed(tmp_path / "alone", 2) and len(weights) == 1
    assert found["engine"] == "hosts" and [t["node"] for t in found["task_list"]] == ["a", "b"]
    assert [t["attempt"] for t in found["task_list"]] == [1, 2] and found["attempt"] == 1
    assert [(r["how"], r["tasks"]) for r in found["recoveries"]] == [("replaced", ["worker:1"])]
    homes = {task: where[2] for task, where in jobs.where(job).items()}
    assert homes == {"worker:0": str(hosts.homes["a"]), "worker:1": str(hosts.homes["b"])}
    # What tasks have written is here, and nothing of the job there.
    here = Paths(hosts.head).job(job)
    assert list(here.checkpoints.rglob("state.json")) and found["task_list"][1]["progress"]["rows"] > 0
    assert list_left(hosts, job) == []
    assert "RESULT" in insitu(hosts.head, "logs", job, "worker:1").stdout
    # The page beside the head shows all of it.
    assert [each["job_id"] for each in JobIndex(Paths(hosts.head)).list()] == [job]
    assert {n["node"]: n["state"] for n in list_nodes(Paths(hosts.head))} == {"a": "alive", "b": "alive"}
    log = {"task": "worker:1", "attempt": None, "search": "", "before": None}
    report = build_job_report(here, quick=True)
    shown = render_fragments(here, report, read_numbers(here, report["evaluations"]), "view", log)
    assert 'data-label="Node" class="short">b<' in shown["tasks"] and "RESULT" in shown["log"]
    assert "worker:1 replaced" in shown["history"] and "Where the time went" in shown["goodput"]


@pytest.mark.hosts
def test_stop_leaves_nothing_and_resume_goes_on(hosts: LoopbackHosts, jobs: HostJobs, tmp_path: Path) -> None:
    job = jobs.start(workers=2)
    jobs.wait_in_the_middle(job, 2)
    assert job in insitu(hosts.head, "ps").stdout
    insitu(hosts.head, "stop", job)
    assert jobs.describe(job)["state"] == "stopped" and list_left(hosts, job) == []
    jobs.let_go()
    said = insitu(hosts.head, "resume", "--detach", job, KERAS_BACKEND="tensorflow").stderr
    assert "These of this shell don't count: KERAS_BACKEND" in " ".join(said.split())
    found, weights = jobs.finish(job)
    assert found["attempt"] == 2 and weights == run_undisturbed(tmp_path / "alone", 2)
    assert "continues from the checkpoint of epoch 1" in jobs.output(job)


VARIABLES = """
import os, sys, time
from pathlib import Path
names = ("KERAS_BACKEND", "RATE", "A_TOKEN", "HEAD_ONLY")
print("VARIABLES", *(os.environ.get(name) for name in names), flush=True)
while not (Path(sys.argv[1]) / "go").exists():
    time.sleep(0.02)
"""


@pytest.mark.long
def test_a_job_goes_on_with_its_own_variables_through_the_head(
    hosts: LoopbackHosts, jobs: HostJobs, tmp_path: Path
) -> None:
    """The head was started before, without them."""
    (jobs.code / "train.py").write_text(VARIABLES)
    fixed = ("--detach", "--workers", "1", "--standby", "0")
    own = {"KERAS_BACKEND": "jax", "RATE": "0.5", "A_TOKEN": "geheim-1"}
    job = insitu(hosts.head, "start", *fixed, "-", str(jobs.code), "train.py", str(jobs.meeting), **own)
    name = job.stdout.strip()
    wait_until(lambda: "VARIABLES" in jobs.output(name), "the first life")
    head = read_head(Paths(hosts.head))
    assert head is not None
    elsewhere = {"INSITU_CLUSTER": head.address, "INSITU_TOKEN_FILE": str(Paths(hosts.head).token)}
    insitu(tmp_path / "none", "stop", name, **elsewhere)
    caller = {**elsewhere, "KERAS_BACKEND": "tensorflow", "RATE": "9", "A_TOKEN": "geheim-2"}
    refused = insitu(tmp_path / "none", "resume", name, code=2, **caller).stderr
    assert "a shell without A_TOKEN" in " ".join(refused.split())
    unknown = insitu(tmp_path / "none", "resume", "--env", "RATE", name, code=2, **caller).stderr
    assert "was started with: A_TOKEN. Received: RATE" in " ".join(unknown.split())
    jobs.let_go()
    done = insitu(tmp_path / "none", "resume", "--env", "A_TOKEN", name, **caller)
    assert "VARIABLES jax 0.5 geheim-2 None" in done.stdout
    assert "VARIABLES jax 0.5 geheim-1 None" in jobs.output(name)


@pytest.mark.hosts
def test_agents_head_and_controller_may_die_and_a_server_is_started_again(
    hosts: LoopbackHosts, jobs: HostJobs, tmp_path: Path
) -> None:
    job = jobs.start(workers=2)
    jobs.wait_in_the_middle(job, 2)
    os.kill(hosts.agent_pid("a"), signal.SIGKILL)
    wait_until(lambda: hosts.states() == {"a": "lost", "b": "alive"}, "the loss of the agent")
    head = read_head(Paths(hosts.head))
    assert head is not None
    os.kill(head.pid, signal.SIGKILL)
    wait_until(lambda: not is_locked(Paths(hosts.head).head_lock), "the end of the head")
    hosts.up()
    faults = [Fault("delay", TaskId("worker", 0), steps=0), Fault("drop", TaskId("worker", 0), steps=0)]
    paths = Paths(hosts.head)
    injected = FaultInjector(paths, paths.job(job), 60.0).run(faults, lambda fault: None)
    assert [fault.done for fault in injected] == [True, False]
    assert "is for tasks of this machine" in injected[1].note
    lock = Paths(hosts.homes["b"]).job(job).engine_lock("b")
    server = read_holder(lock)
    assert server is not None
    os.kill(server.process.pid, signal.SIGKILL)
    jobs.let_go()
    found, weights = jobs.finish(job)
    assert weights == run_undisturbed(tmp_path / "alone", 2)
    assert found["attempt"] == 1 and [t["attempt"] for t in found["task_list"]] == [1, 2]
    assert "b has ended the connection: its tasks count as killed" in jobs.output(job)
    assert list_left(hosts, job) == []


@pytest.mark.hosts
def test_tasks_end_with_their_supervisor(hosts: LoopbackHosts, jobs: HostJobs) -> None:
    job = jobs.start(workers=2)
    jobs.wait_in_the_middle(job, 2)
    pids = [t["pid"] for t in jobs.describe(job)["task_list"]]
    assert len(pids) == 2 and all(map(is_running, pids))
    jobs.kill_supervisor(job)
    wait_until(lambda: not list_left(hosts, job), "the end of all")
    assert not any(map(is_running, pids))


@pytest.mark.hosts
def test_partitions_that_other_nodes_hold_are_brought_and_other_caches_are_agreed_upon(
    hosts: LoopbackHosts, tmp_path: Path
) -> None:
    """One worker reads what two nodes hold, of the job's cache and of another one."""
    source = make_images(tmp_path / "images")
    alone = tmp_path / "alone"
    insitu(alone, "up", "--nodes", "2")
    options = ("--partitions", "4", "--label-from-filename", "--split", "train=0.8,test=0.2")
    results = {}
    for home in (alone, hosts.head):
        insitu(home, "import", "images", str(source), *options)
        folder = tmp_path / f"job-{home.name}"
        jobs = HostJobs(home, folder)
        (jobs.code / "train.py").write_text(CACHE_SCRIPT)
        for workers in (1, 2):
            job = jobs.start("--shards", "2", workers=workers, cache="images/train")
            found, weights = jobs.finish(job)
            results[home.name, workers] = weights
            if home == hosts.head and workers == 1:
                said = jobs.output(job)
                assert "a reads 2 partitions of images/train that other nodes hold: " in said
                assert "a reads 2 partitions of images/test that other nodes hold: " in said
                assert found["engine"] == "hosts"
    assert len(set(map(frozenset, results.values()))) == 1 and len(results["alone", 1]) == 1, results


@pytest.mark.hosts
@pytest.mark.slow
def test_tasks_read_on_where_the_head_and_all_agents_are_killed(
    hosts: LoopbackHosts, jobs: HostJobs, tmp_path: Path
) -> None:
    """Nobody starts them again: rows are mapped, and the job needs neither."""
    source, options = str(make_images(tmp_path / "images")), ("--partitions", "4", "--label-from-filename")
    alone = HostJobs(tmp_path / "alone", tmp_path / "alone job")
    insitu(alone.home, "up", "--nodes", "2")
    for home in (alone.home, hosts.head):
        insitu(home, "import", "images", source, *options)
    job = jobs.start(workers=2, cache="images")
    jobs.wait_in_the_middle(job, 2)
    head = read_head(Paths(hosts.head))
    assert head is not None
    for pid in (*map(hosts.agent_pid, "ab"), head.pid):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not is_running(pid), "the end")
    jobs.let_go()
    found, weights = jobs.finish(job)
    assert [t["attempt"] for t in found["task_list"]] == [1, 1] and found["attempt"] == 1
    alone.let_go()
    assert weights == alone.finish(alone.start(workers=2, cache="images"))[1]


@pytest.mark.hosts
@pytest.mark.timeout(300)
def test_a_job_goes_on_elsewhere_and_its_former_supervisor_starts_nothing_any_more(
    hosts: LoopbackHosts, jobs: HostJobs, tmp_path: Path
) -> None:
    """The head is killed and the supervisor suspended. Another home gets the head; then the supervisor
    continues , and knows nothing of that."""
    job = jobs.start(workers=2)
    jobs.wait_in_the_middle(job, 2)
    copies = [Paths(home).job_copy(job) for home in hosts.homes.values()]
    wait_until(lambda: all(list(c.checkpoints.rglob("state.json")) for c in copies), "the copies")
    head, lock = read_head(Paths(hosts.head)), Paths(hosts.head).job(job).controller
    controller, supervisor = read_controller(lock), read_supervisor(lock)
    assert head is not None and controller is not None and supervisor is not None
    former = open_process(supervisor)
    assert former is not None
    for pid in (controller.pid, supervisor.pid):
        os.kill(pid, signal.SIGSTOP)
    os.kill(head.pid, signal.SIGKILL)
    here = tmp_path / "other head"
    try:
        wait_until(lambda: not is_locked(Paths(hosts.head).head_lock), "the end of the head")
        said = hosts.move_head(here, "a").stderr
        assert "2 of 2 hosts up" in said and f"`insitu resume {job}` continues with it here" in said, said
        assert "--replace-head is for another home" in hosts.up("--replace-head", code=2).stderr
        insitu(here, "resume", "--detach", job, KERAS_BACKEND="tensorflow")
        terms = [Paths(home).job_term(job) for home in hosts.homes.values()]
        wait_until(lambda: [read_term(term).number for term in terms] == [1, 1], "the other supervisor")
        jobs.let_go()
        for pid in (supervisor.pid, controller.pid):
            os.kill(pid, signal.SIGCONT)
        taken = HostJobs(here, tmp_path / "taken")
        found, weights = taken.finish(job)
        assert weights == run_undisturbed(tmp_path / "alone", 2) and found["attempt"] == 2
        assert "Training continues from the checkpoint of epoch" in taken.output(job)
        wait_until(lambda: not is_locked(lock), "the end of the former supervisor")
        assert jobs.describe(job)["state"] == "failed"
        assert jobs.output(job).count("] WHERE ") == 2 and "] RESULT " not in jobs.output(job)
        assert list_left(hosts, job) == []
        assert not any(Paths(home).job_copy(job).root.exists() for home in hosts.homes.values())
        assert not any(Paths(home).job_term(job).exists() for home in hosts.homes.values())
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(former, signal.SIGKILL)
        os.close(former)


ROWS_SCRIPT = """
import insitu

def count(batches):
    return sum(len(batch["x"] if isinstance(batch, dict) else batch) for batch in batches)

print("ROWS", count(insitu.dataset(label=None).batch(50)))
print("SHUFFLED", count(insitu.dataset(label=None).shuffle().batch(50)))
"""


@pytest.mark.long
def test_a_damaged_copy_on_a_host_is_replaced_by_the_good_one_of_another(
    hosts: LoopbackHosts, tmp_path: Path
) -> None:
    """In a job, and then in a script while the head is away: agents are found without it."""
    np.save(tmp_path / "d.npy", np.arange(8000).reshape(1000, 8))
    insitu(hosts.head, "import", "--backups", "1", "--partitions", "4", "d", str(tmp_path / "d.npy"))
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "r.py").write_text(ROWS_SCRIPT)
    path, other = (Paths(hosts.homes[n]).partition(n, "d", 1, 0) for n in ("a", "b"))
    whole = other.read_bytes()
    assert path.read_bytes() == whole
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(3000)
        file.write(b"XXXXXXXX")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    done = insitu(hosts.head, "start", "--workers", "2", "d", str(tmp_path / "job"), "r.py")
    said = done.stdout + done.stderr
    for name in ("ROWS", "SHUFFLED"):
        assert sum(int(line.split()[-1]) for line in said.splitlines() if f"] {name} " in line) == 1000, said
    assert said.count("The copy of partition 0 of d version 1 on a couldn't be used: ") == 1
    assert path.read_bytes() == whole
    head = read_head(Paths(hosts.head))
    assert head is not None
    os.kill(head.pid, signal.SIGKILL)
    path.unlink()
    script = "import insitu; print(len(next(iter(insitu.dataset('d').batch(1000)))))"
    environment = {**os.environ, "INSITU_HOME": str(hosts.homes["a"])}
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert found.stdout == "1000\n" and path.read_bytes() == whole, found.stderr
