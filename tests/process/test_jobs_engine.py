"""What every engine must do. One test for all of them."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from insitu.cluster.engines.engine import Command, Ended, Engine, Output
from insitu.cluster.engines.local import LocalEngine
from insitu.errors import ClusterError
from insitu.spec import NodeId, TaskId, TaskSpec

W0, W1 = (TaskSpec(TaskId("worker", i), NodeId("node-0")) for i in range(2))
ENGINES = {"local": LocalEngine}
PATIENCE = 30.0
Program = Callable[[str], Command]


def is_gone(pid: int) -> bool:
    """Whether the process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made: Engine = ENGINES[request.param]()
    yield made
    made.close()


@pytest.fixture
def python(tmp_path: Path) -> Callable[[str], Command]:
    def command(program: str) -> Command:
        return Command((sys.executable, "-u", "-c", program), {"WORD": "given"}, tmp_path)

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


def test_a_reserved_address_can_be_listened_on_by_its_task(engine: Engine, python: Program) -> None:
    host, _, port = engine.reserve([W0, W1])[W0.task].rpartition(":")
    engine.launch(W0, python(f"import socket; socket.create_server(({host!r}, {port})); print('listens')"))
    assert printed(collect(engine, ended(1)), W0) == b"listens\n"


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
    engine: Engine, python: Program, tmp_path: Path
) -> None:
    child = "import os, time; open('child', 'w').write(str(os.getpid())); print('up'); time.sleep(600)"
    engine.launch(W0, python(f"import subprocess, sys; subprocess.run([sys.executable, '-uc', {child!r}])"))
    collect(engine, lambda happened: b"up" in printed(happened, W0))
    engine.signal(W0.task, "kill")
    assert collect(engine, ended(1))[-1] == Ended(W0.task, -9)
    pid = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + PATIENCE
    while (
        os.path.exists(f"/proc/{pid}")
        and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)
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


def test_those_that_a_signal_ended_come_first(engine: Engine, python: Program) -> None:
    engine.launch(W0, python("import sys; sys.exit(1)"))
    engine.launch(W1, python("import os; os.kill(os.getpid(), 9)"))
    pids = [r.process.pid for r in engine._running.values()]  # type: ignore[attr-defined]
    wait_for(lambda: all(map(is_gone, pids)))
    ends = [h for h in collect(engine, ended(2)) if isinstance(h, Ended)]
    assert ends == [Ended(W1.task, -9), Ended(W0.task, 1)]


def test_what_cannot_be_launched_is_an_error(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="worker:0"):
        engine.launch(W0, Command((str(tmp_path / "nothing"),), {}, tmp_path))
    assert engine.wait(0.0) == []


def test_closing_leaves_nothing(python: Program) -> None:
    before = len(os.listdir("/proc/self/fd"))
    engine = LocalEngine()
    engine.reserve([W0, W1])
    engine.launch(W0, python("import time; time.sleep(600)"))
    pid = engine._running[W0.task].process.pid
    engine.close()
    assert not os.path.exists(f"/proc/{pid}")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_descriptor_wakes_the_one_who_waits() -> None:
    reader, writer = os.pipe()
    engine = LocalEngine(reader)
    os.write(writer, b"x")
    assert engine.wait(PATIENCE) == []
    engine.close()
    os.close(reader)
    os.close(writer)
