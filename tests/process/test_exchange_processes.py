"""Groups of real processes: the same bits on any number of processes, idle waits, no leaks."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_ranks import SECRET, ranks

from insitu import exchange

TRANSPORTS = ["shm", "tcp"]


def _rows(shards: int, length: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((shards, length)).astype(np.float32)


def _reduce(
    pipe: Any, rank: int, addresses: list[str], layout: list[list[int]], length: int, transport: str
) -> bytes:
    rows = _rows(4, length)[layout[rank]]
    with exchange.join(
        rank,
        addresses,
        shards=layout[rank],
        num_shards=4,
        secret=SECRET,
        transport=transport,  # type: ignore[arg-type]
    ) as group:
        buffer = group.buffer(rows.shape if len(rows) > 1 else length, np.float32)
        for _ in range(3):
            buffer[...] = rows if len(rows) > 1 else rows[0]
            result = group.all_reduce(buffer, "weighted_mean", [float(1 + s) for s in layout[rank]])
        return result.tobytes()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("length", [7, 300_001])
def test_number_of_processes_changes_no_bit(length: int, transport: str) -> None:
    with ranks(1, _reduce, [[0, 1, 2, 3]], length, transport) as processes:
        alone = processes[0].result()
    for layout in ([[0, 1], [2, 3]], [[0, 3], [1, 2]], [[1], [0, 2, 3]]):
        with ranks(2, _reduce, layout, length, transport) as processes:
            assert [process.result() for process in processes] == [alone, alone]


def _idle(pipe: Any, rank: int, addresses: list[str], transport: str, seconds: float) -> float:
    """Processor time in seconds that waiting for a late peer took."""
    with exchange.join(rank, addresses, secret=SECRET, transport=transport) as group:  # type: ignore[arg-type]
        group.barrier()
        if rank == 1:
            time.sleep(seconds)
        before = resource.getrusage(resource.RUSAGE_SELF)
        group.all_reduce(np.ones(10, np.float32))
        after = resource.getrusage(resource.RUSAGE_SELF)
        stats = group.stats["all_reduce"]
        if rank == 0:
            assert stats.waiting > seconds / 8
            assert stats.last == {1: 1}
            assert stats.calls == 1 and stats.bytes == 40
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_waiting_sleeps_and_stats_name_the_straggler(transport: str) -> None:
    with ranks(2, _idle, transport, 2.0) as processes:
        assert processes[0].result() < 0.5
        processes[1].result()


def _count_open_resources() -> tuple[int, int]:
    """(open files, mappings of shared segments, which have no names that could be left)"""
    maps = Path("/proc/self/maps").read_text().count("memfd:insitu")
    return len(os.listdir("/proc/self/fd")), maps


def _join_and_leave(pipe: Any, rank: int, addresses: list[str], transport: str, rounds: int) -> None:
    before = None
    for _ in range(rounds):
        with exchange.join(rank, addresses, secret=SECRET, transport=transport) as group:  # type: ignore[arg-type]
            buffer = group.buffer(100_000, np.float32)
            group.all_reduce(buffer)
            group.all_reduce(np.zeros(100_000, np.float64))
            group.barrier()
        del buffer, group
        now = _count_open_resources()
        before = before or now
        assert now == before
    assert before is not None and before[1] == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left_open(transport: str) -> None:
    with ranks(2, _join_and_leave, transport, 5) as processes:
        for process in processes:
            process.result()


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left_open_after_two_hundred_groups(transport: str) -> None:
    with ranks(2, _join_and_leave, transport, 200) as processes:
        for process in processes:
            process.result()
