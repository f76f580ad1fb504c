"""Commands for the head that are given elsewhere. tests/process/test_remote_commands.py has a head."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CliRunner

from insitu.base.disk.access import make_folder
from insitu.base.errors import ClusterError, InputError, JobSpecError, SourceError, UnknownCache
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cli.remote import Head, pack
from insitu.cluster import PART_BYTES, RELAYED
from insitu.cluster.wire.records import AgentRecord, write_agent, write_token
from insitu.grid.sources import UrlFile

runner = CliRunner()
AT = "10.0.0.1:7070"


def refuse(*arguments: str, **environment: str) -> str:
    """The error of a command that can't be used."""
    result = runner.run(arguments, env=environment)
    assert isinstance(result.exception, InputError | ClusterError), result.output
    return str(result.exception)


class Asked:
    """What the head at AT was asked to run: the arguments, and what the command reads."""

    def __init__(self) -> None:
        self.arguments: list[str] = []
        self.variables: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}

    def run(self, head: Head, arguments: Sequence[str], given: Iterator[bytes]) -> int:
        assert head.address == AT
        self.arguments = list(arguments)
        stream = io.BytesIO(b"".join(given))
        said = json.loads(stream.readline())
        self.variables = said["variables"]
        self.files = {name: stream.read(size) for name, size in said["files"]}
        assert stream.read() == b""
        return 7


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found = Asked()
    monkeypatch.setattr(Head, "run", lambda *given: found.run(*given))
    return found


def give(*arguments: str, **environment: str) -> int:
    """Give a command for the head at AT. Raises what it raises."""
    result = runner.run(["--cluster", AT, *arguments], env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code


@pytest.mark.parametrize("command", [("up",), ("ui",), ("export", "x", "y"), ("fetch", "x"), ("serve", "x")])
def test_what_serves_or_writes_where_it_runs_is_refused(command: tuple[str, ...], home: Path) -> None:
    said = refuse("--cluster", AT, *command)
    assert f"Received: {command[0]} with --cluster {AT}" in said and "leave --cluster out" in said
    said = refuse(*command, INSITU_CLUSTER=AT)
    assert f"Received: {command[0]} with INSITU_CLUSTER {AT}" in said and "unset INSITU_CLUSTER" in said
    assert not home.exists()


def test_the_token_must_be_there_and_belong_to_its_owner(tmp_path: Path) -> None:
    token = tmp_path / "token"
    said = refuse("--cluster", AT, "nodes", INSITU_TOKEN_FILE=str(token))
    assert f"The cluster's token must be in {token}" in said
    token.write_text("x" * 32)
    token.chmod(0o644)
    assert "Only its owner may read" in refuse("--cluster", AT, "nodes", INSITU_TOKEN_FILE=str(token))
    token.chmod(0o600)
    assert "host:port" in refuse("--cluster", "nowhere", "nodes", INSITU_TOKEN_FILE=str(token)).lower()
    assert "must be reachable" in refuse("--cluster", "127.0.0.1:9", "caches", INSITU_TOKEN_FILE=str(token))


def test_help_and_what_is_about_this_machine_need_no_cluster() -> None:
    environment = {"INSITU_CLUSTER": AT}
    for arguments in (("import", "--help"), ("--version",), ("--help",), ("ps", "--version"), ("examples",)):
        assert runner.run(arguments, env=environment).exit_code == 0
    said = refuse("agent", **environment)
    assert "An agent needs a head to join" in said


@pytest.mark.parametrize("name", RELAYED)
def test_what_is_relayed_are_commands_whose_options_are_checked_here(name: str, asked: Asked) -> None:
    shown = runner.run([name, "--help"])
    assert shown.exit_code == 0
    assert give(name, "--nothing-like-that") == 2 and not asked.arguments


@pytest.mark.parametrize(
    "command",
    [("logs", "a-1", "worker:0", "-f", "--attempt=2"), ("ps", "-a", "--json"), ("down", "--force")],
)
def test_a_command_is_passed_on_as_it_was_given(command: tuple[str, ...], asked: Asked) -> None:
    assert give(*command) == 7
    assert asked.arguments == list(command) and not asked.variables and not asked.files


def test_of_a_shell_only_what_is_named_leaves_this_machine(asked: Asked) -> None:
    assert give("resume", "x", "--env", "A_TOKEN", "--env=B_TOKEN", A_TOKEN="geheim", C_TOKEN="mine") == 7
    assert asked.variables == {"A_TOKEN": "geheim", "B_TOKEN": None}
    assert asked.arguments == ["resume", "x", "--env", "A_TOKEN", "--env=B_TOKEN"]


@pytest.mark.parametrize(
    "command",
    [
        ("describe", "--config", "/etc/passwd", "CACHE"),
        ("describe", "-c/etc/passwd", "CACHE"),
        ("repair", "--metadata", "etcd", "--hosts", "hosts.txt"),
        ("top", "--metrics-port", "9100"),
    ],
)
def test_files_and_ports_are_not_those_of_the_head(command: tuple[str, ...], asked: Asked) -> None:
    with pytest.raises(InputError, match=f"for the machine on which {command[0]} runs"):
        give(*command)
    assert not asked.arguments


# Import


def test_files_of_this_machine_are_sent_with_their_paths(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b", "a", ".hidden"):
        np.save(tmp_path / f"{name}.npy", np.arange(3))
    monkeypatch.chdir(tmp_path)
    assert give("import", "digits", "*.npy", "--backups", "1", "--label-from-filename") == 7
    assert asked.arguments == ["import", "--backups", "1", "--label-from-filename", "--", "digits", "2 files"]
    files = [tmp_path / "a.npy", tmp_path / "b.npy"]
    assert asked.files == {str(file): file.read_bytes() for file in files}
    assert not asked.variables


@pytest.mark.parametrize(
    ("sources", "options"),
    [
        (("s3://bucket/*.npy", "s3://other/x.npy"), ()),
        (("ignite://grid-1/DIGITS",), ("--fill", "a=1")),
        (("/data/x.npy",), ("--read-on", "nodes", "--resume")),
        (("/data/images",), ("--reader", "images")),
    ],
)
def test_what_nodes_read_is_only_named(
    sources: tuple[str, ...], options: tuple[str, ...], asked: Asked
) -> None:
    assert give("import", *options, "digits", *sources) == 7
    assert asked.arguments[-len(sources) - 2 :] == ["--", "digits", *sources] and not asked.files


def test_a_configuration_of_ignite_is_read_on_this_machine(asked: Asked, tmp_path: Path) -> None:
    config = tmp_path / "client.xml"
    config.write_text(
        '<beans><bean class="org.apache.ignite.configuration.ClientConfiguration">'
        '<property name="addresses"><list><value>10.0.0.5:10800</value></list></property></bean></beans>'
    )
    assert give("import", "--config", str(config), "digits", "DIGITS") == 7
    assert asked.arguments == ["import", "--", "digits", "ignite://10.0.0.5:10800/DIGITS"]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("digits", "nothing.npy"), SourceError, "nothing.npy doesn't exist"),
        (("digits", "broken.npy"), SourceError, "broken.npy"),
        (("digits", "x.npy", "--format", "odd"), InputError, "--format"),
        (("digits", "x.npy", "--render", "28"), InputError, "--render makes images"),
        (("digits", "x.npy", "https://h/x.npy"), SourceError, "paths or URLs. Received: both"),
        (("digits", "x.npy", "--resume"), InputError, "--resume is for sources that nodes read"),
        (("digits", "x.npy", "--partitions", "0"), InputError, "--partitions must be at least 1"),
    ],
)
def test_what_can_not_be_imported_is_refused_before_anything_is_sent(
    arguments: tuple[str, ...],
    error: type[InputError],
    words: str,
    asked: Asked,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.arange(3))
    Path("broken.npy").write_bytes(b"\x93NUMPY")
    monkeypatch.setattr("insitu.grid.sources.expand_url", lambda source: ([UrlFile(source)], False))
    with pytest.raises(error, match=words):
        give("import", *arguments)
    assert not asked.arguments


# Start


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "my job"
    (folder / "tools").mkdir(parents=True)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").touch()
    (folder / "train.py").write_text("print(1)")
    (folder / "tools" / "run.sh").write_text("true")
    return folder


def test_a_folder_is_sent_as_a_zip_without_what_is_left_out(asked: Asked, job_dir: Path) -> None:
    options = ("--workers", "2", "--env", "A_KEY", "--env", "B_KEY", "--no-prefix")
    command = ("train.py", "--seed", "9", "-h", "--", "x")
    environment = {"A_KEY": "1", "C_KEY": "2", "INSITU_MEMORY_LIMIT": "512", "KERAS_BACKEND": "jax"}
    assert give("start", *options, "digits", str(job_dir), *command, **environment) == 7
    assert asked.arguments == ["start", *options, "--", "digits", "my job.zip", *command]
    assert asked.variables == {
        "A_KEY": "1",
        "B_KEY": None,
        "KERAS_BACKEND": "jax",
        "INSITU_MEMORY_LIMIT": "512",
    }
    ((name, data),) = asked.files.items()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert name == "/my job.zip"
        assert sorted(archive.namelist()) == ["tools/", "tools/run.sh", "train.py"]


def test_a_zip_is_sent_as_it_is(asked: Asked, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "sums.zip", "w") as archive:
        archive.writestr("train.py", "print(1)")
    command = ("train.py", "--out", "insitu://runs/7")
    assert give("start", "--detach", "-", str(tmp_path / "sums.zip"), *command) == 7
    assert asked.arguments == ["start", "--detach", "--", "-", "sums.zip", *command]
    assert asked.files == {"/sums.zip": (tmp_path / "sums.zip").read_bytes()}


@pytest.mark.parametrize(
    ("folder", "words"),
    [("/missing", "doesn't exist"), ("/", "can't be the root"), ("broken.zip", "isn't a .zip")],
)
def test_a_folder_that_can_not_be_used_is_refused_before_anything_is_sent(
    folder: str, words: str, asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.zip").write_text("x")
    with pytest.raises(JobSpecError, match=words):
        give("start", "digits", folder, "train.py")
    with pytest.raises(JobSpecError, match="--workers must be at least 1"):
        give("start", "--workers", "0", "digits", ".", "train.py")
    assert not asked.arguments


def test_what_is_sent_comes_in_whole_parts(tmp_path: Path) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(b"x" * (2 * PART_BYTES))
    small.write_bytes(b"y")
    *parts, last = pack({"A": None}, [("/l", large), *[("/s", small)] * 3])
    assert {len(part) for part in parts} == {PART_BYTES} and 0 < len(last) < PART_BYTES
    head = b'{"variables": {"A": null}, "files": [["/l", %d], ["/s", 1], ["/s", 1], ["/s", 1]]}\n'
    assert b"".join([*parts, last]) == head % (2 * PART_BYTES) + b"x" * (2 * PART_BYTES) + b"yyy"


def test_a_file_that_changes_or_is_not_there_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x"
    with pytest.raises(InputError, match=r"must be readable\. Received: .*/x"):
        list(pack({}, [("/x", file)]))
    file.write_bytes(b"x" * (2 * PART_BYTES))
    sending = pack({}, [("/x", file)])
    next(sending)
    file.write_bytes(b"x")
    with pytest.raises(InputError, match="must not change while it is sent"):
        list(sending)


# The host of an agent


@pytest.fixture
def agent_home(home: Path) -> Paths:
    paths = Paths(home)
    make_folder(home, paths.node("a"))
    write_agent(paths, NodeId("a"), AgentRecord("c", "127.0.0.1:9", 1, "i", "host", 1, 1))
    write_token(paths, "x" * 32)
    return paths


def test_on_the_host_of_an_agent_the_head_runs_jobs_and_imports(agent_home: Paths, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    np.save(tmp_path / "x.npy", np.arange(3))
    commands = [("ps",), ("logs", "x"), ("describe", "x"), ("stop", "x"), ("delete", "x")]
    sends = [("import", "x", str(tmp_path / "x.npy")), ("start", "x", str(tmp_path), "train.py")]
    for command in (*commands, *sends):
        assert "Received: 127.0.0.1:9" in refuse(*command), command
    for command in (("caches",), ("--help",)):
        assert runner.run(command).exit_code == 0
    local = runner.run(["start", "--engine", "local", "x", str(tmp_path), "train.py"])
    assert isinstance(local.exception, UnknownCache)  # of this machine
    # Tasks of the head's jobs have folders here, too. A job that was started here has a journal.
    agent_home.job("t-1").root.mkdir(parents=True)
    assert "Received: 127.0.0.1:9" in refuse("ps")
    agent_home.job("t-1").journal.touch()
    result = runner.run(["ps", "--all"])
    assert "127.0.0.1:9" not in str(result.exception)


def test_a_configuration_of_ignite_on_the_host_of_an_agent_is_read_there(
    agent_home: Paths, tmp_path: Path
) -> None:
    """The head would look for the file on its own machine."""
    said = refuse("describe", "--config", str(tmp_path / "client.xml"), "DIGITS")
    assert "client.xml" in said and "127.0.0.1:9" not in said
