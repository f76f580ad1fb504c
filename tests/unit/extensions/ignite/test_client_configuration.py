"""The servers that a client's configuration names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import InputError
from insitu.extensions.ignite.client_configuration import MOST_BYTES, address_by_configuration, find_servers

NODE = """<?xml version="1.0" encoding="UTF-8"?>
<!-- A node in client mode. -->
<beans xmlns="http://www.springframework.org/schema/beans">
  <bean class="org.apache.ignite.configuration.IgniteConfiguration">
    <property name="clientMode" value="true"/>
    <property name="discoverySpi"><bean class="org.apache.ignite.spi.discovery.tcp.TcpDiscoverySpi">
      <property name="ipFinder">
        <bean class="org.apache.ignite.spi.discovery.tcp.ipfinder.vm.TcpDiscoveryVmIpFinder">
          <property name="addresses"><list>
            <value>grid-1:47500..47509</value><value>grid-2</value><value>[::1]:47500</value>
            <value>grid-2:47501</value>
          </list></property>
        </bean>
      </property>
    </bean></property>
  </bean>
</beans>"""
THIN = """<beans><bean class="org.apache.ignite.configuration.ClientConfiguration">
  <property name="addresses" value="grid-1:10801, grid-2"/></bean></beans>"""


def test_the_hosts_of_a_node_are_asked_at_the_default_port(tmp_path: Path):
    file = tmp_path / "client.xml"
    file.write_text(NODE)
    assert address_by_configuration(file, "DIGITS") == "ignite://grid-1:10800,grid-2:10800,[::1]:10800/DIGITS"


CONNECTOR = """<property name="clientConnectorConfiguration">
  <bean class="org.apache.ignite.configuration.ClientConnectorConfiguration">
    <property name="host" value="0.0.0.0"/><property name="port" value="10999"/></bean></property>"""


def test_the_hosts_of_a_node_are_asked_at_the_port_that_it_says():
    text = NODE.replace('<property name="clientMode" value="true"/>', CONNECTOR)
    found = [("grid-1", 10999), ("grid-2", 10999), ("::1", 10999)]
    assert find_servers(text.encode(), "client.xml") == found
    for port in ("#{port}", "70000", ""):
        with pytest.raises(InputError, match=r"Received: client.xml with port"):
            find_servers(text.replace("10999", port).encode(), "client.xml")


def test_the_addresses_of_a_thin_client_are_taken_as_they_are():
    assert find_servers(THIN.encode(), "client.xml") == [("grid-1", 10801), ("grid-2", 10800)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not xml", "no XML"),
        ("<beans/>", "no addresses"),
        (THIN.replace("grid-2", "${server}"), r"address '\$\{server\}'"),
        (THIN.replace("10801", "99999"), "address 'grid-1:99999'"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><beans/>', "declarations of its own"),
        (THIN.replace("grid-1", "grid\0"), "in UTF-16"),
        ("<beans>" + " " * MOST_BYTES + "</beans>", "more than a mebibyte"),
    ],
)
def test_other_files_are_refused(text: str, message: str):
    with pytest.raises(InputError, match=f"Received: client.xml with .*{message}"):
        find_servers(text.encode(), "client.xml")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_declarations_are_refused_in_any_encoding(encoding: str):
    text = '<?xml version="1.0" encoding="utf-16"?><!DOCTYPE a [<!ENTITY b "c">]><beans/>'
    with pytest.raises(InputError, match="with declarations of its own, or in UTF-16"):
        find_servers(text.encode(encoding), "client.xml")


def test_a_file_that_isnt_there_is_named(tmp_path: Path):
    with pytest.raises(InputError, match="which can't be read: No such file"):
        address_by_configuration(tmp_path / "nothing.xml", "DIGITS")


@given(
    st.binary(max_size=200)
    | st.text().map(lambda text: NODE.replace("grid-2", text).encode(errors="replace"))
)
def test_any_bytes_name_servers_or_are_refused(text: bytes):
    try:
        servers = find_servers(text, "client.xml")
    except InputError:
        return
    assert all(host and 1 <= port <= 65535 for host, port in servers)
