"""The replica on PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
from backend_checks import BackendChecks

pytestmark = pytest.mark.torch


class TestTorch(BackendChecks):
    backend = "torch"

    def test_one_shard_gives_the_bits_of_plain_keras(self, alone: Any) -> None:
        assert alone["one"] == alone["plain"]

    def test_state_that_keras_does_not_know_is_refused(self, alone: Any) -> None:
        assert "running_mean" in alone["misfit"]
