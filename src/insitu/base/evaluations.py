"""The evaluations of a job, and the trainings whose checkpoints they score: a line of JSON for each.

One process appends to each file. A line that was cut off when it was killed is passed over.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

_Line = TypeVar("_Line")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of a model with the weights of one checkpoint."""

    #: Names the checkpoint for users.
    checkpoint: str
    #: The epoch that comes next in the training, from 0; None if it isn't known.
    epoch: int | None
    #: The step of that epoch that comes next, from 0; None if it isn't known.
    step: int | None
    #: Updates of the model until then; None if they aren't known.
    iterations: int | None
    #: By name, as `evaluate(return_dict=True)` returns them.
    metrics: Mapping[str, float]
    #: Seconds since 1970.
    at: float
    #: Seconds that it took to read the checkpoint and to score it.
    seconds: float
    #: Identifies the checkpoint, if `checkpoint` is not its name in lists.
    key: str = ""

    @property
    def identity(self) -> str:
        """The key of the checkpoint."""
        return self.key or self.checkpoint

    def describe(self) -> str:
        """Return the position of the training, and the scores, for users."""
        scores = ", ".join(f"{name} = {value:.6g}" for name, value in self.metrics.items())
        updates = f" ({self.iterations} updates)" if self.iterations is not None else ""
        return f"{self.checkpoint}{updates}: {scores}"


@dataclass(frozen=True, slots=True)
class Training:
    """A call of `train_and_evaluate` in a job's script. The chief writes one line as it begins, and another
    when it is over, from which the evaluator knows whose checkpoints it scores."""

    #: Number of the call in the script, from 0.
    number: int
    #: Number of the series of its checkpoints.
    fit: int
    #: Whether the training is over.
    is_over: bool = False
    #: The epoch and the step of its last checkpoint, if it is over; None: it wrote none.
    last: tuple[int, int] | None = None


def append_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Write one evaluation behind the others. Raises OSError."""
    _append(path, asdict(evaluation))


def read_evaluations(path: Path) -> list[Evaluation]:
    """Return the evaluations, oldest first."""
    return _read(path, lambda state: Evaluation(**state))


def record_training(path: Path, training: Training) -> None:
    """Write one state of a training behind the others. The first line counts: a script that is run again
    says the same once more, when others may have continued. Raises OSError."""
    known = find_training(path, training.number)
    if known is None or (training.is_over and not known.is_over):
        _append(path, asdict(training))


def find_training(path: Path, number: int) -> Training | None:
    """Return what is known of a training; None before it begins."""

    def parse(state: dict[str, Any]) -> Training:
        last = state.pop("last")
        return Training(**state, last=None if last is None else (last[0], last[1]))

    found = [training for training in _read(path, parse) if training.number == number]
    return next((training for training in found if training.is_over), found[0] if found else None)


def _append(path: Path, state: dict[str, Any]) -> None:
    line = json.dumps(state).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with open(descriptor, "r+b", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        file.write(b"\n" + line if torn else line)


def _read(path: Path, parse: Callable[[dict[str, Any]], _Line]) -> list[_Line]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError, IndexError):
            found.append(parse(json.loads(line)))
    return found
