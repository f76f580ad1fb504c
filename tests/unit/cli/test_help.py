"""What `--help` shows."""

from __future__ import annotations

import re
from typing import Any

import pytest
from command_line import CliRunner, make_command

COMMANDS = [
    "agent",
    "attach",
    "caches",
    "chaos",
    "describe",
    "devices",
    "doctor",
    "drain",
    "fetch",
    "import",
    "init",
    "logs",
    "nodes",
    "ps",
    "quota",
    "rebalance",
    "repair",
    "resume",
    "scale",
    "scrub",
    "start",
    "stop",
    "ui",
    "up",
]


def help_of(command: str) -> str:
    shown = CliRunner().run([command, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    return shown.stdout


@pytest.mark.parametrize("command", ["import", "up", "start", "nodes", "repair", "agent", "ui"])
def test_commands_that_store_something_say_where(command: str) -> None:
    assert "the folder $INSITU_HOME, by default ~/.insitu." in " ".join(help_of(command).split())


@pytest.mark.parametrize("command", COMMANDS)
def test_each_example_can_be_copied_from_a_line_of_its_own(command: str) -> None:
    shown = help_of(command)
    examples = [line.strip() for line in shown.splitlines() if re.search(rf"insitu {command}\b", line)][1:]
    assert examples, "the first is the usage"
    for example in examples:
        assert example.removeprefix("Example: ").rfind("insitu ") == 0, example


def test_the_list_of_commands_has_headings_and_begins_each_line_with_an_imperative() -> None:
    group: Any = make_command()
    for name, command in group.commands.items():
        assert command.rich_help_panel in ("Data", "Jobs", "Nodes", "More"), name
        first = command.help.split()[0]
        assert first[0].isupper() and not first.endswith("s"), (name, command.help)
