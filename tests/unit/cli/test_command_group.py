"""Mistyped commands, and those without what they need."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CliRunner, run

from insitu import __version__
from insitu.base.errors import InputError


@pytest.mark.parametrize("command", [("start",), ("ps",), ("up",), ("fs",), ("fs", "ls")])
def test_each_command_has_the_short_options_of_help_and_version(command: tuple[str, ...]) -> None:
    assert "Usage" in CliRunner().run([*command, "-h"]).output
    for option in ("-V", "--version"):
        shown = CliRunner().run([*command, option])
        assert (shown.exit_code, shown.output) == (0, f"insitu {__version__}\n")


def test_options_of_start_that_follow_the_script_are_pointed_out(tmp_path: Path) -> None:
    arguments = [
        "start",
        "--workers",
        "1",
        "cats",
        str(tmp_path),
        "train.py",
        "--workers",
        "2",
        "--seed=3",
        "-e",
    ]
    shown = CliRunner().run(arguments, env={"INSITU_HOME": str(tmp_path / "home")})
    assert "command: --workers, --seed=3 go to the script" in shown.stderr
    shown = CliRunner().run([*arguments[:6], "-e"], env={"INSITU_HOME": str(tmp_path / "home")})
    assert "to the script" not in shown.stderr


def test_a_command_is_suggested_once() -> None:
    result = CliRunner().run(["scael"])
    assert result.exit_code == 2
    assert result.output.count("Did you mean") == 1 and "'scale'" in result.output


@pytest.mark.parametrize(
    ("given", "missing", "example"),
    [
        ((), "CACHE, JOB_DIR, JOB_CMD", "insitu start digits/train ./my_job train.py"),
        (("--workers", "2", "cats"), "JOB_DIR, JOB_CMD", "insitu start cats ./my_job train.py"),
        (("cats", "job"), "JOB_CMD", "insitu start cats job train.py"),
        (("folder", "fit.py"), "CACHE", "insitu start digits/train folder fit.py"),
        (("job.zip", "fit.py"), "CACHE", "insitu start digits/train job.zip fit.py"),
        (("cats", "fit.py"), "JOB_DIR", "insitu start cats ./my_job fit.py"),
        (("cats", "a/fit.py"), "JOB_DIR, JOB_CMD", "insitu start cats ./a fit.py"),
        (("folder",), "CACHE, JOB_CMD", "insitu start digits/train folder train.py"),
        (("fit.py",), "CACHE, JOB_DIR", "insitu start digits/train ./my_job fit.py"),
    ],
)
def test_a_start_without_its_arguments_says_by_example_what_is_missing(
    given: tuple[str, ...],
    missing: str,
    example: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    result = CliRunner().run(["start", *given], env={"COLUMNS": "400", "NO_COLOR": "1"})
    assert result.exit_code == 2
    shown = " ".join(result.output.split())
    assert f"Received: {' '.join(given) or 'none of them'}. Missing: {missing}. Example: {example}" in shown


def test_commands_of_plugins_are_found_by_name_and_in_the_help() -> None:
    assert "render" in CliRunner().run(["k8s", "--help"]).stdout
    assert "k8s" in CliRunner().run(["--help"]).stdout


def test_other_commands_look_for_no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu.cli.command_group.list_plugins", lambda kind: pytest.fail("looked"))
    assert CliRunner().run(["ps", "--help"]).exit_code == 0


def test_a_command_of_a_plugin_is_not_for_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"`insitu k8s` runs on this machine\. Received: --cluster a:1"):
        run("--cluster", "a:1", "k8s", "render")
    monkeypatch.setenv("INSITU_CLUSTER", "a:1")
    assert "StatefulSet" in run("k8s", "render").stdout
