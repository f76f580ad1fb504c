"""What pushes do to a server's state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from parameter_servers import MODEL, ONES, PLAIN, SHAPES, TRANSPORTS, clients, definitions, gradients, servers

from insitu.base.errors import (
    DefinitionMismatch,
    InputError,
    NotFinite,
)
from insitu.parameters import server_state


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_gradient_with_nan_is_refused_by_name_or_clipped(transport: str):
    bad = gradients(0)
    bad["bias"][3] = np.nan
    with servers(2) as addresses, clients(addresses, transport=transport) as (client,):
        client.define(definitions(), min_piece_bytes=2000)
        with pytest.raises(NotFinite, match="variable 'bias', shard 0, sequence 0"):
            client.push(0, 8, gradients=bad).result()
    with servers(nan="clip") as addresses, clients(addresses, transport=transport) as (client,):
        client.define(definitions(), updater={"name": "sgd", "learning_rate": 1.0})
        client.push(0, 8, gradients=bad).result()
        client.pull().result()
        assert client.values["bias"][3] == definitions()["bias"][2][3]
        assert client.stats()[0]["clipped"] == 1


def test_a_gradient_that_the_worker_checked_is_not_checked_again():
    nothing = {name: np.full(shape, np.nan, "f4") for name, shape in SHAPES.items()}
    with servers() as addresses, clients(addresses) as (client,):
        client.define(definitions())
        assert client.push(0, 1, gradients=nothing, finite=True).result() == "applied"
        with pytest.raises(NotFinite):
            client.push(1, 1, gradients=nothing).result()


def test_huge_but_finite_gradients_are_applied():
    with servers() as addresses, clients(addresses) as (client,):
        client.define({"a": ((2,), "float32")}, updater={"name": "sgd", "learning_rate": 1e-38})
        client.pull().result()
        before = client.values["a"].copy()
        client.push(0, 1, gradients={"a": np.full(2, 3e38, "f4")}).result()
        client.pull().result()
        np.testing.assert_allclose(client.values["a"] - before, -3.0)


def test_another_model_is_refused_by_name():
    with servers() as addresses, clients(addresses, 1) as (client,):
        client.define(definitions())
        changed = {**definitions(), "bias": ((8,), "float32")}
        with clients(addresses) as (other,), pytest.raises(DefinitionMismatch, match="variable 'bias'"):
            other.define(changed)
        with clients(addresses) as (other,), pytest.raises(DefinitionMismatch, match="optimizer is adam"):
            other.define(definitions(), updater="adam")
        with clients(addresses) as (other,):
            other.define(definitions())


def test_a_push_that_one_server_clips_is_applied_by_both():
    with servers(2, nan="clip") as addresses, clients(addresses) as (client,):
        client.define(MODEL, updater=PLAIN)
        assert client.push(0, 1, gradients={"a": ONES, "b": ONES * np.nan}).result() == "applied"
        client.pull().result()
        np.testing.assert_array_equal(client.values["a"], -ONES)
        np.testing.assert_array_equal(client.values["b"], 0 * ONES)


def test_a_definition_without_memory_defines_nothing(monkeypatch: pytest.MonkeyPatch):
    with servers() as addresses, clients(addresses) as (client,):
        with monkeypatch.context() as patch:

            def none_left(*_: Any) -> None:
                raise MemoryError("none left")

            patch.setattr(server_state, "aligned_empty", none_left)
            with pytest.raises(InputError, match="none left"):
                client.define(MODEL)
        client.define({"another": MODEL["a"]})
        assert client.push(0, 1, gradients={"another": ONES}).result() == "applied"
