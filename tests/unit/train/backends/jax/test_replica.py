"""The replica on JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_checks import BackendChecks

pytest.importorskip("jax")


@pytest.mark.long
class TestJax(BackendChecks):
    backend = "jax"

    def test_one_shard_agrees_with_plain_keras(self, alone: Any) -> None:
        # Not the same bits: XLA fuses another program where gradient and update are compiled apart.
        plain, one = alone["plain"], alone["one"]
        assert one["history"].keys() == plain["history"].keys()
        for name, values in plain["history"].items():
            np.testing.assert_allclose(one["history"][name], values, rtol=1e-5)
        for name in ("evaluate", "predict", "single"):
            np.testing.assert_allclose(one[name], plain[name], rtol=1e-4, atol=1e-6)

    def test_a_step_that_returns_no_state_is_refused(self, alone: Any) -> None:
        assert "(logs, state)" in alone["misfit"]

    def test_thawing_without_compile_is_refused(self, alone: Any) -> None:
        assert (
            "trainable when it was compiled" in alone["thawed"] and "Call compile() again" in alone["thawed"]
        )
