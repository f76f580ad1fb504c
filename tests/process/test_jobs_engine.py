"""What every engine must do. One test for all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths, Paths
from insitu.base.progress import Progress, ProgressWriter
from insitu.base.roster import Member, Roster, read_roster
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.decide.job_state import Failure
from insitu.cluster.engines.engine import Command, Ended, Engine, Output
from insitu.cluster.engines.local import LocalEngine
from insitu.cluster.engines.remote import RemoteEngine, start_engine_server
from tests.support.descriptors import find_new_descriptors, list_descriptors
from tests.support.foreign_user import needs_root, run_as

W0, W1 = (TaskSpec(TaskId("worker", i), NodeId("node-0")) for i in range(2))
ENGINES: dict[str, Callable[[JobPaths], Engine]] = {"local": LocalEngine, "server": start_engine_server}
PATIENCE = 60.0
Program = Callable[[str], Command]


def read_state(pid: int) -> str:
    """The letter of the state of a process; Z where it has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def is_gone(pid: int) -> bool:
    return read_state(pid) == "Z"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def job(tmp_path: Path) -> JobPaths:
    made = Paths(tmp_path / "home").job("job-1")
    made.code.mkdir(parents=True)
    return made


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, job: JobPaths) -> Iterator[Engine]:
    made = ENGINES[request.param](job)
    yield made
    made.close()


@pytest.fixture
def python() -> Callable[[str], Command]:
    def command(program: str) -> Command:
        return Command((sys.executable, "-u", "-c", program), {"WORD": "given"})

    return command


@pytest.fixture
def task(job: JobPaths) -> Callable[[str], Command]:
    """What a job runs: a script, in the process of a task."""

    def command(script: str) -> Command:
        (job.code / "train.py").write_text(script)
        environment = {
            "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
            "INSITU_HOME": str(job.root.parent.parent),
            "INSITU_JOB_ID": "job-1",
            "INSITU_TASK": "worker:0",
        }
        return Command((sys.executable, "-P", "-m", "insitu.cluster.task.entry", "train.py"), environment)

    return command


def collect(engine: Engine, until: Callable[[list[Output | Ended]], bool]) -> list[Output | Ended]:
    happened: list[Output | Ended] = []
    deadline = time.monotonic() + PATIENCE
    while not until(happened):
        assert time.monotonic() < deadline, happened
        happened += engine.wait(1.0)
    return happened


def ended(count: int) -> Callable[[list[Output | Ended]], bool]:
    return lambda happened: sum(isinstance(h, Ended) for h in happened) == count


def printed(happened: list[Output | Ended], task: TaskSpec) -> bytes:
    return b"".join(h.data for h in happened if isinstance(h, Output) and h.task == task.task)


def test_addresses_are_distinct_and_fresh(engine: Engine) -> None:
    first, second = engine.reserve([W0, W1]), engine.reserve([W0, W1])
    assert list(first) == [W0.task, W1.task]
    assert len({*first.values(), *second.values()}) >= 3
    assert all(address.rpartition(":")[2].isdecimal() for address in first.values())


LISTENS = """
from insitu.base.net import ports
host, _, port = {address!r}.rpartition(":")
listener = ports.take_inherited(host, int(port))
listener.listen()
print("listens", flush=True)
listener.accept()
"""


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def can_bind(address: str, *options: int) -> bool:
    """Whether another process could listen at `address`: it binds it as this one does."""
    with socket.socket() as stranger:
        for option in options:
            stranger.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            stranger.bind(split(address))
        except OSError:
            return False
        return True


def test_nobody_else_can_bind_the_address_of_a_task(engine: Engine, task: Program) -> None:
    address = engine.reserve([W0, W1])[W0.task]
    script = task(LISTENS.format(address=address))
    for _ in range(2):  # also a replacement that listens where the process before did
        assert not can_bind(address) and not can_bind(address, socket.SO_REUSEADDR)
        engine.launch(W0, script)
        collect(engine, lambda happened: b"listens" in printed(happened, W0))
        # From now on not even a process of this user.
        assert not can_bind(address, socket.SO_REUSEADDR, socket.SO_REUSEPORT)
        engine.signal(W0.task, "kill")
        collect(engine, ended(1))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(split(address))
    assert not can_bind(address, socket.SO_REUSEADDR)


@needs_root
def test_another_user_cannot_bind_the_address_of_a_task_that_cannot_take_a_socket(
    engine: Engine, python: Program
) -> None:
    """As TensorFlow's gRPC listens: beside the socket that is held for it."""
    address = engine.reserve([W0])[W0.task]
    both = socket.SO_REUSEADDR, socket.SO_REUSEPORT
    assert run_as(lambda: can_bind(address, *both)) == "False"
    program = f"import socket; socket.create_server({split(address)}, reuse_port=True); print('listens')"
    engine.launch(W0, python(program))
    assert printed(collect(engine, ended(1)), W0) == b"listens\n"
    assert run_as(lambda: can_bind(address, *both)) == "False"


def test_a_task_that_lives_keeps_its_address(engine: Engine, python: Program) -> None:
    """As where a controller launched it, and died before it published the address."""
    address = engine.reserve([W0, W1])[W0.task]
    engine.launch(W0, python("import time; time.sleep(600)"))
    assert engine.reserve([W0])[W0.task] == address
    engine.signal(W0.task, "kill")
    collect(engine, ended(1))
    assert engine.reserve([W0])[W0.task] != address


def test_an_address_for_a_task_that_lives_already_is_free_at_once(engine: Engine, python: Program) -> None:
    engine.launch(W0, python("import time; time.sleep(600)"))
    host, _, port = engine.reserve([W0])[W0.task].rpartition(":")
    socket.create_server((host, int(port))).close()
    engine.signal(W0.task, "kill")
    collect(engine, ended(1))


def test_output_comes_whole_and_before_the_end(engine: Engine, python: Program) -> None:
    engine.launch(
        W0,
        python(
            "import os, sys; print(os.environ['WORD'], os.getcwd())\n"
            "sys.stdout.write('x' * 300_000); sys.stderr.write('last'); sys.exit(3)"
        ),
    )
    happened = collect(engine, ended(1))
    assert happened[-1] == Ended(W0.task, 3)
    text = printed(happened, W0)
    assert text.startswith(b"given /") and text.count(b"x") >= 300_000 and text.endswith(b"last")


def test_the_environment_is_exactly_what_was_asked_for(engine: Engine, python: Program) -> None:
    engine.launch(W0, python("import os; print('PATH' in os.environ, os.environ['WORD'])"))
    assert printed(collect(engine, ended(1)), W0) == b"False given\n"


def test_a_signal_ends_the_task_and_all_that_it_started(
    engine: Engine, python: Program, job: JobPaths
) -> None:
    child = "import os, time; open('child', 'w').write(str(os.getpid())); print('up'); time.sleep(600)"
    engine.launch(W0, python(f"import subprocess, sys; subprocess.run([sys.executable, '-uc', {child!r}])"))
    collect(engine, lambda happened: b"up" in printed(happened, W0))
    engine.signal(W0.task, "kill")
    assert collect(engine, ended(1))[-1] == Ended(W0.task, -9)
    pid = int((job.code / "child").read_text())
    wait_for(lambda: is_gone(pid))
    engine.signal(W0.task, "term")  # of no effect: it has ended


def test_what_a_task_started_ends_with_it(engine: Engine, python: Program) -> None:
    engine.launch(
        W0,
        python(
            "import subprocess, sys\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdout=-3)\n"
            "print(child.pid)"
        ),
    )
    happened = collect(engine, ended(1))
    assert happened[-1] == Ended(W0.task, 0)
    wait_for(lambda: is_gone(int(printed(happened, W0))))


def test_a_stopped_process_can_be_asked_to_end(engine: Engine, python: Program) -> None:
    engine.launch(W0, python("import os, signal; print('up'); os.kill(os.getpid(), signal.SIGSTOP)"))
    collect(engine, lambda happened: b"up" in printed(happened, W0))
    engine.signal(W0.task, "term")
    assert collect(engine, ended(1))[-1].code in (0, -15)  # type: ignore[union-attr]


@contextlib.contextmanager
def suspended(engine: Engine) -> Iterator[None]:
    """Suspends the engine's process, where it has one of its own."""
    if not isinstance(engine, RemoteEngine):
        yield
        return
    os.kill(server_of(engine), signal.SIGSTOP)
    wait_for(lambda: read_state(server_of(engine)) == "T")  # else it may still take what comes next
    yield
    os.kill(server_of(engine), signal.SIGCONT)


def test_those_that_a_signal_ended_come_first(engine: Engine, python: Program, job: JobPaths) -> None:
    wait = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    pids = [engine.launch(W0, python(wait + "raise SystemExit(1)"))]
    pids.append(engine.launch(W1, python(wait + "os.kill(os.getpid(), 9)")))
    # The engine sees both ends at once.
    with suspended(engine):
        (job.code / "go").touch()
        wait_for(lambda: all(map(is_gone, pids)))
    ends = [h for h in collect(engine, ended(2)) if isinstance(h, Ended)]
    assert ends == [Ended(W1.task, -9), Ended(W0.task, 1)]


def test_what_cannot_be_launched_is_an_error(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="worker:0"):
        engine.launch(W0, Command((str(tmp_path / "nothing"),), {}))
    assert engine.wait(0.0) == []


def test_a_dump_reaches_the_task_alone(engine: Engine, task: Program) -> None:
    engine.launch(W0, task("import time\nprint('up', flush=True)\nwhile True: time.sleep(0.01)"))
    collect(engine, lambda happened: b"up" in printed(happened, W0))
    engine.signal(W0.task, "dump")
    collect(engine, lambda happened: b"train.py" in printed(happened, W0))
    engine.signal(W0.task, "kill")
    assert collect(engine, ended(1))[-1] == Ended(W0.task, -9)


def test_a_standby_becomes_the_task(engine: Engine, task: Program) -> None:
    command = task("import os\nprint(os.getpid(), os.environ['INSITU_TASK'])")
    engine.keep_standby(1, command)
    (standby,) = wait_until_found(lambda: processes_with("--standby"))
    assert engine.launch(W0, command) == standby
    assert printed(collect(engine, ended(1)), W0).split() == [str(standby).encode(), b"worker:0"]
    assert processes_with("--standby") == set()


def test_a_standby_ends_with_the_engine(engine: Engine, task: Program) -> None:
    engine.keep_standby(1, task("pass"))
    (standby,) = wait_until_found(lambda: processes_with("--standby"))
    engine.close()
    assert is_gone(standby)


def processes_with(argument: str) -> set[int]:
    """Descendants of this process that were started with `argument`."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            if argument.encode() in arguments and not is_gone(int(entry.name)) and is_mine(int(entry.name)):
                found.add(int(entry.name))
    return found


def is_mine(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def wait_until_found(look: Callable[[], set[int]]) -> set[int]:
    found: list[set[int]] = []
    wait_for(lambda: bool(found.append(look()) or found[-1]))  # type: ignore[func-returns-value]
    return found[-1]


def test_what_tasks_write_about_themselves_is_seen(engine: Engine, job: JobPaths) -> None:
    tasks = [W0.task, W1.task]
    engine.clear_records(tasks)
    assert engine.read_progress(tasks) == {} and engine.read_failure(W0.task) is None
    writer = ProgressWriter(job.progress(W0.task))
    writer.elastic, writer.generation = True, 3
    writer.write(1, 2, 30, "exchange")
    (record,) = engine.read_progress(tasks).values()
    assert record == Progress(1, 2, 30, record.at, "exchange", True, 3)
    assert engine.read_progress([W1.task]) == {}
    job.failure(W1.task).write_text('{"type": "KeyError", "message": "x", "fingerprint": "f"}')
    assert engine.read_failure(W1.task) == Failure("KeyError", "x", "f")
    engine.clear_records(tasks)
    assert engine.read_progress(tasks) == {} and engine.read_failure(W1.task) is None
    writer.close()


def test_the_roster_reaches_the_tasks(engine: Engine, job: JobPaths) -> None:
    for generation in (1, 2):
        roster = Roster(generation, (Member(W0.task, 1, "127.0.0.1:1", (0, 1)),))
        engine.publish_roster(roster)
        assert read_roster(job.roster) == roster


def test_a_roster_that_cannot_be_written_is_an_error(engine: Engine, job: JobPaths) -> None:
    job.roster.mkdir()
    with pytest.raises(ClusterError):
        engine.publish_roster(Roster(1, ()))


def test_the_state_of_processes_and_nodes_is_seen(engine: Engine, python: Program, job: JobPaths) -> None:
    pid = engine.launch(W0, python("print('up'); import time; time.sleep(600)"))
    collect(engine, lambda happened: b"up" in printed(happened, W0))
    state = engine.process_states([W0.task, W1.task])[W0.task]
    assert not state.suspended and state.resident_bytes > 1 << 20
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: engine.process_states([W0.task])[W0.task].suspended)
    engine.signal(W0.task, "kill")
    collect(engine, ended(1))
    assert engine.process_states([W0.task, W1.task]) == {}
    home = Paths(job.root.parent.parent)
    assert engine.node_states([W0.node])[W0.node].has_store
    home.node("node-1").mkdir(parents=True)
    states = engine.node_states([W0.node, NodeId("node-1")])
    assert not states[W0.node].has_store and states[NodeId("node-1")].has_store
    assert states[W0.node].available_bytes > 1 << 20


@pytest.mark.parametrize("kind", ENGINES)
def test_closing_leaves_nothing(kind: str, python: Program, job: JobPaths) -> None:
    before = list_descriptors()
    engine = ENGINES[kind](job)
    engine.reserve([W0, W1])
    pid = engine.launch(W0, python("import time; time.sleep(600)"))
    engine.close()
    assert is_gone(pid)
    assert find_new_descriptors(before, "socket:", "pipe:", "anon_inode:", str(job.root)) == []


@pytest.mark.parametrize("kind", ENGINES)
def test_a_descriptor_wakes_the_one_who_waits(kind: str, job: JobPaths) -> None:
    reader, writer = os.pipe()
    engine = ENGINES[kind](job, reader)  # type: ignore[call-arg]
    os.write(writer, b"x")
    assert engine.wait(PATIENCE) == []
    engine.close()
    os.close(reader)
    os.close(writer)


# What only an engine in another process must do.


@pytest.fixture
def remote(job: JobPaths) -> Iterator[RemoteEngine]:
    made = start_engine_server(job)
    yield made
    made.close()


def server_of(engine: RemoteEngine) -> int:
    assert engine._process is not None
    return engine._process.pid


def test_tasks_end_with_the_server(remote: RemoteEngine, task: Program) -> None:
    pid = remote.launch(W0, task("print('up', flush=True)\nimport time\ntime.sleep(600)"))
    collect(remote, lambda happened: b"up" in printed(happened, W0))
    os.kill(server_of(remote), signal.SIGKILL)
    assert collect(remote, ended(1))[-1] == Ended(W0.task, -9)
    wait_for(lambda: is_gone(pid))
    assert remote.read_progress([W0.task]) == {} and remote.process_states([W0.task]) == {}
    assert remote.read_failure(W0.task) is None and remote.node_states([W0.node]) == {}
    remote.signal(W0.task, "kill")
    for call in (lambda: remote.reserve([W0]), lambda: remote.launch(W0, task("pass"))):
        with pytest.raises(ClusterError, match="server"):
            call()
    assert remote.wait(0.0) == []


def test_the_server_and_its_tasks_end_with_the_connection(remote: RemoteEngine, python: Program) -> None:
    pid = remote.launch(W0, python("import time; time.sleep(600)"))
    remote._channel._socket.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: is_gone(pid) and is_gone(server_of(remote)))


def test_orphans_of_tasks_end_with_the_server(remote: RemoteEngine, python: Program) -> None:
    """A child in a session of its own outlives its task, and nothing else."""
    remote.launch(
        W0,
        python(
            "import subprocess, sys\n"
            "for _ in range(2):\n"
            "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],\n"
            "                             stdout=-3, stderr=-3, start_new_session=True)\n"
            "    print(child.pid)"
        ),
    )
    first, orphan = map(int, printed(collect(remote, ended(1)), W0).split())
    os.kill(first, signal.SIGKILL)
    # No zombie is left of it: a job may have many.
    wait_for(lambda: not os.path.exists(f"/proc/{first}"))
    assert not is_gone(orphan)
    remote.close()
    assert is_gone(orphan)


def test_a_server_that_does_not_reply_counts_as_lost(
    remote: RemoteEngine, task: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = remote.launch(W0, task("import time; print('up', flush=True); time.sleep(600)"))
    collect(remote, lambda happened: b"up" in printed(happened, W0))
    monkeypatch.setattr(remote, "reply_timeout", 0.2)
    os.kill(server_of(remote), signal.SIGSTOP)
    wait_for(lambda: read_state(server_of(remote)) == "T")
    with pytest.raises(ClusterError, match="server"):
        remote.reserve([W1])
    assert remote.wait(0.0) == [Ended(W0.task, -9)]
    wait_for(lambda: is_gone(pid))
