"""The values that groups and transports share."""

from __future__ import annotations

import numpy as np

from insitu.exchange.plan.transport import GroupConfig, Reduction, mismatch_error


def test_reduction_names_what_ranks_must_agree_on() -> None:
    array = np.zeros(3, np.float32)
    reduction = Reduction("mean", array.dtype, 3, (array,), array)
    assert str(reduction) == "all_reduce mean of float32[3]"
    assert (
        str(Reduction("sum", array.dtype, 3, (array,), array, (0, 2))) == "reduce_scatter sum of float32[3]"
    )
    assert reduction.row_bytes == 12


def test_ranks_have_their_tasks_names() -> None:
    config = GroupConfig(0, 0, ("a:1",), (0,), ("worker:0",))
    assert (config.name(0), config.name(7)) == ("worker:0", "rank 7")
    assert GroupConfig(0, 0, ("a:1",), (0,), None).name(0) == "rank 0"


def test_mismatch_names_both_operations() -> None:
    assert "Received: rank 1 called a, rank 2 called b." in str(mismatch_error(1, "a", 2, "b"))
