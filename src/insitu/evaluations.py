"""The evaluations of a job: a line of JSON for each checkpoint that its evaluator has scored.

One process appends. A line that was cut off when it was killed is passed over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a model scored with the weights of one checkpoint."""

    #: Names the checkpoint for users.
    checkpoint: str
    #: The epoch that comes next in the training, from 0; None where it isn't known.
    epoch: int | None
    #: The step of that epoch that comes next, from 0; None where it isn't known.
    step: int | None
    #: Updates of the model until then; None where they aren't known.
    iterations: int | None
    #: By name, as `evaluate(return_dict=True)` returns them.
    metrics: Mapping[str, float]
    #: Seconds since 1970.
    at: float
    #: Seconds that it took to read the checkpoint and to score it.
    seconds: float
    #: Tells checkpoints from each other, where `checkpoint` isn't what they are listed by.
    key: str = ""

    @property
    def identity(self) -> str:
        """What tells the checkpoint from others."""
        return self.key or self.checkpoint

    def describe(self) -> str:
        """Return where the training was, and the scores, for users."""
        scores = ", ".join(f"{name} = {value:.6g}" for name, value in self.metrics.items())
        updates = f" ({self.iterations} updates)" if self.iterations is not None else ""
        return f"{self.checkpoint}{updates}: {scores}"


def append_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Write one evaluation behind the others. Raises OSError."""
    line = json.dumps(asdict(evaluation)).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with open(descriptor, "r+b", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        file.write(b"\n" + line if torn else line)


def read_evaluations(path: Path) -> list[Evaluation]:
    """Return the evaluations, oldest first."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [found for line in lines if (found := _parse(line)) is not None]


def _parse(line: bytes) -> Evaluation | None:
    try:
        data: dict[str, Any] = json.loads(line)
        return Evaluation(**data)
    except (ValueError, TypeError):
        return None
