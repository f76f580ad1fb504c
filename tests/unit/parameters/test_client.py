"""Connecting, and the access as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parameter_servers import clients, servers

from insitu.errors import (
    AuthenticationError,
    InputError,
    ParameterError,
)
from insitu.parameters import ParameterServer, connect


def test_connecting_with_bad_arguments_fails():
    with pytest.raises(InputError, match="--ps 1 or more"):
        connect([])
    with servers() as addresses:
        with pytest.raises(AuthenticationError, match="doesn't know this job's secret"):
            connect(addresses, secret=b"another of 16 bytes", timeout=0.5)
        with pytest.raises(InputError, match=r"shards must be in \[0, 1\)"), clients(addresses, shards=(3,)):
            pass
        with pytest.raises(ParameterError, match="can't listen"):
            ParameterServer(addresses[0])


def test_the_example_of_the_documentation_runs():
    text = (Path(__file__).parents[3] / "docs" / "parameters.md").read_text()
    found: dict[str, Any] = {}
    exec(text.split("## From NumPy")[1].split("```python\n")[1].split("```")[0], found)
    assert found["push"].result() == "applied"
    assert found["rows"].shape == (3, 8)


def test_a_secret_must_be_bytes():
    with pytest.raises(InputError, match=r"secret must be bytes\. Received: str"):
        ParameterServer(secret="text")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"secret must be bytes\. Received: str"):
        connect(["127.0.0.1:1"], secret="text")  # type: ignore[arg-type]
