"""Jobs as a user meets them: real processes, started, followed, stopped and killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_runs import PATIENCE, Insitu, insitu_at, wait_for

from insitu.base.roster import read_roster
from insitu.cluster import is_running

ONE = ("--workers", "1")
TWO = ("--workers", "2")

WAITS = """
import os, pathlib, time
print("waiting", os.environ["INSITU_TASK"])
while not pathlib.Path(os.environ["INSITU_HOME"], "go").exists():
    time.sleep(0.02)
print("continued")
"""


@pytest.fixture
def insitu(tmp_path: Path) -> Iterator[Insitu]:
    with insitu_at(tmp_path) as insitu:
        yield insitu


def wait_for_output(insitu: Insitu, job_id: str, text: str) -> None:
    wait_for(f"{text!r} in the output", lambda: text in insitu.output(job_id))


# Following.


def test_start_streams_the_output_and_ends_with_the_training(insitu: Insitu) -> None:
    insitu.script("import sys; print('out', sys.argv[1:]); print('err', file=sys.stderr)")
    run = insitu.start(*ONE, command=("train.py", "--epochs", "3", "--", "-x"))
    assert run.out == "[worker:0] out ['--epochs', '3', '--', '-x']\n[worker:0] err\n"
    assert run.err.splitlines() == [run.job_id, "[insitu] job finished"]
    assert run.job_id.startswith("data-train-")
    assert insitu.json("ps") == []


def test_lines_of_two_streams_are_never_mixed(insitu: Insitu) -> None:
    insitu.script(
        "import sys, threading\n"
        "def write(stream):\n"
        "    for i in range(3000): print(stream.name, i, 'end', file=stream)\n"
        "threads = [threading.Thread(target=write, args=(s,)) for s in (sys.stdout, sys.stderr)]\n"
        "for t in threads: t.start()\n"
    )
    lines = insitu.start(*ONE, "--no-prefix").out.splitlines()
    for stream in ("<stdout>", "<stderr>"):
        assert [line for line in lines if line.startswith(stream)] == [
            f"{stream} {i} end" for i in range(3000)
        ]


def test_the_exit_code_is_that_of_the_task_that_failed(insitu: Insitu) -> None:
    insitu.script("import sys; sys.exit(7)")
    run = insitu.start(*TWO, "--max-restarts", "0", code=7)
    assert "exit code 7" in run.err


def test_no_prefix_leaves_the_text_alone(insitu: Insitu) -> None:
    insitu.script("print('text')")
    assert insitu.start(*ONE, "--no-prefix").out == "text\n"


def test_ctrl_c_detaches_attach_replays_and_stop_ends(insitu: Insitu) -> None:
    insitu.script(WAITS)
    command = insitu.command("start", *ONE, "data/train", str(insitu.folder), "train.py")
    start = subprocess.Popen(
        command,
        env=insitu.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background may have inherited that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert start.stderr is not None and start.stdout is not None
    job_id = start.stderr.readline().strip()
    assert start.stdout.readline() == "[worker:0] waiting worker:0\n"
    start.send_signal(signal.SIGINT)
    _, told = start.communicate(timeout=PATIENCE)
    assert start.returncode == 130
    assert f"insitu attach {job_id}" in told and f"insitu stop {job_id}" in told
    assert insitu.state(job_id) == "running"

    attach = subprocess.Popen(
        insitu.command("attach", job_id[:-2]), env=insitu.environment, stdout=subprocess.PIPE, text=True
    )
    assert attach.stdout is not None
    assert attach.stdout.readline() == "[worker:0] waiting worker:0\n"
    stopped = insitu.run("stop", job_id)
    assert "has ended: stopped" in stopped.stderr
    attach.communicate(timeout=PATIENCE)
    assert attach.returncode == 143
    again = insitu.run("stop", job_id, code=3)
    assert "has ended already: stopped" in again.stderr
    assert insitu.run("attach", job_id, code=143).stdout == "[worker:0] waiting worker:0\n"


def test_a_job_outlives_the_terminal_it_was_started_from(insitu: Insitu) -> None:
    insitu.script(WAITS)
    leader, follower = os.openpty()
    start = subprocess.Popen(
        # setsid gives it the terminal; its hang-up reaches everything that belongs to that session.
        [
            "setsid",
            "--ctty",
            "--wait",
            *insitu.command("start", *ONE, "data/train", str(insitu.folder), "train.py"),
        ],
        env=insitu.environment,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        # Who has started the tests may have had them ignore it, as nohup does.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    os.close(follower)
    job_id = wait_for("the job", lambda: [p.name for p in insitu.paths.jobs.glob("data-train-*")])[0]
    wait_for_output(insitu, job_id, "waiting")
    os.close(leader)
    start.wait(PATIENCE)
    (insitu.paths.home / "go").touch()
    assert "continued" in insitu.run("attach", job_id).stdout


def test_logs_show_the_merged_output_and_each_tasks_own(insitu: Insitu) -> None:
    insitu.script(
        "import os; print('from', os.environ['INSITU_TASK'], os.environ['INSITU_ATTEMPT'])\n"
        "if os.environ['INSITU_ATTEMPT'] == '1': os.kill(os.getpid(), 9)"
    )
    job_id = insitu.start(*ONE).job_id
    merged = insitu.run("logs", job_id)
    assert [line for line in merged.stdout.splitlines() if line.startswith("[worker:0]")] == [
        "[worker:0] from worker:0 1",
        "[worker:0] from worker:0 2",
    ]
    assert "[insitu] worker:0 was killed by SIGKILL\n" in merged.stdout and merged.stderr == ""
    assert insitu.run("logs", "-f", job_id, "worker").stdout == "from worker:0 2\n"
    assert insitu.run("logs", job_id, "worker:0", "--attempt", "1").stdout == "from worker:0 1\n"
    assert "had 2 incarnations" in insitu.run("logs", job_id, "worker:0", "--attempt", "3", code=2).stderr
    assert "no task ps:0" in insitu.run("logs", job_id, "ps", code=2).stderr
    assert "ROLE:INDEX" in insitu.run("logs", job_id, "boss", code=2).stderr
    assert "goes with a TASK" in insitu.run("logs", job_id, "--attempt", "1", code=2).stderr


def test_a_reader_that_has_had_enough_is_no_error(insitu: Insitu) -> None:
    insitu.script("print('line\\n' * 200_000)")
    job_id = insitu.start(*ONE).job_id
    logs = subprocess.Popen(
        insitu.command("logs", job_id), env=insitu.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert logs.stdout is not None and logs.stderr is not None
    logs.stdout.readline()
    logs.stdout.close()
    assert (logs.stderr.read(), logs.wait(PATIENCE)) == (b"", -signal.SIGPIPE)
    logs.stderr.close()


# What a task finds.


def test_a_script_finds_what_plain_python_would_give_it(insitu: Insitu) -> None:
    insitu.script(
        "from helper import double; import multiprocessing as m\n"
        "def work(x): return double(x)\n"
        "if __name__ == '__main__':\n"
        "    import os, sys, pickle\n"
        "    print(sys.argv[0], os.path.basename(__file__), os.path.samefile(sys.path[0], os.getcwd()))\n"
        "    print(pickle.loads(pickle.dumps(work))(1), sys.stdin.read() == '')\n"
        "    with m.get_context('spawn').Pool(1) as pool: print(pool.map(work, [1, 2]))\n"
    )
    insitu.script("def double(x): return 2 * x", name="helper.py")
    assert insitu.start(*ONE, "--no-prefix").out == "train.py train.py True\n2 True\n[2, 4]\n"


def test_a_file_of_the_job_does_not_stand_in_for_a_module_that_starts_it(insitu: Insitu) -> None:
    insitu.script("print('reached')")
    insitu.script("raise RuntimeError('shadowed')", name="shutil.py")
    assert insitu.start(*ONE, "--no-prefix").out == "reached\n"


def test_the_code_is_a_copy(insitu: Insitu) -> None:
    insitu.script(WAITS + "\nimport late")
    insitu.script("print('late, but the old one')", name="late.py")
    job_id = insitu.detach(*ONE)
    wait_for_output(insitu, job_id, "waiting")
    insitu.script("print('edited')", name="late.py")
    (insitu.paths.home / "go").touch()
    assert "late, but the old one" in insitu.run("attach", job_id).stdout


def test_an_archive_is_a_job(insitu: Insitu, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "job.zip", "w") as opened:
        opened.writestr("lib/train.py", "print('zipped')")
    done = insitu.run("start", *ONE, "data/train", str(tmp_path / "job.zip"), "python", "lib/train.py")
    assert done.stdout == "[worker:0] zipped\n"


def test_any_program_can_be_a_job(insitu: Insitu) -> None:
    insitu.script("#!/bin/sh\necho $INSITU_TASK $1 $OMP_NUM_THREADS; exit 5", name="run.sh", mode=0o755)
    run = insitu.start(*ONE, "--threads", "3", "--max-restarts", "0", command=("run.sh", "a b"), code=5)
    assert run.out == "[worker:0] worker:0 a b 3\n"


def test_the_seed_makes_runs_equal(insitu: Insitu) -> None:
    insitu.script("import random; print(random.random(), hash('text'))")
    first, second, other = (insitu.start(*ONE, "--seed", seed).out for seed in ("4", "4", "5"))
    assert first == second != other


def test_the_secret_is_the_owners_alone(insitu: Insitu) -> None:
    insitu.script(
        "import insitu, os; c = insitu.context(); print(len(c.secret()), c.secret().hex() in str(os.environ))"
    )
    run = insitu.start(*ONE)
    assert run.out == "[worker:0] 32 False\n"
    assert stat.S_IMODE(run.job.secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(run.job.root.stat().st_mode) == 0o700


# Failing and recovering.


def test_a_killed_worker_is_recovered_from_and_told_about(insitu: Insitu) -> None:
    insitu.script(
        "import os, signal\n"
        "if os.environ['INSITU_ATTEMPT'] == '1' and os.environ['INSITU_TASK'] == 'worker:1':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "import time; time.sleep(60 if os.environ['INSITU_ATTEMPT'] == '1' else 0)"
    )
    run = insitu.start(*TWO)
    assert "worker:1 was killed by SIGKILL; restarting every task in 1 s (1 of 3)" in run.err
    described = insitu.json("describe", run.job_id)
    first, second = described["attempts"]
    assert first["cause"]["task"] == "worker:1" and first["cause"]["code"] == 137
    assert second["cause"] is None and described["state"] == "finished"
    assert "worker:1 was killed by SIGKILL" in insitu.run("describe", run.job_id).stdout


def test_each_attempt_has_addresses_of_its_own(insitu: Insitu) -> None:
    insitu.script(
        "import os; print(os.environ['TF_CONFIG'])\n"
        "if os.environ['INSITU_ATTEMPT'] == '1': raise OSError('once')"
    )
    run = insitu.start(*TWO, "--no-prefix")
    clusters = [
        tuple(json.loads(line)["cluster"]["worker"]) for line in run.out.splitlines() if line[0] == "{"
    ]
    addresses = {address for cluster in clusters for address in cluster}
    assert len(set(clusters)) == 2 and len(addresses) == 4


MEETS = (
    WAITS
    + """
import insitu.exchange, numpy as np
from insitu.base.context import context
here = context()
with insitu.exchange.join(here.index, here.workers, secret=here.secret()) as group:
    total = np.full(3, here.index + 1.0, "f4")
    group.all_reduce(total)
    print("sum", total.tolist())
"""
)


def test_nobody_can_take_the_port_of_a_task_that_still_loads(insitu: Insitu) -> None:
    """As a process that binds whatever is free, while the tasks load their framework."""
    insitu.script(MEETS)
    job_id = insitu.detach(*TWO)
    wait_for("both tasks", lambda: insitu.output(job_id).count("waiting") == 2)
    roster = read_roster(insitu.job(job_id).roster)
    assert roster is not None and len(roster.addresses) == 2
    for address in roster.addresses:
        host, _, port = address.rpartition(":")
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            stranger.bind((host, int(port)))
    (insitu.paths.home / "go").touch()
    assert insitu.run("attach", job_id, "--no-prefix").stdout.count("sum [3.0, 3.0, 3.0]") == 2


def test_a_bug_is_not_tried_for_ever(insitu: Insitu) -> None:
    insitu.script("def f():\n    import os; raise RuntimeError(os.getpid())\nf()")
    run = insitu.start(*ONE, "--max-restarts", "5", code=1)
    assert "the same traceback twice" in run.err
    assert len(insitu.json("describe", run.job_id)["attempts"]) == 2
    traceback = insitu.run("logs", run.job_id, "worker:0").stdout
    assert "insitu/cluster" not in traceback and "in f" in traceback


def test_a_mistake_of_all_workers_is_told_once(insitu: Insitu) -> None:
    insitu.script(
        "import insitu, pathlib, time\n"
        "me = insitu.context().task\n"
        "pathlib.Path(f'../{me.index}').touch()\n"
        "while len([n for n in '01' if pathlib.Path(f'../{n}').exists()]) < 2: time.sleep(0.01)\n"
        "insitu.dataset('nope')\n"
    )
    run = insitu.start("--workers", "2", code=1)
    assert len(insitu.json("describe", run.job_id)["attempts"]) == 1
    assert "it would end the same way again, so it is not tried again" in run.err
    assert run.out.count("Traceback") == 1
    reason = insitu.json("describe", run.job_id)["reason"]
    assert run.err.count(reason) == 1 and run.err.count("No cache") == 1


def test_an_exit_that_the_script_chose_is_a_bug_too(insitu: Insitu) -> None:
    insitu.script("import sys; sys.exit(3)")
    run = insitu.start(*ONE, "--max-restarts", "5", code=3)
    assert "exit code 3: SystemExit; the same exit twice" in run.err
    assert len(insitu.json("describe", run.job_id)["attempts"]) == 2
    insitu.script("import sys; sys.exit(0)")
    insitu.start(*ONE)


def test_what_one_attempt_left_is_not_taken_for_the_nexts(insitu: Insitu) -> None:
    insitu.script(
        "import insitu, os\nfrom insitu.base.progress import ProgressWriter\n"
        "c = insitu.context()\n"
        "if c.incarnation == 1:\n"
        "    ProgressWriter(c.job.progress(c.task)).write(5, 5, 55, 'gradient')\n"
        "    raise ValueError('the first')\n"
        "if c.incarnation == 2: os._exit(1)\n"
    )
    run = insitu.start(*ONE)
    first, second, third = insitu.json("describe", run.job_id)["attempts"]
    assert first["progress"] == {"epoch": 5, "step": 5} and "the first" in first["cause"]["text"]
    assert second["progress"] is None and second["cause"]["text"] == "worker:0 ended with exit code 1"
    assert third["cause"] is None


def test_parameter_servers_end_with_the_training(insitu: Insitu) -> None:
    insitu.script("import os, time\nif os.environ['INSITU_TASK'] == 'ps:0': time.sleep(600)")
    run = insitu.start(*ONE, "--ps", "1")
    codes = {t["task"]: t["code"] for t in insitu.json("describe", run.job_id)["task_list"]}
    assert codes == {"worker:0": 0, "ps:0": -signal.SIGTERM}


def test_a_parameter_server_on_each_node_where_auto_is_asked_for(insitu: Insitu) -> None:
    insitu.run("up", "--nodes", "3")
    insitu.script("import os, time\nif os.environ['INSITU_TASK'].startswith('ps'): time.sleep(600)")
    run = insitu.start(*ONE, "--ps", "auto")
    told = insitu.json("describe", run.job_id)["task_list"]
    assert [(t["task"], t["node"]) for t in told if t["task"].startswith("ps")] == [
        (f"ps:{index}", f"node-{index}") for index in range(3)
    ]


@pytest.mark.parametrize("asked", ["-1", "some", "1.5", ""])
def test_parameter_servers_that_are_no_number(insitu: Insitu, asked: str) -> None:
    insitu.script("")
    done = insitu.run("start", *ONE, "--ps", asked, "data/train", str(insitu.folder), "train.py", code=2)
    assert "--ps must be auto, or a number, at least 0. Received:" in " ".join(done.stderr.split())


def test_a_job_that_stands_still_is_stopped_with_its_stacks_in_the_logs(insitu: Insitu) -> None:
    insitu.script(
        "import insitu, time\nfrom insitu.base.progress import ProgressWriter\n"
        "c = insitu.context(); w = ProgressWriter(c.job.progress(c.task))\n"
        "def stuck():\n    time.sleep(600)\n"
        "w.write(1, 7, 70, 'exchange')\nstuck()"
    )
    run = insitu.start(*TWO, "--stall-timeout", "1", "--max-restarts", "0", code=124)
    assert "no task made progress for 1 s: worker:0 at epoch 2 step 8 (exchange); worker:1 at" in run.err
    for task in ("worker:0", "worker:1"):
        assert "in stuck" in insitu.run("logs", run.job_id, task).stdout
    assert insitu.json("describe", run.job_id)["attempts"][0]["progress"] == {"epoch": 1, "step": 7}


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("ignored"))
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready")
while True:
    time.sleep(0.1)
"""


COUNTS = """
import os, pathlib, time
home = pathlib.Path(os.environ["INSITU_HOME"])
print("pid", os.getpid())
number = 0
while not (home / "go").exists():
    number += 1
    print("line", number)
    time.sleep(0.001)
print("last", number)
"""


def test_a_killed_controller_is_taken_over_and_tasks_notice_nothing(insitu: Insitu) -> None:
    insitu.script(COUNTS)
    job_id = insitu.detach(*ONE)
    wait_for_output(insitu, job_id, "line")
    for times in range(1, 4):
        os.kill(insitu.controller(job_id), signal.SIGKILL)
        wait_for("the takeover", lambda times=times: insitu.output(job_id).count("taken over") == times)
    (insitu.paths.home / "go").touch()
    lines = insitu.run("attach", job_id, "--no-prefix").stdout.splitlines()
    last = int(lines[-1].split()[1])
    assert lines[0].startswith("pid") and lines[1:-1] == [f"line {i + 1}" for i in range(last)]
    assert insitu.state(job_id) == "finished"
    assert insitu.json("describe", job_id)["attempt"] == 1


def test_a_job_whose_controllers_all_die_says_why_it_ended(insitu: Insitu) -> None:
    insitu.script(WAITS)
    job_id = insitu.detach(*ONE)
    wait_for_output(insitu, job_id, "waiting")
    killed = set()

    def has_ended() -> bool:
        controller = insitu.controller(job_id)
        if controller not in killed:
            killed.add(controller)
            with contextlib.suppress(ProcessLookupError):
                os.kill(controller, signal.SIGKILL)
        return not is_running(insitu.job(job_id))

    wait_for("the job's end", has_ended)
    assert len(killed) == 60
    reason = insitu.json("describe", job_id)["reason"]
    assert "controller died 60 times within 60 s" in reason and "insitu resume" in reason
    assert "controller died 60 times" in insitu.run("ps", "--all").stdout
    assert reason in insitu.run("attach", job_id, code=1).stderr


def test_a_job_that_no_controller_can_run_says_why_it_ended(insitu: Insitu) -> None:
    insitu.script(WAITS)
    job_id = insitu.detach(*ONE)
    wait_for_output(insitu, job_id, "waiting")
    placement = insitu.job(job_id).placement
    whole = placement.read_text()
    placement.write_text("{")
    os.kill(insitu.controller(job_id), signal.SIGKILL)
    wait_for("the job's end", lambda: not is_running(insitu.job(job_id)))
    placement.write_text(whole)
    described = insitu.json("describe", job_id)
    assert described["state"] == "failed" and "placement" in described["reason"]
    assert described["reason"] in insitu.run("attach", job_id, code=1).stderr


def test_an_end_that_no_controller_saw_is_seen_by_the_next(insitu: Insitu) -> None:
    insitu.script(WAITS)
    job_id = insitu.detach(*ONE)
    wait_for_output(insitu, job_id, "waiting")
    os.kill(insitu.controller(job_id), signal.SIGSTOP)
    (insitu.paths.home / "go").touch()
    wait_for_output(insitu, job_id, "continued")
    os.kill(insitu.controller(job_id), signal.SIGKILL)
    insitu.run("attach", job_id)
    assert insitu.state(job_id) == "finished"


def test_a_job_ends_with_its_supervisor_and_can_be_resumed(insitu: Insitu) -> None:
    insitu.script(STUBBORN + "\n")
    job_id = insitu.detach(*TWO)
    wait_for("both tasks", lambda: insitu.output(job_id).count("ready") == 2)
    assert len(insitu.processes()) == 2 + 2 * 3
    controller = insitu.controller(job_id)
    supervisor = int(Path(f"/proc/{controller}/stat").read_text().rpartition(")")[2].split()[1])
    assert "is running" in insitu.run("resume", job_id, code=2).stderr
    os.kill(supervisor, signal.SIGKILL)
    tasks = [p for p, line in insitu.processes().items() if "insitu.cluster" in line]
    wait_for("the tasks to end", lambda: not set(tasks) & insitu.processes().keys())
    for orphan in insitu.processes():
        # What a task had started in sessions of its own has lost the one that would have ended it.
        os.kill(orphan, signal.SIGKILL)
    described = insitu.json("describe", job_id)
    assert described["state"] == "failed" and "insitu resume" in described["reason"]
    assert insitu.run("stop", job_id, code=3)
    (insitu.job(job_id).code / "train.py").write_text(
        "import os; print('life', os.environ['INSITU_ATTEMPT'])"
    )
    resumed = insitu.run("resume", job_id)
    assert sorted(resumed.stdout.splitlines()) == ["[worker:0] life 2", "[worker:1] life 2"]
    assert "has finished" in insitu.run("resume", job_id, code=3).stderr


VARIABLES = """
import os, time
from pathlib import Path
names = ("RATE", "A_TOKEN", "MORE", "TERM", "INSITU_VIRTUAL_DEVICES", "PYTHONPATH")
print("VARIABLES", *(os.environ.get(name) for name in names), flush=True)
while not (Path(os.environ["INSITU_HOME"]) / "go").exists():
    time.sleep(0.02)
"""


def test_a_job_goes_on_with_the_variables_that_it_was_started_with(
    insitu: Insitu, monkeypatch: pytest.MonkeyPatch
) -> None:
    insitu.script(VARIABLES)
    shell = insitu.environment
    own = {"RATE": "rate-1", "A_TOKEN": "geheim-1", "TERM": "one", "PYTHONPATH": "/own"}
    monkeypatch.setattr(insitu, "environment", {**shell, **own})
    job_id = insitu.detach(*ONE)
    wait_for_output(insitu, job_id, "VARIABLES")
    insitu.run("stop", job_id)
    other = {"RATE": "rate-2", "MORE": "1", "TERM": "two", "INSITU_VIRTUAL_DEVICES": "cpu:3"}
    monkeypatch.setattr(insitu, "environment", {**shell, **other})
    refused = insitu.run("resume", "--detach", job_id, code=2).stderr
    assert "a shell without A_TOKEN" in " ".join(refused.split()) and insitu.state(job_id) == "stopped"
    monkeypatch.setattr(insitu, "environment", {**shell, **other, "A_TOKEN": "geheim-2"})
    (insitu.folder / "train.py").write_text("print('another one')")
    said = " ".join(insitu.run("resume", "--detach", job_id).stderr.split())
    assert insitu.state(job_id) in ("pending", "running")
    assert "it takes these from this shell: A_TOKEN" in said
    assert "These of this shell don't count: INSITU_VIRTUAL_DEVICES, MORE, RATE." in said
    assert f"differs from: {insitu.folder / 'train.py'}" in said
    wait_for("both lives", lambda: insitu.output(job_id).count("VARIABLES") == 2)
    (insitu.paths.home / "go").touch()
    insitu.run("attach", job_id)
    found = [line.partition("VARIABLES ")[2] for line in insitu.output(job_id).splitlines()]
    assert [line for line in found if line] == [
        "rate-1 geheim-1 None one None /own",
        "rate-1 geheim-2 None two None /own",
    ]
    assert "(resumed; the job's folder has no checkpoint: " in insitu.output(job_id)
    # Values are nowhere but in the file of the owner (a number could stand in a time by chance).
    assert insitu.job(job_id).environment.stat().st_mode & 0o777 == 0o600
    assert "geheim" not in insitu.job(job_id).environment.read_text()
    for shown in (insitu.run("describe", job_id, "--json", "--events").stdout, said, refused):
        assert not any(value in shown for value in ("rate-1", "rate-2", "geheim"))


def test_a_user_gives_a_job_another_variable_by_name(insitu: Insitu, monkeypatch: pytest.MonkeyPatch) -> None:
    insitu.script(VARIABLES)
    shell = insitu.environment
    monkeypatch.setattr(insitu, "environment", {**shell, "RATE": "0.5", "A_TOKEN": "geheim"})
    job_id = insitu.detach(*ONE)
    wait_for_output(insitu, job_id, "VARIABLES")
    insitu.run("stop", job_id)
    (insitu.paths.home / "go").touch()
    monkeypatch.setattr(insitu, "environment", {**shell, "RATE": "0.25"})
    said = insitu.run("resume", "--env", "RATE", "--env", "A_TOKEN", job_id)
    assert "VARIABLES 0.25 None" in said.stdout, "A_TOKEN isn't set here"


def test_tasks_that_cannot_come_and_go_are_not_scaled(insitu: Insitu) -> None:
    insitu.script(WAITS)
    job_id = insitu.detach(*TWO)
    wait_for("both tasks", lambda: insitu.output(job_id).count("waiting") == 2)
    assert "can't take part" in insitu.run("scale", job_id, "1", code=2).stderr
    assert "1 to 2 workers" in insitu.run("scale", job_id, "3", code=2).stderr
    (insitu.paths.home / "go").touch()
    insitu.run("attach", job_id)
    assert "has ended already: finished" in insitu.run("scale", job_id, "1", code=3).stderr


def test_whatever_a_task_leaves_behind_ends_with_the_job(insitu: Insitu) -> None:
    insitu.script(STUBBORN.replace("while True:\n    time.sleep(0.1)\n", ""))
    insitu.start(*ONE)
    assert insitu.processes() == {}


def test_a_second_stop_kills_what_ignores_the_first(insitu: Insitu) -> None:
    insitu.script(STUBBORN)
    job_id = insitu.detach(*ONE)
    wait_for_output(insitu, job_id, "ready")
    first = subprocess.Popen(insitu.command("stop", job_id), env=insitu.environment, stderr=subprocess.PIPE)
    wait_for_output(insitu, job_id, "ignored")
    insitu.run("stop", job_id)
    assert first.wait(PATIENCE) == 0
    assert first.stderr is not None
    first.stderr.close()
    assert insitu.state(job_id) == "stopped"


# Questions.


def test_taking_the_nodes_down_stops_jobs_first_and_only_when_forced(insitu: Insitu) -> None:
    insitu.script(WAITS)
    job_id = insitu.start(*ONE, "--detach").job_id
    wait_for_output(insitu, job_id, "waiting")
    refused = insitu.run("down", code=2)
    assert job_id in refused.stderr and "running job" in refused.stderr and "insitu stop" in refused.stderr
    assert insitu.state(job_id) == "running" and insitu.json("caches")
    told = insitu.run("down", "--force").stderr
    assert f"Stopping {job_id}" in told and f"{job_id} has ended: stopped" in told and "down" in told
    assert insitu.state(job_id) == "stopped" and insitu.json("caches") == []


def test_ps_and_describe_tell_what_the_documents_say(insitu: Insitu) -> None:
    insitu.script(WAITS)
    job_id = insitu.detach(*TWO, "--ps", "1", "--name", "nightly", "--seed", "3", "--threads", "2")
    wait_for("all tasks", lambda: insitu.output(job_id).count("waiting") == 3)
    (shown,) = insitu.json("ps")
    documented = {"job_id", "state", "cache", "command", "tasks", "attempt", "progress", "created", "ended"}
    assert set(shown) == documented | {"exit_code", "reason", "bytes"}
    assert shown["tasks"] == {"chief": 0, "worker": 2, "ps": 1, "evaluator": 0}
    assert (shown["state"], shown["cache"], shown["attempt"]) == ("running", "data/train", 1)
    assert job_id.startswith("nightly-") and job_id in insitu.run("ps").stdout
    described = insitu.json("describe", job_id, "--ledger", "--events")
    assert {k: described[k] for k in ("workers", "seed", "threads")} == {
        "workers": 2,
        "seed": 3,
        "threads": 2,
    }
    assert described["shards"] == [
        {"shard": 0, "home": "node-0", "partitions": [0, 2]},
        {"shard": 1, "home": "node-0", "partitions": [1, 3]},
    ]
    assert [t["shards"] for t in described["task_list"]] == [[0], [1], []]
    assert described["ledger"] == [] and described["events"][0]["event"] == {
        "event": "Submitted",
        "lost": [],
        "has_checkpoint": False,
    }
    assert "PLACEHOLDER" not in insitu.run("describe", job_id, "--ledger", "--events").stdout
    (insitu.paths.home / "go").touch()
    insitu.run("attach", job_id)
    assert insitu.json("ps") == [] and insitu.json("ps", "--all")[0]["state"] == "finished"


def test_the_shell_completes_jobs_and_caches(insitu: Insitu) -> None:
    insitu.script("")
    job_id = insitu.start(*ONE, "--name", "nightly").job_id

    def completed(line: str) -> list[str]:
        environment = {
            **insitu.environment,
            "_PYTHON _M INSITU_COMPLETE": "complete_bash",
            "_INSITU_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
        }
        program = "from insitu.cli import main; import sys; sys.argv[0] = 'insitu'; main()"
        done = subprocess.run(
            [insitu.command()[0], "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        return done.stdout.split()

    assert completed("insitu attach nigh") == [job_id]
    assert completed("insitu start da") == ["data/train"]


# What can't be used.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "0", "data/train", "JOB", "train.py"), "--workers must be at least 1"),
        (("--workers", "5", "data/train", "JOB", "train.py"), "4 partitions, fewer than the 5 shards"),
        (("--workers", "2", "--shards", "1", "data/train", "JOB", "train.py"), "--shards must be at least 2"),
        (("--threads", "0", "data/train", "JOB", "train.py"), "--threads must be at least 1"),
        (("--stall-timeout", "0", "data/train", "JOB", "train.py"), "--stall-timeout must be positive"),
        (
            ("--engine", "ray", "data/train", "JOB", "train.py"),
            "--engine must be local, hosts or k8s. Received",
        ),
        (("--name", "a/b", "data/train", "JOB", "train.py"), "A job's name"),
        (("data/trian", "JOB", "train.py"), "Did you mean data/train"),
        (("data/train", "JOB", "gone.py"), "no script 'gone.py'. It holds: data.txt, train.py"),
        (("data/train", "JOB", "data.txt"), "not executable"),
        (("data/train", "JOB/gone", "train.py"), "doesn't exist"),
        (("data/train", "EVIL.zip", "train.py"), "would land outside: '../evil.py'"),
    ],
)
def test_what_cannot_be_started_leaves_nothing_behind(
    insitu: Insitu, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    insitu.script("")
    insitu.script("", name="data.txt")
    with zipfile.ZipFile(tmp_path / "EVIL.zip", "w") as opened:
        opened.writestr("train.py", "")
        opened.writestr("../evil.py", "")
    named = [a.replace("JOB", str(insitu.folder)).replace("EVIL", str(tmp_path / "EVIL")) for a in arguments]
    done = insitu.run("start", *named, code=2)
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not insitu.paths.jobs.exists() or list(insitu.paths.jobs.iterdir()) == []
    assert not list(tmp_path.rglob("evil.py"))


@pytest.mark.parametrize("command", ["attach", "stop", "logs", "describe"])
def test_an_unknown_job_is_named(insitu: Insitu, command: str) -> None:
    done = insitu.run(command, "nothing-1", code=2)
    assert "'nothing-1'" in done.stderr and "insitu ps --all" in done.stderr
