from __future__ import annotations

import contextlib

import pytest
from ipv6 import needs_ipv6

from insitu.cluster.job_hosts.port_probe import PortProbe
from insitu.exchange import parse_address


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_who_listens_is_reached_and_who_does_not_is_named(host: str) -> None:
    with contextlib.closing(PortProbe()) as probe, contextlib.closing(PortProbe()) as other:
        here, there = probe.listen(host), other.listen(host)
        assert parse_address(here)[0] == host
        assert probe.find_unreachable({"a": here, "b": there}) == {}
        other.close()
        found = probe.find_unreachable({"a": here, "b": there})
        assert found.keys() == {"b"} and found["b"].startswith(there)
        assert probe.find_unreachable({}) == {}
