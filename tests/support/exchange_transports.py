"""Forces a transport or an algorithm on groups in threads that are named "rank 0", "rank 1" ..."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from unittest import mock

from numpy_reference import sums_in_python

from insitu.exchange.plan.costs import find_chain_order
from insitu.exchange.plan.transport import Members

ALGORITHMS = ["gather", "star", "direct", "chain"]
IN_PYTHON = [f"{name} in Python" for name in ALGORITHMS[:3]]
FORCED_TRANSPORTS = ["shm", "numpy", "tcp", *ALGORITHMS, *IN_PYTHON, "two hosts", "three hosts"]
"""For `forced_transport`. "numpy": shared memory, but rank 1 sums in NumPy. An algorithm: TCP with it; also
in Python on rank 1. "two hosts": the ranks are distributed over hosts."""


@contextlib.contextmanager
def forced_transport(transport: str) -> Iterator[None]:
    """Force one of FORCED_TRANSPORTS."""
    with contextlib.ExitStack() as stack:
        if "hosts" in transport:
            hosts = 2 if transport == "two hosts" else 3
            name = lambda: f"host {int(threading.current_thread().name.split()[1]) % hosts}"  # noqa: E731
            stack.enter_context(mock.patch("insitu.exchange.memory.read_host_identity", name))
        if transport == "numpy" or "in Python" in transport:
            stack.enter_context(sums_in_python(lambda: threading.current_thread().name == "rank 1"))
        algorithm = transport.split()[0]
        if algorithm in ALGORITHMS:

            def choose(members: Members, *_: object) -> str:
                return (
                    algorithm if algorithm != "chain" or find_chain_order(members) is not None else "direct"
                )

            stack.enter_context(mock.patch("insitu.exchange.tcp.choose_algorithm", choose))
        yield
