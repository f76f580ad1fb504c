"""Faults at each event of a training, and the comparison of a job that has them with one that hasn't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from disturbed_hits import CONTROLLER, SUPERVISOR
from disturbed_jobs import Fault, Place, bring_up, find_differences, make_cache, outline, run

EPOCHS, STEPS, TESTS = 4, 7, 3
"""Of `train.py` in a job of two workers on two nodes."""
STEPS_ON_HOSTS = 6
"""The same on three nodes, whose shards are others."""
CHIEF, OTHER = "worker:0", "worker:1"
STANDBY = "task.entry --standby"
HOST_SERVER, AGENT, HEAD = "job_hosts.host_server", "nodes.agent_process", "nodes.head_process"
"""Parts of the command lines of processes that aren't tasks."""
_OF_RECOVERY = ("--on-loss", "adopt", "restart", "replace")


class Comparison:
    """Compares jobs with faults with those without, which run once for each way to start them.

    These run at `undisturbed_at`: neither faults nor places may change anything.
    """

    def __init__(self, undisturbed_at: Place) -> None:
        self.place = undisturbed_at
        self._undisturbed: dict[tuple[str, ...], dict[str, Any]] = {}

    def check(
        self,
        folder: Path,
        faults: Sequence[Fault],
        *options: str,
        at: Place | None = None,
        backend: str = "tensorflow",
        script: str = "train.py",
        outlined: bool = False,
        **variables: str,
    ) -> str:
        """Fail where a job with `faults` leaves behind something else than one without, or another outline.
        Return what it has printed."""
        variables = {"KERAS_BACKEND": backend, **variables}
        counted = [option for option in options if option not in _OF_RECOVERY]
        key = (script, *counted, *(f"{name}={value}" for name, value in sorted(variables.items())))
        if key not in self._undisturbed:
            self._undisturbed[key], _ = run(
                self.place, folder / "undisturbed", options, variables=variables, script=script
            )
        found, printed = run(
            at or self.place, folder / "disturbed", options, faults, variables, script=script
        )
        expected = self._undisturbed[key]
        pair = (outline(found), outline(expected)) if outlined else (found, expected)
        differences = find_differences(*pair)
        assert not differences, "\n".join([*differences, printed[-4000:]])
        return printed


def compare_with_local(root: Path, nodes: int) -> Comparison:
    """Return what compares jobs with those without faults on so many nodes of this machine."""
    place = bring_up(root / "home", nodes)
    make_cache(place, root)
    return Comparison(place)


def at(
    task: str, event: str, epoch: int | None = None, batch: int | None = None, when: str = "last", **more: Any
) -> Fault:
    """A fault at one event, before the user's callbacks (when="first") or behind them."""
    where = {"epoch": epoch, "batch": batch}
    place = {name: value for name, value in where.items() if value is not None}
    return {"task": task, "event": event, "when": when, **place, **more}


def inside(task: str, event: str, **where: Any) -> Fault:
    """A fault within something that isn't an event of callbacks."""
    return {"task": task, "event": event, **where}


def in_call(call: int, *args: Any, **where: Any) -> Fault:
    """A fault in a call of the script of that number."""
    return {**at(*args, **where), "call": call}


def suspended(faults: Sequence[Fault]) -> list[Fault]:
    """The same faults, with processes that stand still."""
    return [{**fault, "signal": "STOP"} for fault in faults]


def killing(target: str, faults: Sequence[Fault], **more: Any) -> list[Fault]:
    """The same faults, which hit other processes of the job; "": all of them, as after a power loss."""
    return [{**fault, "target": target, **more} for fault in faults]


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
FEWEST = [FEW[0], FEW[1], FEW[3], FEW[5]]


def make_all(first: str, second: str, steps: int = STEPS) -> list[list[Fault]]:
    """Faults at each event, in jobs of several: `first` and `second` take turns, so that over both orders
    each dies before and behind the callbacks of each event."""
    last = EPOCHS - 1
    begin = [at(first, "set_model"), at(second, "train_begin", when="first"), at(first, "train_begin")]
    events: list[tuple[Any, ...]] = [
        ("epoch_begin", 0),
        ("train_batch_begin", 0, 0),
        ("train_batch_end", 0, 0),
        ("train_batch_begin", 0, 3),
        ("train_batch_end", 0, steps - 1),
        ("test_begin", 0),
        ("test_batch_begin", 0, 0),
        ("test_batch_end", 0, 1),
        ("test_end", 0),
        ("epoch_end", 0),
        ("epoch_begin", 1),
        ("train_batch_begin", 1, steps - 1),
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
WITHIN_OF_THE_OTHER = [
    inside(OTHER, "shared_begin"),
    inside(OTHER, "shared_train", epoch=0, batch=3),
    inside(CHIEF, "shared_epoch", epoch=1),
    inside(OTHER, "shared_end"),
    inside(CHIEF, "before_call", epoch=1),
    inside(OTHER, "after_call", epoch=1),
    inside(OTHER, "before_call", epoch=3),
    inside(CHIEF, "predict", batch=1),
]
"""The same by the other task, and in units that others may have done already."""
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
"""In what `calls.py` evaluates and predicts itself, with callbacks, and behind that."""
FEW_OF_CALLS = [
    in_call(1, OTHER, "test_batch_end", batch=1),
    in_call(1, CHIEF, "test_end"),
    in_call(2, CHIEF, "predict_batch_end", batch=1),
    in_call(4, CHIEF, "predict_end"),
]
"""Within and behind calls of both kinds."""
OF_RECOVERIES = [
    at(OTHER, "epoch_end", 0, when="first"),
    at(OTHER, "set_model", attempt=2),
    inside("worker:2", "recovery"),
    at(CHIEF, "train_batch_end", 2, 3),
    at(CHIEF, "train_batch_end", 2, 4, attempt=2),
]
"""While others recover, of three workers: the one that has come, and one that waits for it."""
OF_LOOPS = [
    inside(OTHER, "loop_begin", batch=0),
    inside(CHIEF, "loop_begin", batch=2),
    inside(OTHER, "loop_end", batch=4),
    inside(CHIEF, "loop_end", batch=3),
]
"""In the body of the loop of `loop.py`, before and behind its step. Each process counts its steps."""
OF_THE_ROLES = [
    inside("chief:0", "save", epoch=1),
    inside("worker:0", "save", epoch=0, attempt=2),
    *killing("", [inside("chief:0", "save", epoch=0, attempt=3)]),
]
"""Of `alone.py`, in whose job the chief is a task of its own. Each process counts its saves."""
AT_EPOCHS = [
    at(CHIEF, "epoch_end", 0),
    at(OTHER, "epoch_end", 1, when="first"),
    at(CHIEF, "epoch_begin", 2),
    at(CHIEF, "test_batch_end", 2, 1),
    at(CHIEF, "epoch_end", EPOCHS - 1),
    at(CHIEF, "train_end"),
]
"""What holds where each worker trains on servers, and nobody has another's state: not between batches."""
ALL_AT_ONCE = killing(
    "",
    [
        at(CHIEF, "epoch_end", 0),
        at(OTHER, "train_batch_end", 1, 3),
        at(CHIEF, "test_batch_end", 2, 1),
        inside(CHIEF, "checkpoint", epoch=0),
        at(CHIEF, "epoch_end", EPOCHS - 1),
        at(CHIEF, "train_end"),
    ],
)
"""Each time all processes of a job, the supervisor too."""


@dataclass(frozen=True)
class Case:
    """A job on hosts that has faults."""

    #: What is killed or suspended.
    faults: Sequence[Fault]
    #: Of `insitu start`.
    options: tuple[str, ...] = ("--workers", "2")
    backend: str = "tensorflow"
    script: str = "train.py"
    #: Further variables of the script.
    variables: Mapping[str, str] = field(default_factory=dict)

    def check(self, jobs: Comparison, folder: Path, place: Place) -> str:
        """Run it at a place, and fail if it leaves behind something else than a local one without faults."""
        # The number of cores would choose it, which differs between a machine and hosts.
        options = ("--threads", "1", *self.options)
        more = {"at": place, "backend": self.backend, "script": self.script, **self.variables}
        return jobs.check(folder, self.faults, *options, **more)


_TWO = ("--workers", "2")
ON_HOSTS = {
    "few": Case(FEW),
    "few-jax": Case(FEW, backend="jax"),
    "few-torch": Case(FEW, backend="torch"),
    **{
        f"events-{name}-{number}": Case(faults, backend="jax")
        for name, tasks in {"chief": (CHIEF, OTHER), "other": (OTHER, CHIEF)}.items()
        for number, faults in enumerate(make_all(*tasks, STEPS_ON_HOSTS))
    },
    "within-chief": Case(WITHIN),
    "within-other": Case(WITHIN_OF_THE_OTHER, backend="jax"),
    "recoveries": Case(OF_RECOVERIES, ("--workers", "3"), "jax"),
    "calls": Case(FEW_OF_CALLS, backend="jax", script="calls.py"),
    "loop": Case(OF_LOOPS, backend="jax", script="loop.py"),
    "added-chief": Case(FEWEST, ("--workers", "1", "--chief"), "jax"),
    "own-chief": Case(OF_THE_ROLES, ("--workers", "1", "--chief"), script="alone.py"),
    "adopt": Case(FEWEST, (*_TWO, "--on-loss", "adopt")),
    "restart": Case(FEWEST, (*_TWO, "--on-loss", "restart"), "jax"),
    "standby": Case([*killing(STANDBY, [at(CHIEF, "test_begin", 0)]), *FEW], (*_TWO, "--standby", "1")),
    "devices": Case(FEWEST, variables={"INSITU_VIRTUAL_DEVICES": "cpu:2"}),
    "suspended": Case(
        suspended([at(CHIEF, "epoch_end", 1), at(OTHER, "train_batch_end", 2, 2)]),
        (*_TWO, "--stall-timeout", "15"),
        "jax",
    ),
    "evaluator": Case([FEW[0], inside("evaluator:0", "score", batch=0), FEW[5]], (*_TWO, "--evaluator")),
    "workers-on-servers": Case(AT_EPOCHS, (*_TWO, "--ps", "1"), variables={"STRATEGY": "servers"}),
    "servers": Case(
        [inside("ps:0", "push", batch=3), inside("ps:1", "push", batch=9), at(CHIEF, "epoch_end", 2)],
        (*_TWO, "--ps", "2", "--ps-backups", "1"),
        "jax",
        variables={"STRATEGY": "servers"},
    ),
    "all-at-once": Case(ALL_AT_ONCE),
    "controllers": Case(
        [
            *killing(CONTROLLER, [at(CHIEF, "epoch_end", 0), at(OTHER, "train_batch_end", 1, 3)]),
            *killing(SUPERVISOR, [inside(CHIEF, "save", epoch=3), at(CHIEF, "epoch_end", 2)]),
        ]
    ),
    "host-servers": Case(
        [
            *killing(HOST_SERVER, [at(CHIEF, "epoch_end", 0), at(OTHER, "train_batch_end", 1, 2)], near=True),
            *killing(HOST_SERVER, [at(OTHER, "test_batch_end", 2, 1), at(CHIEF, "train_end")]),
        ],
        backend="jax",
    ),
    "suspended-host-server": Case(
        suspended(killing(HOST_SERVER, [at(CHIEF, "epoch_end", 1)], near=True)),
        (*_TWO, "--stall-timeout", "15"),
        "jax",
    ),
}
"""By name, what holds on any hosts."""


def choose_cases(cases: Mapping[str, Case]) -> pytest.MarkDecorator:
    """Return the mark that runs a test for the `name` of each case."""
    names = [
        pytest.param(name, marks=[pytest.mark.torch] if case.backend == "torch" else [])
        for name, case in cases.items()
    ]
    return pytest.mark.parametrize("name", names)
