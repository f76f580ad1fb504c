"""The file of `insitu up --hosts`."""

from __future__ import annotations

import pytest

from insitu.base.errors import InputError
from insitu.cluster.wire.hosts_file import HostLine, parse_hosts

TEXT = """
# three hosts
node1.example.com
10.0.0.7   name=fast interface=ib0 port=7071   # with options
login@node3 home='/data/my insitu'
[fd00::1]
me@[fd00::2]
"""


V6 = ["fd00::1", "fd00::2"]


def test_each_line_is_a_host_with_its_options() -> None:
    lines = parse_hosts(TEXT, "hosts.txt")
    assert lines == [
        HostLine("node1.example.com"),
        HostLine("10.0.0.7", "fast", "ib0", "", 7071),
        HostLine("login@node3", home="/data/my insitu"),
        HostLine("fd00::1"),
        HostLine("me@fd00::2"),
    ]
    assert [line.address for line in lines] == ["node1.example.com", "10.0.0.7", "node3", *V6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing\n", r"hosts\.txt must name a host a line\. Received: no host"),
        ("a\n-oProxyCommand=evil\n", r"line 2: a host is a name.*Received: '-oProxyCommand=evil'"),
        ("a;b\n", "line 1: a host is a name"),
        ("a:22\n", r"line 1: a host is named without a port.*Received: 'a:22'.*ssh -p PORT"),
        ("me@[fd00::1]:22\n", "a host is named without a port"),
        ("a slots=4\n", r"line 1: options are name=.*Received: 'slots=4'"),
        ("a name=x name=y\n", "each once"),
        ("a name=../x\n", r"a node's name is made of.*Received: '\.\./x'"),
        ("a port=http\n", r"port is a number in \[0, 65536\)"),
        ("a\nb\na\n", "each host once. Received: a several times"),
        ("a name=x\nb name=x\n", "each name once. Received: x several times"),
        ("a 'home=\n", "line 1: No closing quotation"),
    ],
)
def test_what_cannot_be_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_hosts(text, "hosts.txt")


def test_a_host_may_have_several_homes() -> None:
    assert len(parse_hosts("a home=/x name=x\na home=/y name=y\n", "f")) == 2
