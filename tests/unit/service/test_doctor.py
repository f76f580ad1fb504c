"""What `insitu doctor` makes of the facts of a machine."""

from __future__ import annotations

from typing import Any

import pytest

from insitu.service import (
    BackendFacts,
    Finding,
    can_train,
    find_allowed,
    judge_backend,
    judge_clock,
    judge_cluster,
    judge_compiled,
    judge_gpus,
    judge_home,
    judge_libraries,
    judge_limits,
    judge_ports,
    judge_python,
    judge_shared_memory,
    report_findings,
)

REQUIREMENTS = ["keras<4,>=3.12", "numpy>=2.0", "jax<0.11,>=0.5; extra == 'jax'"]
CPU, GPU = {"name": "cpu:0"}, {"name": "gpu:0"}


def jax(**changes: Any) -> BackendFacts:
    facts = {"name": "jax", "version": "0.10.2", "allowed": ">=0.5,<0.11", "active": True, "devices": (CPU,)}
    return BackendFacts(**{**facts, **changes})


@pytest.mark.parametrize(
    ("version", "level"), [("3.10.4", "problem"), ("3.11.7", "ok"), ("3.13.1", "ok"), ("3.14.0", "warning")]
)
def test_python_is_judged_by_the_requirement_of_the_package(version: str, level: str) -> None:
    assert judge_python(version, ">=3.11", "python").level == level


def test_libraries_of_other_versions_are_named_with_the_command_that_installs_the_right_ones() -> None:
    assert judge_libraries(REQUIREMENTS, {"keras": "3.15.1", "numpy": "2.4"}).level == "ok"
    found = judge_libraries(REQUIREMENTS, {"keras": "3.5.0"})
    assert found.level == "problem" and "keras 3.5.0, numpy is missing" in found.text
    assert found.remedy == "pip install 'keras<4,>=3.12' 'numpy>=2.0'"


def test_versions_of_a_backend_are_those_of_its_extra() -> None:
    assert find_allowed("jax", REQUIREMENTS) == "<0.11,>=0.5"
    assert find_allowed("torch", REQUIREMENTS) == ""


@pytest.mark.parametrize(
    ("facts", "level", "named"),
    [
        (jax(), "ok", "cpu:0"),
        (jax(version="0.4.1"), "problem", "insitu allows jax >=0.5,<0.11"),
        (jax(version="0.4.1", active=False), "warning", "this is 0.4.1"),
        (jax(failure="no libcuda"), "problem", "no libcuda"),
        (jax(failure="no libcuda", active=False), "warning", "no libcuda"),
        (jax(version="", active=False), "ok", "isn't installed"),
    ],
)
def test_a_backend_that_keras_uses_prevents_training_and_another_does_not(
    facts: BackendFacts, level: str, named: str
) -> None:
    found = judge_backend(facts, ())
    assert found.level == level and named in found.text
    assert bool(found.remedy) == (level != "ok")


def test_a_backend_that_is_missing_has_one_that_is_there_in_its_remedy() -> None:
    found = judge_backend(jax(version=""), ["torch"])
    assert found.level == "problem" and found.remedy.startswith("export KERAS_BACKEND=torch")
    assert judge_backend(jax(version=""), []).remedy == "pip install 'insitu[jax]'"


@pytest.mark.parametrize(
    ("models", "driver", "hidden", "devices", "level", "remedy"),
    [
        ([], "", False, (CPU,), "ok", ""),
        (["H200"], "", False, (GPU,), "ok", ""),
        (["H200"], "", False, (CPU,), "warning", "pip install 'jax[cuda12]'"),
        (["H200"], "", True, (CPU,), "warning", "unset CUDA_VISIBLE_DEVICES"),
        (["H200"], "no answer within 10 s", False, (CPU,), "warning", "sudo nvidia-smi"),
    ],
)
def test_gpus_that_the_backend_does_not_see_are_named(
    models: list[str], driver: str, hidden: bool, devices: Any, level: str, remedy: str
) -> None:
    found = judge_gpus(models, driver, hidden, jax(devices=devices))
    assert found.level == level and found.remedy.startswith(remedy)


def test_shared_memory_is_little_in_a_container_and_the_exchange_needs_none_with_a_name() -> None:
    assert judge_shared_memory(8 << 30, 8 << 30, "").level == "ok"
    assert "--shm-size" in judge_shared_memory(64 << 20, 64 << 20, "").remedy
    assert "ls -lS /dev/shm" in judge_shared_memory(8 << 30, 1 << 20, "").remedy
    assert judge_shared_memory(None, 0, "").level == "warning"
    assert judge_shared_memory(8 << 30, 8 << 30, "not permitted").level == "problem"


def test_a_home_needs_room_and_a_right_to_write() -> None:
    assert [each.level for each in judge_home("/h", 50 << 30, "")] == ["ok", "ok"]
    assert [each.level for each in judge_home("/h", 1 << 30, "")] == ["ok", "warning"]
    assert [each.level for each in judge_home("/h", 1 << 20, "")] == ["ok", "problem"]
    assert [each.level for each in judge_home("/h", 0, "Read-only file system")] == ["problem"]


def test_limits_that_are_low_have_a_command_that_raises_them() -> None:
    assert [each.level for each in judge_limits(20_000, None, None, 65_530, "")] == ["ok"]
    (files,) = judge_limits(512, 20_000, None, 65_530, "")
    assert (files.level, files.remedy) == ("warning", "ulimit -n 4096")
    (files,) = judge_limits(100, 100, None, 65_530, "")
    assert (files.level, files.remedy) == ("problem", "sudo prlimit --pid $$ --nofile=4096")
    low = judge_limits(None, None, 100, 1000, "Files need 16 MiB. Received: 8. Start it so: ulimit -f 16384")
    assert [each.remedy for each in low] == [
        "ulimit -u 8192",
        "sudo sysctl -w vm.max_map_count=262144",
        "ulimit -f 16384",
    ]


def test_what_cannot_be_loaded_or_reached_is_a_problem() -> None:
    found = judge_compiled("insitu needs a library. Received: none. Run `python hatch_build.py`")
    assert (found.level, found.remedy) == ("problem", "Run `python hatch_build.py`")
    assert judge_compiled("").level == "ok"
    assert judge_ports("refused").level == "problem" and judge_ports("").level == "ok"
    assert judge_clock(5.0, 10.0).level == "warning" and judge_clock(10.0, 5.0).level == "ok"


def node(name: str, state: str | None, skew: float | None = 0.0) -> dict[str, Any]:
    return {"node": name, "state": state, "clock_skew": skew}


def test_a_cluster_is_judged_by_its_nodes() -> None:
    assert judge_cluster([node("node-0", None)], "")[0].text == "none, jobs run on this machine"
    assert [each.level for each in judge_cluster([node("a", "alive"), node("b", "left")], "")] == ["ok"]
    lost, clocks = judge_cluster([node("a", "alive", 5.0), node("b", "lost")], "")
    assert "b (lost)" in lost.text and "a by +5.0 s" in clocks.text
    (stale,) = judge_cluster([node("a", "alive")], "The head doesn't run.")
    assert (stale.level, stale.text) == ("warning", "The head doesn't run")


def test_only_a_problem_prevents_training() -> None:
    warned = [Finding("a", "ok", "fine"), Finding("b", "warning", "slow", "mend it")]
    assert can_train(warned)
    assert not can_train([*warned, Finding("c", "problem", "broken")])
    assert report_findings(warned)["checks"][1] == {
        "check": "b",
        "level": "warning",
        "text": "slow",
        "remedy": "mend it",
    }
