"""The reductions in shared memory, each by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import pytest
from exchange_sessions import run_together, shm_sessions
from numpy_reference import sums_in_numpy

from insitu.exchange import shm_reductions
from insitu.exchange.plan.transport import MemberLost, Reduction, RunReduction
from insitu.exchange.shm_reductions import (
    CompiledBufferReduction,
    CompiledSlotReduction,
    NumpyRegionReduction,
    StagedReduction,
    prepare_buffer_reduction,
    prepare_region_reduction,
    prepare_slot_reduction,
)
from insitu.exchange.shm_session import ShmSession, sign

SHARDS = [[0], [1]]
LENGTH = 20_001


def _make_reduction(array: np.ndarray, op: str = "sum") -> Reduction:
    return Reduction(op, array.dtype, array.size, (array,), array)  # type: ignore[arg-type]


def _run_all(runs: Sequence[RunReduction], weights: Sequence[Sequence[float] | None]) -> list[object]:
    return run_together([lambda r=r, w=w: r(w) for r, w in zip(runs, weights, strict=True)])


def _make_rows(length: int) -> list[np.ndarray]:
    return list(np.random.default_rng(length).standard_normal((2, length)).astype(np.float32))


def _allocate(sessions: Sequence[ShmSession], length: int) -> list[np.ndarray]:
    buffers = run_together([lambda s=s: s.allocate_buffer(4 * length) for s in sessions])
    return [buffer.view(np.float32) for buffer in buffers]


@pytest.mark.parametrize("compiled", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("op", ["sum", "mean", "weighted_mean"])
@pytest.mark.parametrize("kind", ["slot", "buffer", "staged"])
def test_numpy_and_compiled_code_give_the_same_bits(kind: str, op: str, compiled: tuple[bool, bool]) -> None:
    rows = _make_rows(100 if kind == "slot" else LENGTH)
    weights = [[1.0], [3.0]] if op == "weighted_mean" else [None, None]
    factors = {"sum": (1, 1, 1), "mean": (1, 1, 2), "weighted_mean": (0.25, 0.75, 1)}[op]
    first, second, divisor = map(np.float32, factors)
    want = (rows[0] * first + rows[1] * second) / divisor
    with shm_sessions(SHARDS) as sessions, contextlib.ExitStack() as stack:
        arrays = _allocate(sessions, len(rows[0])) if kind == "buffer" else [row.copy() for row in rows]
        stack.enter_context(sums_in_numpy([s for s, c in zip(sessions, compiled, strict=True) if not c]))
        runs = []
        for session, array, row in zip(sessions, arrays, rows, strict=True):
            array[:] = row
            reduction = _make_reduction(array, op)
            if kind == "slot":
                runs.append(shm_reductions.prepare_slot_reduction(session, reduction).run)
            elif kind == "buffer":
                runs.append(shm_reductions.prepare_buffer_reduction(session, reduction, 0, 0).run)
            else:
                runs.append(StagedReduction(session, reduction, sign("staged")).run)
        assert _run_all(runs, weights) == [True, True]
    assert [array.tobytes() for array in arrays] == [want.tobytes()] * 2


@pytest.mark.parametrize("kind", ["slot", "buffer", "staged"])
def test_zero_weights_change_nothing(kind: str) -> None:
    with shm_sessions(SHARDS) as sessions:
        arrays = _allocate(sessions, LENGTH)
        runs = []
        for session, array in zip(sessions, arrays, strict=True):
            array[:] = 5.0
            given = array[:10] if kind == "slot" else array if kind == "buffer" else array.copy()
            reduction = _make_reduction(given, "weighted_mean")
            if kind == "slot":
                runs.append(prepare_slot_reduction(session, reduction).run)
            elif kind == "buffer":
                runs.append(prepare_buffer_reduction(session, reduction, 0, 0).run)
            else:
                runs.append(StagedReduction(session, reduction, sign("staged")).run)
        assert _run_all(runs, [[0.0], [0.0]]) == [False, False]
        assert all((array == 5.0).all() for array in arrays)


def test_rows_at_different_offsets_are_staged() -> None:
    with shm_sessions(SHARDS) as sessions:
        arrays = _allocate(sessions, LENGTH)
        parts = [arrays[0][:10_000], arrays[1][1_000:11_000]]
        for part, value in zip(parts, (1.0, 2.0), strict=True):
            part[:] = value
        runs = [
            prepare_buffer_reduction(session, _make_reduction(part), *(session.find_buffer(part) or ())).run
            for session, part in zip(sessions, parts, strict=True)
        ]
        assert _run_all(runs, [None, None]) == [True, True]
        assert all((part == 3.0).all() for part in parts)
        assert not arrays[0][10_000:].any() and not arrays[1][:1_000].any()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("phase", [0, (1 << 32) - 4, (1 << 40) - 4, (1 << 44) - 4])
@pytest.mark.parametrize("where", ["summing", "copying", "done"])
def test_survivor_finishes_the_part_of_a_lost_member(
    where: str, phase: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Member 1 stops in the middle of its second piece, or after all of them. Also after so many phases that
    the
    shared counters go round: from 2**32 on, after some days, this failed."""
    length, dead = 600_000, []
    with shm_sessions(SHARDS, find_dead=lambda: dead) as sessions:
        arrays = _allocate(sessions, length)
        for array, value in zip(arrays, (1.0, 2.0), strict=True):
            array[:] = value
        kinds = [prepare_region_reduction if compiled else NumpyRegionReduction, NumpyRegionReduction]
        reductions = [
            kind(session, _make_reduction(array), session.get_buffer(0), 0)
            for kind, session, array in zip(kinds, sessions, arrays, strict=True)
        ]
        for session in sessions:
            session.barrier.phase += phase
        lost = reductions[1]
        assert isinstance(lost, NumpyRegionReduction)
        _stop_at(lost, where)

        def run(number: int) -> object:
            sessions[number].synchronize(1, lambda: "begin")
            return reductions[number].run(None)

        def die() -> None:
            with pytest.raises(InterruptedError):
                run(1)
            dead.append(1)

        result, _ = run_together([lambda: run(0), die])
    assert isinstance(result, MemberLost) and result.completed
    assert (arrays[0] == 3.0).all()


def test_a_sum_is_not_copied_from_memory_that_its_owner_uses_again() -> None:
    """A member that was evicted alive computed its next piece where the helper copied the last one from."""
    length, piece = 600_000, 0
    with shm_sessions(SHARDS) as sessions:
        arrays = _allocate(sessions, length)
        reductions = [
            NumpyRegionReduction(session, _make_reduction(array), session.get_buffer(0), 0)
            for session, array in zip(sessions, arrays, strict=True)
        ]
        owner, helper = reductions
        words, base = sessions[0].progress, 5 << shm_reductions.PIECE_BITS
        reduce, total, targets = owner._pieces[piece]  # type: ignore[attr-defined]
        for array in arrays:
            array[:] = 2.0
        words[0] = base
        reduce(None)
        words[0] = base + 1
        looked_up = helper._plan.get_scratch

        def go_on(member: int, count: int) -> np.ndarray:
            """The owner copies its sum and begins the next piece, just before its scratch memory is read."""
            if words[0] == base + 1:
                shm_reductions.copy_to_targets(total, targets)
                words[0] = base + 2
                total[:] = np.nan
            return looked_up(member, count)

        helper._plan.get_scratch = go_on  # type: ignore[method-assign]
        sessions[1].barrier.phase = 6
        helper._finish_for(None, 5, 0)
        low, high = helper._plan.get_interval(0)
        assert (arrays[0][low:high] == 4.0).all() and (arrays[1][low:high] == 4.0).all()


def _stop_at(reduction: NumpyRegionReduction, where: str) -> None:
    """Have a reduction stop at some point, as a process that is killed."""
    reduce, total, targets = reduction._pieces[1]

    def spoil(factors: object) -> None:
        total[: len(total) // 2] = np.nan
        raise InterruptedError

    def reduce_and_break(factors: object) -> None:
        reduce(factors)  # type: ignore[arg-type]
        targets.insert(0, _Breaking(targets[0]))  # type: ignore[arg-type]

    def stop(factors: object, state: object = None) -> None:
        raise InterruptedError

    if where == "summing":
        reduction._pieces[1] = (spoil, total, targets)
    elif where == "copying":
        reduction._pieces[1] = (reduce_and_break, total, targets)
    else:
        reduction._finish = stop  # type: ignore[method-assign]


class _Breaking:
    """A target of which only half is written."""

    def __init__(self, target: np.ndarray) -> None:
        self._target = target

    def __setitem__(self, index: object, value: np.ndarray) -> None:
        self._target[: len(value) // 2] = value[: len(value) // 2]
        raise InterruptedError


def test_compiled_classes_are_chosen_without_weights() -> None:
    with shm_sessions(SHARDS) as sessions:
        array = _allocate(sessions, LENGTH)[0]
        small = _make_reduction(np.zeros(10, np.float32))
        assert isinstance(prepare_slot_reduction(sessions[0], small), CompiledSlotReduction)
        buffer = prepare_buffer_reduction(sessions[0], _make_reduction(array), 0, 0)
        assert isinstance(buffer, CompiledBufferReduction)
        weighted = prepare_buffer_reduction(sessions[0], _make_reduction(array, "weighted_mean"), 0, 0)
        assert type(weighted) is shm_reductions.BufferReduction
