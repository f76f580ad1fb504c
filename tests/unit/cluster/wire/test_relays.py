"""Commands that the head runs for callers."""

from __future__ import annotations

import itertools
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from insitu.base.errors import ClusterError
from insitu.base.paths import Paths
from insitu.cluster.wire import relays
from insitu.cluster.wire.relays import PART_BYTES, Relay, Relays, make_input, make_request, parse_output

PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
print(os.environ["COLUMNS"], os.environ["INSITU_HOME"], os.environ.get("INSITU_CLUSTER"), sys.argv[1:])
print("a word", file=sys.stderr)
if "waits" in sys.argv:
    sys.stdout.flush()
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        sys.exit(130)
if "much" in sys.argv:
    sys.stdout.write("x" * 300_000)
if "reads" in sys.argv:
    print(len(sys.stdin.buffer.read()))
sys.exit(3)
"""
Start = Callable[..., Relay]


@pytest.fixture
def start(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a relay whose insitu is the program above."""
    (tmp_path / "fake" / "insitu").mkdir(parents=True)
    (tmp_path / "fake" / "insitu" / "__init__.py").touch()
    (tmp_path / "fake" / "insitu" / "__main__.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("INSITU_CLUSTER", "10.0.0.1:1")
    made: list[Relay] = []

    def make(*arguments: str, terminals: tuple[str, ...] = ()) -> Relay:
        made.append(Relay(Paths(home), make_request(arguments, 77, terminals)))
        return made[-1]

    yield make
    for relay in made:
        relay.close()


def wait(relay: Relay) -> list[dict[str, Any]]:
    """Return what a relay says next."""
    poll = select.poll()
    for descriptor, events in relay.list_descriptors(0).items():
        poll.register(descriptor, events)
    assert poll.poll(60_000)
    return relay.advance()


def read_all(
    relay: Relay,
    until: Callable[[dict[str, bytes]], bool] = lambda said: False,
    given: Iterable[bytes] = (),
) -> Any:
    """Return what the command says by stream, and its exit code. It reads what is `given`."""
    said = {"out": b"", "err": b""}
    deadline, parts = time.monotonic() + 60, iter(given)
    while not until(said):
        assert time.monotonic() < deadline
        for message in wait(relay):
            if message["do"] == "ended":
                return said, message["code"]
            if message["do"] == "more":
                for part in itertools.islice(parts, 1):
                    relay.take_input(make_input(part))
            else:
                stream, data = parse_output(message)
                said[stream] += data
    return said, None


def test_a_command_runs_in_the_home_of_the_head(start: Start, home: Path) -> None:
    said, code = read_all(start("describe", "x"))
    words = "['--for-caller=none', 'describe', 'x']"
    assert said == {"out": f"77 {home} None {words}\n".encode(), "err": b"a word\n"} and code == 3
    assert b"'--for-caller=out,err', 'ps'" in read_all(start("ps", terminals=("out", "err")))[0]["out"]


def test_nothing_of_much_output_is_lost(start: Start) -> None:
    relay = start("logs", "much")
    said, code = read_all(relay)
    assert said["out"].endswith(b"x" * 300_000) and code == 3
    assert relay.list_descriptors(2 << 20) == {}  # a caller that doesn't read isn't sent more


def test_a_command_reads_what_its_caller_sends(start: Start) -> None:
    parts = iter([b"y" * PART_BYTES] * 20 + [b"z", b""])
    said, code = read_all(start("import", "reads"), given=parts)
    assert said["out"].endswith(f"{20 * PART_BYTES + 1}\n".encode()) and code == 3


def test_a_caller_is_asked_for_no_more_than_a_window_while_nothing_is_read(start: Start) -> None:
    relay, asked = start("import", "waits"), 0
    while (more := [each["do"] for each in wait(relay)].count("more")) or not asked:
        asked += more
        for _ in range(more):
            relay.take_input(make_input(b"y" * PART_BYTES))  # of which the pipe takes a quarter
    assert asked == relays._WINDOW
    with pytest.raises(ClusterError, match="what it is asked for"):
        relay.take_input(make_input(b"y"))


def test_a_command_that_ends_without_reading_ends_for_its_caller(start: Start) -> None:
    parts = iter([b"y" * PART_BYTES] * 100)
    assert read_all(start("import", "x"), given=parts)[1] == 3
    assert next(parts, b"") != b""  # the rest wasn't sent


@pytest.mark.parametrize("data", [None, 1, "?", "a"])
def test_input_that_is_none_is_refused(start: Start, data: Any) -> None:
    relay = start("import", "waits")
    relay.advance()
    with pytest.raises(ClusterError, match="base64"):
        relay.take_input({"do": "input", "data": data})


def test_a_command_is_interrupted_as_by_its_terminal(start: Start) -> None:
    relay = start("logs", "waits")
    read_all(relay, lambda said: b"logs" in said["out"])
    relay.interrupt()
    assert read_all(relay)[1] == 130


def test_a_caller_that_ends_ends_the_command(start: Start) -> None:
    relay = start("logs", "waits")
    read_all(relay, lambda said: b"logs" in said["out"])
    handle = os.pidfd_open(relay._process.pid)
    assert not select.select([handle], [], [], 0)[0]
    relay.close()
    assert select.select([handle], [], [], 60)[0]
    os.close(handle)
    assert relay._process.returncode == -9
    relay.close = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["--help"], ["up"], ["agent"], ["serve"], ["export", "x", "y"], "nodes", [1], None),
        *(["nodes", "a\0b"], ["--for-caller", "ps"], ["fs", "ls"]),
        ["chaos", "--report", "/home/victim/.bashrc", "-", "/home/victim/.ssh", "id"],
    ],
)
def test_what_is_not_relayed_is_refused(home: Path, arguments: Any) -> None:
    with pytest.raises(ClusterError, match="Received"):
        Relay(Paths(home), {"arguments": arguments, "columns": 80, "terminals": []})
    for wrong in ({"columns": -1}, {"terminals": ["in"]}):
        with pytest.raises(ClusterError, match=next(iter(wrong))):
            Relay(Paths(home), {"arguments": ["nodes"], "columns": 80, "terminals": [], **wrong})


def test_a_caller_has_one_command_and_all_have_a_number(
    start: Start, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "MAX_RELAYS", 2)
    running = Relays(Paths(home))
    request = make_request(["down", "waits"], 80, [])
    running.handle(1, request)
    assert running.is_running("down") and not running.is_running("ps")
    running.handle(2, request)
    for number in (1, 3):
        with pytest.raises(ClusterError, match="2 commands at a time"):
            running.handle(number, request)
    running.handle(3, make_input(b"late"))  # of a command that has ended
    running.close()
    assert not running.is_running("down")


@pytest.mark.parametrize("message", [{}, {"stream": "in", "data": ""}, {"stream": "out", "data": "?"}])
def test_output_that_is_none_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ClusterError):
        parse_output(message)
