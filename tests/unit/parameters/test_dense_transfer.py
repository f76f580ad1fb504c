"""Dense arrays between messages, shared memory and the state."""

from __future__ import annotations

import numpy as np
import pytest
from parameter_servers import clients, definitions, gradients, servers

from insitu.parameters.request_handler import DenseTransfer


@pytest.mark.parametrize("updater", ["sgd", "adam"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_pull_after_a_push_finds_values_written_by_the_update(
    count: int, updater: str, monkeypatch: pytest.MonkeyPatch
):
    written: list[int] = []
    copy_out = DenseTransfer.write_values
    monkeypatch.setattr(
        DenseTransfer, "write_values", lambda *given: (written.append(1), copy_out(*given))[1]
    )
    with servers(count) as addresses, clients(addresses, transport="shm") as (one,):
        one.define(definitions(), updater=updater, min_piece_bytes=2000)
        one.pull().result()
        assert len(written) == count
        for sequence in range(3):
            push = one.push(sequence, 32, gradients=gradients(sequence), defer_send=True, pull_follows=True)
            one.pull().result()
            assert push.result() == "applied"
        assert len(written) == count
        ahead = {name: value.copy() for name, value in one.values.items()}
        one.pull().result()
        assert len(written) == 2 * count
        for name, value in one.values.items():
            np.testing.assert_array_equal(value, ahead[name])
        # A repetition updates nothing, and so writes nothing.
        one.push(2, 32, gradients=gradients(2), defer_send=True, pull_follows=True)
        one.values["bias"][...] = 7
        one.pull().result()
        np.testing.assert_array_equal(one.values["bias"], ahead["bias"])
