"""`insitu doctor`: what it prints, and that nothing it looks at holds it up."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from command_line import CliRunner

from insitu.base.config import BACKENDS
from insitu.base.errors import TrainingError
from insitu.cli import devices, doctor
from insitu.service import Finding

CPU = {"name": "cpu:0"}


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Backends that answer at once, in an empty home."""
    monkeypatch.setenv("INSITU_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setattr("insitu.train.backends.active_name", lambda: "jax")
    monkeypatch.setattr(devices, "ask", lambda name, seconds: [CPU])
    return monkeypatch


def test_a_machine_that_can_train_has_a_line_for_each_check(quick: pytest.MonkeyPatch) -> None:
    done = CliRunner().run(["doctor"])
    assert done.exit_code == 0, done.stdout
    checks = [
        line.split(maxsplit=1)[1].partition(":")[0] for line in done.stdout.splitlines() if "->" not in line
    ]
    assert {"python", "compiled code", "shared memory", "home", "disk", "ports", "cluster", *BACKENDS} <= set(
        checks
    )
    assert "jax" in checks and checks[-1] == "gpus"


def test_a_backend_that_does_not_start_ends_with_one_and_its_remedy(quick: pytest.MonkeyPatch) -> None:
    def fail(name: str, seconds: float) -> list[object]:
        raise TrainingError(f"{name} does not start: no driver")

    quick.setattr(devices, "ask", fail)
    done = CliRunner().run(["doctor", "--json"])
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["ok"] is False
    (jax,) = [each for each in report["checks"] if each["check"] == "jax"]
    assert jax["level"] == "problem" and "no driver" in jax["text"]
    assert jax["remedy"] == "pip install 'insitu[jax]'"


def test_a_home_that_cannot_be_written_is_a_problem(quick: pytest.MonkeyPatch) -> None:
    quick.setenv("INSITU_HOME", "/proc/none")
    done = CliRunner().run(["doctor"])
    assert done.exit_code == 1 and "export INSITU_HOME=" in done.stdout


def test_a_check_that_never_returns_is_a_problem_and_the_others_are_there(quick: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def hang() -> list[Finding]:
        ended.wait(60.0)
        return []

    quick.setattr(doctor, "_check_ports", hang)
    quick.setattr(doctor, "_MOST_SECONDS", 2.0)
    done = CliRunner().run(["doctor"])
    ended.set()
    assert done.exit_code == 1
    assert "ports: the check didn't end within 2 s" in done.stdout and "gpus:" in done.stdout


def test_a_check_that_fails_is_a_problem_and_the_others_are_there(quick: pytest.MonkeyPatch) -> None:
    def fail() -> list[Finding]:
        raise ImportError("libfoo.so")

    quick.setattr(doctor, "_check_limits", fail)
    done = CliRunner().run(["doctor"])
    assert done.exit_code == 1
    assert "limits: the check failed by ImportError: libfoo.so" in done.stdout and "gpus:" in done.stdout
