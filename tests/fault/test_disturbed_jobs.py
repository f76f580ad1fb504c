"""Tasks are killed or suspended at any event of a training: all that it leaves behind is as without that.

One script with all of Keras' callbacks, and a user's, runs undisturbed and with faults. Its files, histories,
ledger and what its callbacks remember are compared. A job has many faults, one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from agent_hosts import LoopbackHosts
from disturbed_jobs import FOLDER, SUPERVISOR, Fault, bring_up, find_differences, make_cache, outline, run

pytestmark = pytest.mark.timeout(900)

EPOCHS, STEPS, TESTS = 4, 7, 3
CHIEF, OTHER = "worker:0", "worker:1"

Undisturbed = dict[tuple[str, ...], dict[str, Any]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the cache of the script."""
    root = tmp_path_factory.mktemp("disturbed")
    bring_up(root / "home")
    make_cache(root / "home", root)
    return root / "home"


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    """What the script leaves behind without faults, by how it was started."""
    return {}


def check(
    home: Path,
    folder: Path,
    undisturbed: Undisturbed,
    faults: Sequence[Fault],
    *options: str,
    backend: str = "tensorflow",
    script: str = "train.py",
    **variables: str,
) -> None:
    """Fail where a job with `faults` leaves behind something else than one without."""
    variables = {"KERAS_BACKEND": backend, **variables}
    counted = [o for o in options if o not in ("--on-loss", "adopt", "restart", "replace")]
    key = (script, *counted, *(f"{name}={value}" for name, value in sorted(variables.items())))
    if key not in undisturbed:
        undisturbed[key], _ = run(home, folder / "undisturbed", options, variables=variables, script=script)
    found, printed = run(home, folder / "disturbed", options, faults, variables, script=script)
    differences = find_differences(found, undisturbed[key])
    assert not differences, "\n".join([*differences, printed[-4000:]])


def at(
    task: str, event: str, epoch: int | None = None, batch: int | None = None, when: str = "last"
) -> Fault:
    """A fault at one event, before the user's callbacks (when="first") or behind them."""
    where = {"epoch": epoch, "batch": batch}
    return {"task": task, "event": event, "when": when, **{k: v for k, v in where.items() if v is not None}}


def inside(task: str, event: str, **where: int) -> Fault:
    """A fault within something that isn't an event of callbacks."""
    return {"task": task, "event": event, **where}


FEW = [
    at(CHIEF, "epoch_end", 0),
    at(OTHER, "train_batch_end", 1, 2, "first"),
    at(CHIEF, "train_batch_end", 1, 5),
    at(CHIEF, "test_batch_end", 2, 1),
    at(OTHER, "epoch_end", 2),
    at(CHIEF, "epoch_end", EPOCHS - 1, when="first"),
    at(CHIEF, "train_end"),
]
"""Where a chief is alone longest, and one of each kind."""


def make_all(first: str, second: str) -> list[list[Fault]]:
    """Faults at each event, in jobs of several: `first` and `second` take turns, so that over both orders
    each dies before and behind the callbacks of each event."""
    last = EPOCHS - 1
    begin = [at(first, "set_model"), at(second, "train_begin", when="first"), at(first, "train_begin")]
    events: list[tuple[Any, ...]] = [
        ("epoch_begin", 0),
        ("train_batch_begin", 0, 0),
        ("train_batch_end", 0, 0),
        ("train_batch_begin", 0, 3),
        ("train_batch_end", 0, STEPS - 1),
        ("test_begin", 0),
        ("test_batch_begin", 0, 0),
        ("test_batch_end", 0, 1),
        ("test_end", 0),
        ("epoch_end", 0),
        ("epoch_begin", 1),
        ("train_batch_begin", 1, STEPS - 1),
        ("train_batch_end", 1, 3),
        ("test_batch_begin", 1, TESTS - 1),
        ("test_batch_end", 1, TESTS - 1),
        ("epoch_end", 1),
        ("epoch_end", last),
        ("train_end",),
    ]
    jobs = [begin]
    for when in ("first", "last"):
        for part in (events[0::2], events[1::2]):
            jobs.append([at(first if i % 2 else second, *event, when=when) for i, event in enumerate(part)])
    return jobs


WITHIN = [
    inside(CHIEF, "save", epoch=1),
    inside(CHIEF, "checkpoint", epoch=1),
    inside(OTHER, "before_call", epoch=1),
    inside(CHIEF, "after_call", epoch=1),
    inside(OTHER, "predict", batch=1),
]
"""In the middle of what takes long, and between calls."""


def suspended(faults: Sequence[Fault]) -> list[Fault]:
    """The same faults, with tasks that stand still."""
    return [{**fault, "signal": "STOP"} for fault in faults]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["tensorflow", pytest.param("jax", marks=pytest.mark.slow)])
def test_kills_change_nothing(home: Path, undisturbed: Undisturbed, tmp_path: Path, backend: str) -> None:
    check(home, tmp_path, undisturbed, FEW, "--workers", "2", backend=backend)


@pytest.mark.torch
def test_kills_change_nothing_on_torch(home: Path, undisturbed: Undisturbed, tmp_path: Path) -> None:
    check(home, tmp_path, undisturbed, FEW, "--workers", "2", backend="torch")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("tasks", [(CHIEF, OTHER), (OTHER, CHIEF)], ids=["chief", "other"])
def test_each_event(
    home: Path, undisturbed: Undisturbed, tmp_path: Path, tasks: tuple[str, str], number: int, backend: str
) -> None:
    check(home, tmp_path, undisturbed, make_all(*tasks)[number], "--workers", "2", backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_within_saves_checkpoints_and_between_calls(
    home: Path, undisturbed: Undisturbed, tmp_path: Path, backend: str
) -> None:
    check(home, tmp_path, undisturbed, WITHIN, "--workers", "2", backend=backend)


@pytest.mark.slow
def test_all_die_in_a_recovery(home: Path, undisturbed: Undisturbed, tmp_path: Path) -> None:
    faults = [at(OTHER, "epoch_end", 1, when="first"), inside(CHIEF, "recovery")]
    check(home, tmp_path, undisturbed, faults, "--workers", "2")


@pytest.mark.slow
def test_tasks_that_stand_still(home: Path, undisturbed: Undisturbed, tmp_path: Path) -> None:
    faults = suspended([at(CHIEF, "epoch_end", 1), at(OTHER, "train_batch_end", 2, 2)])
    check(home, tmp_path, undisturbed, faults, "--workers", "2", "--stall-timeout", "15")


@pytest.mark.slow
@pytest.mark.parametrize("on_loss", ["adopt", "restart"])
def test_other_policies(home: Path, undisturbed: Undisturbed, tmp_path: Path, on_loss: str) -> None:
    faults = [
        at(CHIEF, "epoch_end", 0),
        at(OTHER, "train_batch_end", 1, 2),
        at(CHIEF, "epoch_end", EPOCHS - 1),
    ]
    check(home, tmp_path, undisturbed, faults, "--workers", "2", "--on-loss", on_loss)


@pytest.mark.slow
def test_standby_processes(home: Path, undisturbed: Undisturbed, tmp_path: Path) -> None:
    check(home, tmp_path, undisturbed, FEW, "--workers", "2", "--standby", "1")


def in_call(call: int, *args: Any, **where: Any) -> Fault:
    """A fault in a call of the script of that number."""
    return {**at(*args, **where), "call": call}


OF_CALLS = [
    in_call(1, CHIEF, "test_begin"),
    in_call(1, OTHER, "test_batch_end", batch=1),
    in_call(1, CHIEF, "test_batch_begin", batch=4, when="first"),
    in_call(1, CHIEF, "test_end"),
    in_call(2, OTHER, "predict_begin"),
    in_call(2, CHIEF, "predict_batch_end", batch=1),
    in_call(2, OTHER, "predict_batch_begin", batch=4, when="first"),
    in_call(2, CHIEF, "predict_end", when="first"),
    in_call(3, OTHER, "test_end"),
    in_call(4, CHIEF, "predict_end"),
    in_call(5, OTHER, "epoch_end"),
]
"""In what a script evaluates and predicts itself, with callbacks, and behind that."""
FEW_OF_CALLS = [
    in_call(1, OTHER, "test_batch_end", batch=1),
    in_call(1, CHIEF, "test_end"),
    in_call(2, CHIEF, "predict_batch_end", batch=1),
    in_call(4, CHIEF, "predict_end"),
]
"""Within and behind calls of both kinds."""


@pytest.mark.long
@pytest.mark.parametrize(
    "faults", [FEW_OF_CALLS, pytest.param(OF_CALLS, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_callbacks_of_evaluate_and_predict(
    home: Path, undisturbed: Undisturbed, tmp_path: Path, faults: list[Fault]
) -> None:
    check(home, tmp_path, undisturbed, faults, "--workers", "2", script="calls.py")


def killing(target: str, faults: Sequence[Fault]) -> list[Fault]:
    """The same faults, which hit other processes of the job; "": all of them, as after a power loss."""
    return [{**fault, "target": target} for fault in faults]


def find_told_wrong(lines: list[str], undisturbed: list[str], faults: int) -> list[str]:
    """Return what is wrong about what a callback was told: lines of an event, and whether it may have been
    heard before."""
    told = [line.rsplit(" ", 1) for line in lines]
    heard = [event for event, repeated in told if repeated == "False"]
    wrong = [f"{event} twice as new" for event in set(heard) if heard.count(event) > 1]
    expected = [line.rsplit(" ", 1)[0] for line in undisturbed]
    all_heard = {event for event, _ in told}
    wrong += [f"{event} never" for event in expected if event not in all_heard]
    # An event in which a process was killed may not have been heard by this callback.
    missing = set(expected) - set(heard)
    return wrong if len(missing) <= faults else [*wrong, f"never as new: {sorted(missing)}"]


@pytest.mark.long
def test_a_callback_is_told_what_restarts_repeat(home: Path, tmp_path: Path) -> None:
    options = ("--workers", "2", "--on-loss", "restart")
    faults = [
        at(OTHER, "train_batch_end", 1, 1),
        *killing("", [at(CHIEF, "test_batch_end", 1, 2, when="first"), at(CHIEF, "epoch_end", 2)]),
        in_call(1, CHIEF, "test_batch_end", batch=1),
    ]
    expected, _ = run(home, tmp_path / "undisturbed", options, script="told.py")
    found, printed = run(home, tmp_path / "disturbed", options, faults, script="told.py")
    lines, undisturbed = found["told"].splitlines(), expected["told"].splitlines()
    assert all(line.endswith("False") for line in undisturbed)
    assert len(lines) > len(undisturbed), "restarts have repeated events"
    assert find_told_wrong(lines, undisturbed, len(faults)) == [], f"{lines}\n{printed[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_all_die_at_once_and_the_job_is_resumed(
    home: Path, undisturbed: Undisturbed, tmp_path: Path, backend: str
) -> None:
    faults = [
        at(CHIEF, "epoch_end", 0),
        at(OTHER, "train_batch_end", 1, 3),
        at(CHIEF, "test_batch_end", 2, 1),
        inside(CHIEF, "checkpoint", epoch=0),
        at(CHIEF, "epoch_end", EPOCHS - 1),
        at(CHIEF, "train_end"),
    ]
    check(home, tmp_path, undisturbed, killing("", faults), "--workers", "2", backend=backend)


@pytest.mark.slow
def test_controllers_and_supervisors(home: Path, undisturbed: Undisturbed, tmp_path: Path) -> None:
    faults = [at(CHIEF, "epoch_end", 0), at(OTHER, "train_batch_end", 1, 3)]
    faults = [*killing("control.controller", faults), *killing(SUPERVISOR, [at(CHIEF, "epoch_end", 2)])]
    check(home, tmp_path, undisturbed, faults, "--workers", "2")


@pytest.mark.slow
def test_an_evaluator_beside(home: Path, undisturbed: Undisturbed, tmp_path: Path) -> None:
    faults = [
        at(CHIEF, "epoch_end", 0),
        inside("evaluator:0", "score", batch=0),
        at(CHIEF, "epoch_end", EPOCHS - 1),
    ]
    check(home, tmp_path, undisturbed, faults, "--workers", "2", "--evaluator")


@pytest.mark.slow
@pytest.mark.hosts
def test_on_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of paths, a task on a host has those of its agent.
    monkeypatch.setenv("PYTHONPATH", str(FOLDER / "disturbance"))
    with contextlib.closing(LoopbackHosts(tmp_path, ("a", "b"))) as hosts:
        hosts.up()
        make_cache(hosts.head, tmp_path)
        check(hosts.head, tmp_path, {}, FEW, "--workers", "2")


@pytest.mark.slow
def test_two_devices_a_worker(home: Path, undisturbed: Undisturbed, tmp_path: Path) -> None:
    check(home, tmp_path, undisturbed, FEW, "--workers", "2", INSITU_VIRTUAL_DEVICES="cpu:2")


AT_EPOCHS = [
    at(CHIEF, "epoch_end", 0),
    at(OTHER, "epoch_end", 1, when="first"),
    at(CHIEF, "epoch_begin", 2),
    at(CHIEF, "test_batch_end", 2, 1),
    at(CHIEF, "epoch_end", EPOCHS - 1),
    at(CHIEF, "train_end"),
]
"""What holds where each worker trains on servers, and nobody has another's state: not between batches."""


@pytest.mark.long
@pytest.mark.parametrize(
    "faults",
    [[AT_EPOCHS[1], AT_EPOCHS[3], AT_EPOCHS[4]], pytest.param(AT_EPOCHS, marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_workers_on_servers_die_at_the_ends_of_epochs(
    home: Path, undisturbed: Undisturbed, tmp_path: Path, faults: list[Fault]
) -> None:
    check(home, tmp_path, undisturbed, faults, "--workers", "2", "--ps", "1", STRATEGY="servers")


@pytest.mark.slow
def test_servers_die(home: Path, undisturbed: Undisturbed, tmp_path: Path) -> None:
    faults = [inside("ps:0", "push", batch=3), inside("ps:1", "push", batch=9), at(CHIEF, "epoch_end", 2)]
    options = ("--workers", "2", "--ps", "2", "--ps-backups", "1")
    check(home, tmp_path, undisturbed, faults, *options, STRATEGY="servers")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_a_worker_alone_on_servers(home: Path, undisturbed: Undisturbed, tmp_path: Path, mode: str) -> None:
    faults = [fault for fault in AT_EPOCHS if fault["task"] == CHIEF]
    check(home, tmp_path, undisturbed, faults, "--workers", "1", "--ps", "1", STRATEGY=mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "bounded", "backup", "hybrid"])
def test_workers_that_need_not_agree_leave_the_same_files(home: Path, tmp_path: Path, mode: str) -> None:
    """Numbers depend on which worker is first; which files there are, and what callbacks hear, doesn't."""
    options = ("--workers", "2", "--ps", "1")
    expected, _ = run(home, tmp_path / "undisturbed", options, variables={"STRATEGY": mode})
    found, printed = run(home, tmp_path / "disturbed", options, AT_EPOCHS, {"STRATEGY": mode})
    differences = find_differences(outline(found), outline(expected))
    assert not differences, "\n".join([*differences, printed[-4000:]])
