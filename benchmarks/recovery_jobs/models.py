"""The models that the benchmarks of recovery's cost train, and where a job writes its figures."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROWS = 64
"""Rows of a step over both workers."""
HIDDEN = {"one layer": [], "20 M": [4096, 3968]}
"""Units of the layers between 784 inputs and 10 outputs."""


def options() -> dict[str, Any]:
    """What the benchmark asked for. Each task keeps to one core of its own."""
    told: dict[str, Any] = json.loads(sys.argv[1])
    cores = sorted(os.sched_getaffinity(0))
    if told["pin"]:
        index = int(os.environ["INSITU_TASK"].partition(":")[2])
        os.sched_setaffinity(0, {cores[index % len(cores)]})
    return told


def model(keras: Any, name: str) -> Any:
    hidden = [keras.layers.Dense(units, "relu") for units in HIDDEN[name]]
    built = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
    built.compile(
        keras.optimizers.SGD(0.01, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return built


def tell(told: dict[str, Any], figures: Any) -> None:
    """Worker 0 writes the benchmark's figures."""
    if os.environ["INSITU_TASK"] == "worker:0":
        Path(told["out"]).write_text(json.dumps(figures))
