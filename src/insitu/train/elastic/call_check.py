"""Checks that all tasks make the same call. One that only some make is an error before it computes."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import insitu
from insitu.errors import CollectiveMismatch

_ROW_BYTES = 248
"""Bytes of a record of a call. No other gather of bytes is of that size, so one that meets it differs."""
_MAX_PLACE = 100
_LIBRARIES = (
    os.path.dirname(os.path.abspath(insitu.__file__)) + os.sep,
    *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib")),
    "<frozen",
)
"""What the paths of files begin with that aren't the user's."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call of the script, as the tasks compare it."""

    #: The task that makes it, such as `worker:0`.
    task: str
    #: The name of the method, such as `fit`.
    name: str
    #: Number of the call among those of the script, from 0; None where calls aren't counted.
    number: int | None = None
    #: 1 in a call of the script, 2 in one that a callback makes in it.
    depth: int = 1
    #: Where the script makes it, such as `train.py:12`; "" if unknown.
    place: str = ""

    def __str__(self) -> str:
        count = "" if self.number is None else f" as call {self.number + 1}"
        inner = " inside another call" if self.depth > 1 else ""
        return f"{self.task} makes {self.name}(){count}{inner}{f' at {self.place}' if self.place else ''}"

    def to_row(self) -> NDArray[np.uint8]:
        """Return the record as bytes of a fixed number."""
        place = self.place[-_MAX_PLACE:]
        while True:
            text = json.dumps([self.task, self.name, self.number, self.depth, place]).encode()
            if len(text) <= _ROW_BYTES:
                return np.frombuffer(text.ljust(_ROW_BYTES, b"\0"), np.uint8)
            place = place[1:]

    @classmethod
    def from_row(cls, row: NDArray[np.uint8]) -> CallRecord:
        """Return the record that `to_row` wrote."""
        return cls(*json.loads(row.tobytes().rstrip(b"\0")))


def find_place() -> str:
    """Return the line of the script that is running, as `train.py:12`; "" where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARIES):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def check_same_call(rows: NDArray[Any]) -> None:
    """Raise CollectiveMismatch unless all records in `rows`, one of each shard, are of the same call."""
    records = list(dict.fromkeys(CallRecord.from_row(row) for row in rows))
    if len({(record.name, record.number, record.depth) for record in records}) > 1:
        raise CollectiveMismatch(
            "Under a strategy all workers make the same calls in the same order. Received: "
            f"{'; '.join(map(str, records))}. Make the call in every worker. What one worker evaluates or "
            "predicts alone comes at the end of the script, after the last call of the others."
        )


def refuse_different(own: CallRecord, error: Exception) -> CollectiveMismatch:
    """Return the error for a call that met another operation of other tasks, which `error` names."""
    operations = str(error).partition("Received: ")[2].partition(". ")[0]
    return CollectiveMismatch(
        "Under a strategy all workers make the same calls in the same order. Received: "
        f"{own}, while another worker does something else ({operations}). Make the call in every worker."
    )


def refuse_without(ended: Sequence[str], call: CallRecord | None, what: str = "") -> CollectiveMismatch:
    """Return the error for a call, or for `what` is being done, that needs tasks whose scripts have ended."""
    names = ", ".join(ended)
    doing = str(call) if call is not None else what
    return CollectiveMismatch(
        "Under a strategy all workers train together, in the same calls. Received: "
        f"{doing}, and the script of {names} has ended without that. Make the call in every worker; alone a "
        "worker can call evaluate(), predict() and save() after the others have ended."
    )
