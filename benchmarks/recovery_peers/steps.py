"""Endless training steps of a dense model in PyTorch, as a rank of any launcher; each step's end is told."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

ROWS = 32
"""Rows of a step on each of two ranks."""


def train(hidden: list[int], marks: Path) -> None:
    """Writes the time of each step's end to a file of its own, named `RANK-PID`, in `marks`."""
    torch.set_num_threads(1)
    sizes = [784, *hidden, 10]
    parts: list[torch.nn.Module] = []
    for before, after in pairwise(sizes):
        parts += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*parts[:-1]))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.zeros(ROWS, 784), torch.zeros(ROWS, dtype=torch.int64)
    marks.mkdir(exist_ok=True)
    with (marks / f"{dist.get_rank()}-{os.getpid()}").open("w") as told:
        while True:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            told.write(f"{time.time()}\n")  # Ray puts another `print` in place
            told.flush()
