"""Tasks are killed or suspended at any event of a training: all that it leaves behind is as without that.

One script with all of Keras' callbacks, and a user's, runs undisturbed and with faults. Its files, histories,
ledger and what its callbacks remember are compared. A job has many faults, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from disturbed_jobs import Fault, find_differences, make_cache, run

pytestmark = pytest.mark.timeout(900)

EPOCHS, STEPS, TESTS = 4, 7, 3
CHIEF, OTHER = "worker:0", "worker:1"

Undisturbed = dict[tuple[str, ...], dict[str, Any]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the cache of the script."""
    root = tmp_path_factory.mktemp("disturbed")
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
    **variables: str,
) -> None:
    """Fail where a job with `faults` leaves behind something else than one without."""
    variables = {"KERAS_BACKEND": backend, **variables}
    counted = [o for o in options if o not in ("--on-loss", "adopt", "restart", "replace")]
    key = (*counted, *(f"{name}={value}" for name, value in sorted(variables.items())))
    if key not in undisturbed:
        undisturbed[key], _ = run(home, folder / "undisturbed", options, variables=variables)
    found, printed = run(home, folder / "disturbed", options, faults, variables)
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
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
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
def test_workers_on_servers_die_at_the_ends_of_epochs(
    home: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    check(home, tmp_path, undisturbed, AT_EPOCHS, "--workers", "2", "--ps", "1", STRATEGY="servers")
