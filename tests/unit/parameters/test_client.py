"""Connecting, and the access as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parameter_servers import clients, servers

from insitu.base.errors import (
    AuthenticationError,
    InputError,
    ParameterError,
)
from insitu.parameters import ParameterServer, Table, connect, set_learning_rate


def test_connecting_with_bad_arguments_fails():
    with pytest.raises(InputError, match="--ps 1 or more"):
        connect([])
    with servers() as addresses:
        with pytest.raises(AuthenticationError, match="doesn't know this job's secret"):
            connect(addresses, secret=b"another of 16 bytes", timeout=2.0)
        with pytest.raises(InputError, match=r"shards must be in \[0, 1\)"), clients(addresses, shards=(3,)):
            pass
        with pytest.raises(ParameterError, match="can't listen"):
            ParameterServer(addresses[0])


def test_the_example_of_the_documentation_runs():
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "numpy-servers.md").read_text()
    found: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], found)
    assert found["push"].result() == "applied"
    assert found["rows"].shape == (3, 8)


def test_a_secret_must_be_bytes():
    with pytest.raises(InputError, match=r"secret must be bytes\. Received: str"):
        ParameterServer(secret="text")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"secret must be bytes\. Received: str"):
        connect(["127.0.0.1:1"], secret="text")  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_learning_rates_and_values_are_replaced_while_slots_stay(transport: str):
    with servers(2, total_replicas=2) as addresses, clients(addresses, 2, transport=transport) as both:
        for client in both:
            client.define(
                {"w": ((4,), "float32", np.zeros(4, np.float32))},
                updater={"name": "sgd", "learning_rate": 0.5, "momentum": 0.5},
                min_piece_bytes=8,
            )
            client.define_tables([Table("words", 2, initializer={"name": "constant", "value": 0.0})])
            client.pull().result()
        first, second = both
        first.push(0, 1, gradients={"w": np.ones(4, np.float32)}).result()  # the momentum is -0.5
        first.assign({"w": np.full(4, 2.0, np.float32)})
        first.set_learning_rates({"": 0.0, "words": 0.125}).result()
        second.pull().result()
        assert second.values["w"].tolist() == [2.0] * 4
        assert second.learning_rates == {"": 0.0, "words": 0.125}
        second.push(0, 1, gradients={"w": np.ones(4, np.float32)}).result()
        second.push_rows("words", [3], np.ones((1, 2), np.float32), sequence=0).result()
        second.pull().result()
        assert second.values["w"].tolist() == [1.75] * 4
        assert second.pull_rows("words", [3]).result().tolist() == [[-0.125, -0.125]]


def test_what_cannot_be_set_is_refused():
    with servers() as addresses, clients(addresses) as (client,):
        client.define({"w": ((2,), "float32", np.zeros(2, np.float32))})
        with pytest.raises(InputError, match=r"finite number >= 0\. Received: -1\.0"):
            client.set_learning_rates({"": -1.0}).result()
        with pytest.raises(InputError, match=r"defined are: none\. Received: 'words'"):
            client.set_learning_rates({"words": 1.0}).result()
        with pytest.raises(InputError, match=r"must be defined before it is assigned\. Received: 'x'"):
            client.assign({"x": np.zeros(2, np.float32)})
        with pytest.raises(InputError, match=r"'w' is float32\[2\]. Received: float64\[2\]"):
            client.assign({"w": np.zeros(2)})


def test_an_updater_without_a_learning_rate_is_refused():
    with pytest.raises(InputError, match=r"attribute `learning_rate`\. Received: object"):
        set_learning_rate(object(), 0.1)
