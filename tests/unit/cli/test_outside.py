"""Commands that a cluster is asked from outside, by its address. tests/process/test_agents.py has a head."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CliRunner

from insitu.base.disk.access import make_folder
from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster import RELAYED
from insitu.cluster.wire.records import AgentRecord, write_agent, write_token

runner = CliRunner()


def refuse(*arguments: str, **environment: str) -> str:
    """The error of a command that can't be used."""
    result = runner.run(arguments, env=environment)
    assert isinstance(result.exception, InputError | ClusterError), result.output
    return str(result.exception)


@pytest.mark.parametrize(
    "command",
    [("import", "x", "y.npy"), ("up",), ("start", "x", "y", "z"), ("down", "--force"), ("scrub", "x")],
)
def test_commands_that_are_not_asked_from_outside_are_refused(command: tuple[str, ...], home: Path) -> None:
    said = refuse("--cluster", "10.0.0.1:7070", *command)
    assert f"Received: {command[0]} with --cluster 10.0.0.1:7070" in said and "leave --cluster out" in said
    said = refuse(*command, INSITU_CLUSTER="10.0.0.1:7070")
    assert (
        f"Received: {command[0]} with INSITU_CLUSTER 10.0.0.1:7070" in said and "unset INSITU_CLUSTER" in said
    )
    assert not home.exists()


def test_the_token_must_be_there_and_belong_to_its_owner(tmp_path: Path) -> None:
    token = tmp_path / "token"
    said = refuse("--cluster", "10.0.0.1:7070", "nodes", INSITU_TOKEN_FILE=str(token))
    assert f"The cluster's token must be in {token}" in said
    token.write_text("x" * 32)
    token.chmod(0o644)
    assert "Only its owner may read" in refuse(
        "--cluster", "10.0.0.1:7070", "nodes", INSITU_TOKEN_FILE=str(token)
    )
    token.chmod(0o600)
    assert "host:port" in refuse("--cluster", "nowhere", "nodes", INSITU_TOKEN_FILE=str(token)).lower()
    assert "must be reachable" in refuse("--cluster", "127.0.0.1:9", "caches", INSITU_TOKEN_FILE=str(token))


def test_help_and_what_is_about_this_machine_need_no_cluster() -> None:
    environment = {"INSITU_CLUSTER": "10.0.0.1:7070"}
    for arguments in (("import", "--help"), ("--version",), ("--help",)):
        assert runner.run(arguments, env=environment).exit_code == 0
    said = refuse("agent", **environment)
    assert "An agent needs a head to join" in said


def test_on_the_host_of_an_agent_jobs_are_asked_of_the_head(home: Path) -> None:
    paths = Paths(home)
    make_folder(home, paths.node("a"))
    write_agent(paths, NodeId("a"), AgentRecord("c", "127.0.0.1:9", 1, "i", "host", 1, 1))
    write_token(paths, "x" * 32)
    for command in (("ps",), ("logs", "x"), ("describe", "x"), ("stop", "x")):
        assert "Received: 127.0.0.1:9" in refuse(*command), command
    for command in (("caches",), ("--help",)):
        assert runner.run(command).exit_code == 0
    # Tasks of the head's jobs have folders here, too. A job that was started here has a journal.
    paths.job("t-1").root.mkdir(parents=True)
    assert "Received: 127.0.0.1:9" in refuse("ps")
    paths.job("t-1").journal.touch()
    result = runner.run(["ps", "--all"])
    assert "127.0.0.1:9" not in str(result.exception)


@pytest.mark.parametrize("name", RELAYED)
def test_what_is_relayed_are_commands_and_their_options(name: str) -> None:
    shown = runner.run([name, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and all(option in shown.output for option in RELAYED[name])


def test_a_configuration_of_ignite_on_the_host_of_an_agent_is_read_there(home: Path, tmp_path: Path) -> None:
    """The head would look for the file on its own machine."""
    paths = Paths(home)
    make_folder(home, paths.node("a"))
    write_token(paths, "x" * 32)
    write_agent(paths, NodeId("a"), AgentRecord("c", "127.0.0.1:9", 1, "i", "host", 1, 1))
    said = refuse("describe", "--config", str(tmp_path / "client.xml"), "DIGITS")
    assert "client.xml" in said and "127.0.0.1:9" not in said
