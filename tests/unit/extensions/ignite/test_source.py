"""Caches of Ignite as sources of `import`, from servers that speak the protocol in this process."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ignite_wire import (
    FakeCache,
    FakeServer,
    binary_object,
    binary_type,
    cluster_of,
    drawings,
    node_name,
    number,
)

from insitu.base.context import Context
from insitu.base.errors import InputError, InsituError, SourceError
from insitu.base.net.certificates import make_certificate
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec
from insitu.extensions.ignite import cluster as cluster_module
from insitu.extensions.ignite import connection
from insitu.extensions.ignite.address import ConnectionSettings, parse_address
from insitu.extensions.ignite.cluster import Cluster
from insitu.extensions.ignite.connection import MOST_MESSAGE_BYTES
from insitu.extensions.ignite.connector import CONNECTOR
from insitu.extensions.ignite.description import describe_ignite
from insitu.extensions.ignite.protocol import (
    GET_ENDPOINTS,
    GET_NAMES,
    GET_TYPE,
    NEXT_PAGE,
    SCAN,
    BinaryType,
    Page,
)
from insitu.extensions.ignite.source import TypeBook
from insitu.extensions.ignite.wire import pack_int, pack_string
from insitu.grid import Catalog, dataset, import_cache
from insitu.grid.importing import run_import
from insitu.grid.sources import ColumnOptions, SourceOptions
from insitu.options import ImportOptions

HANDSHAKE = 1


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "2")
    monkeypatch.setattr(cluster_module, "_PAUSES", (0.01,))


def rows_of(paths: Paths, cache: CacheSpec) -> dict[str, Any]:
    """All rows by column, ordered by key."""
    batch = dataset(cache.name, paths=paths, context=Context(paths=paths), label=None).sample(cache.rows)
    order = np.argsort(batch["key"])
    return {name: np.asarray(values)[order] for name, values in batch.items()}


TENSOR = ["image=uint8[3,4]"]


def test_rows_of_several_servers_become_a_cache(paths: Paths):
    with cluster_of(3, drawings(200)) as cluster:
        (cache,) = import_cache(paths, "digits", [cluster.address(0)], tensor=TENSOR)
        assert [server.scanned.count(p) > 0 for p, server in enumerate(cluster.servers)] == [True] * 3
        for index, server in enumerate(cluster.servers[1:], start=1):
            assert set(server.scanned) <= {p for p in range(5) if p % 3 == index}
    found = rows_of(paths, cache)
    np.testing.assert_array_equal(found["key"], range(200))
    np.testing.assert_array_equal(found["label"], np.arange(200) % 10)
    expected = (np.arange(200)[:, None] + np.arange(12)) % 256
    np.testing.assert_array_equal(found["image"], expected.reshape(200, 3, 4))
    assert cache.origin is not None and cache.origin["rows"] == 200
    assert [rows for _, rows, _ in cache.origin["partitions"]] == [40] * 5
    assert Catalog(paths).get("digits") == cache


def test_the_same_rows_make_the_same_cache_on_any_number_of_servers(paths: Paths):
    made = []
    for servers in (1, 2, 4):
        cache = drawings(300)
        if servers == 2:
            cache.partitions = [sorted(rows) for rows in cache.partitions]
        with cluster_of(servers, cache) as cluster:
            cluster.page_rows = servers * 7
            made += import_cache(paths, "digits", [cluster.address()], overwrite=True)
    assert len({tuple(p.checksum for p in cache.partitions) for cache in made}) == 1
    assert len({cache.origin["digest"] for cache in made if cache.origin}) == 1


def test_a_cache_whose_partitions_arent_known_is_read_as_one(paths: Paths):
    cache = drawings(30)
    cache.replicated = True
    with cluster_of(2, cache) as cluster:
        (made,) = import_cache(paths, "digits", [cluster.address()])
    np.testing.assert_array_equal(rows_of(paths, made)["key"], range(30))


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([0, 1, 2, 3, 4, 1], r"must send each row once. Received: 6 rows"),
        ([1, 2, 3, 4], r"Received: 24 of 30, while partitions moved"),
    ],
)
def test_rows_that_come_twice_or_not_at_all_from_all_servers_are_an_error(
    paths: Paths, sent: list[int], message: str
):
    """As they may while partitions move, whose servers answer by different maps."""
    cache = drawings(30)
    cache.replicated = True

    def move(server: FakeServer, operation: int, count: int) -> None:
        if operation == SCAN and count == 3:  # two have told the columns
            server.cluster.topology = (1, 1)
            cache.partitions = [cache.partitions[partition] for partition in sent]

    with cluster_of(1, cache, move) as cluster, pytest.raises(SourceError, match=message):
        import_cache(paths, "digits", [cluster.address()])
    assert Catalog(paths).caches() == []


def test_float_keys_of_equal_size_have_one_order(paths: Paths):
    keys = [0.0, -0.0, float("nan"), -float("nan"), 1.5]
    made = []
    for turn in (1, -1):
        rows = [(number(6, "d", key), number(3, "i", i)) for i, key in enumerate(keys)]
        with cluster_of(1, FakeCache([rows[::turn]])) as cluster:
            made += import_cache(paths, "keys", [cluster.address()], overwrite=True)
    assert len({cache.origin["digest"] for cache in made if cache.origin}) == 1


def test_an_object_that_is_null_in_the_first_rows_makes_columns(paths: Paths):
    size, row = binary_type("Size", [("width", 3)]), binary_type("Row", [("label", 3), ("size", 103)])

    def value(label: int) -> bytes:
        inner = binary_object(size, [("width", number(3, "i", label))]) if label >= 600 else b"\x65"
        return binary_object(row, [("label", number(3, "i", label)), ("size", inner)])

    rows = [(number(4, "q", label), value(label)) for label in range(900)]
    with cluster_of(2, FakeCache([rows[:300], rows[300:500], rows[500:]], [size, row])) as cluster:
        (cache,) = import_cache(paths, "sizes", [cluster.address()], fill=["size.width=-1"])
    found = rows_of(paths, cache)
    np.testing.assert_array_equal(found["size.width"], [-1] * 600 + list(range(600, 900)))


def test_a_class_that_is_rare_is_found_and_said(paths: Paths):
    """If the first rows are of two classes, more rows are looked at for further ones."""
    kinds = [binary_type(name, [(name.lower(), 6)]) for name in ("Cat", "Dog", "Owl")]

    def value(index: int) -> bytes:
        kind = kinds[2 if index == 700 else index % 2]
        return binary_object(kind, [(kind.name.lower(), number(6, "d", index))])

    rows = [(number(4, "q", index), value(index)) for index in range(900)]
    notes: list[str] = []
    with cluster_of(2, FakeCache([rows[:300], rows[300:500], rows[500:]], kinds)) as cluster:
        options = ImportOptions("pets", (cluster.address(),))
        (cache,) = run_import(paths, options, note=notes.append)
    assert "value is of Cat and of Dog and of Owl: columns are those of all" in notes[0]
    found = rows_of(paths, cache)
    assert np.flatnonzero(~np.isnan(found["owl"])).tolist() == [700] and found["owl"][700] == 700
    assert np.isnan(found["cat"]).tolist() == [index % 2 == 1 or index == 700 for index in range(900)]


def test_a_server_that_dies_is_replaced_by_the_next_primary(paths: Paths):
    """It dies in the middle of a scan. Its partitions are read again, whole, and no row comes twice."""
    cluster = cluster_of(2, drawings(400))

    def die(server: FakeServer, operation: int, count: int) -> bytes | None:
        if operation != NEXT_PAGE or count < 4:
            return None
        server.alive = False
        cluster.primaries, cluster.topology = [1] * 5, (2, 0)
        server.stop()
        return b""

    cluster.servers[0]._behave = die
    cluster.page_rows = 10
    with cluster:
        (cache,) = import_cache(paths, "digits", [cluster.address()])
    np.testing.assert_array_equal(rows_of(paths, cache)["key"], range(400))
    assert cache.origin is not None and cache.origin["topology"] == [[1, 0], [2, 0]]


def test_rows_that_are_lost_with_a_server_are_an_error(paths: Paths):
    cluster = cluster_of(2, drawings(400))

    def die(server: FakeServer, operation: int, count: int) -> bytes | None:
        if operation != NEXT_PAGE or count < 4:
            return None
        server.alive = False
        cluster.primaries, cluster.topology = [1] * 5, (2, 0)
        cluster.cache.partitions[0] = cluster.cache.partitions[0][:5]
        server.stop()
        return b""

    cluster.servers[0]._behave = die
    cluster.page_rows = 10
    with cluster, pytest.raises(SourceError, match=r"Received: 325 of 400 after 1 server"):
        import_cache(paths, "digits", [cluster.address()])
    assert Catalog(paths).caches() == []


def test_rows_that_are_lost_before_they_are_read_are_an_error(paths: Paths):
    """The server leaves when the columns are known and no partition has been asked for."""
    with cluster_of(2, drawings(400)) as cluster:
        source = CONNECTOR.open(cluster.address(), ColumnOptions(), SourceOptions())
        cluster.servers[0].alive = False
        cluster.servers[0].stop()
        cluster.primaries, cluster.topology = [1] * 5, (2, 0)
        cluster.cache.partitions[0] = cluster.cache.partitions[0][:5]
        with pytest.raises(SourceError, match=r"Received: 325 of 400 after 1 server"):
            for _ in source.blocks(1 << 20):
                pass


def test_a_node_that_cant_be_reached_is_read_by_another_one(paths: Paths):
    cluster = cluster_of(2, drawings(50))
    unreachable = cluster.servers[1]
    unreachable.stop()
    unreachable.alive = True  # so the others still name it
    with cluster:
        (cache,) = import_cache(paths, "digits", [cluster.address(0)])
    assert cache.rows == 50


def test_another_cluster_at_the_address_of_a_node_is_left_alone(paths: Paths):
    """As where nodes name 127.0.0.1, and this host runs another Ignite. The rows come by a known server."""
    with cluster_of(2, drawings(50)) as cluster:
        cluster.servers[1].node = node_name(99)
        (cache,) = import_cache(paths, "digits", [cluster.address(0)])
        assert cache.rows == 50 and not cluster.servers[1].scanned
        assert cache.origin is not None and cache.origin["remote_bytes"] > 0


def odd(operation: int, answer: bytes, first: int = 1) -> Callable[[FakeServer, int, int], bytes | None]:
    """From its `first` request of this operation on, the server answers so and closes the connection."""
    return lambda server, op, count: answer if op == operation and count >= first else None


HTTP = b"HTTP/1.1 400 Bad Request\r\n\r\n"
SCAN_HEAD = struct.pack("<iqh", 100, 0, 0)
INACTIVE = pack_int(44) + struct.pack("<qhi", 1, 1, 1) + pack_string("the cluster\n  is inactive")


@pytest.mark.parametrize(
    ("behave", "message"),
    [
        (odd(HANDSHAKE, HTTP), "no server of Ignite: it answers as a web server does"),
        (odd(HANDSHAKE, b""), "has closed the connection.* If it speaks TLS"),
        (odd(HANDSHAKE, b"\x15\x03\x03\x00\x02"), "alert of TLS"),
        (odd(HANDSHAKE, pack_int(5) + b"\1\x0c\xff\0\0"), "no server of Ignite"),
        (odd(HANDSHAKE, pack_int(3) + b"\0"), "has closed the connection after 1 of 3 bytes"),
        (odd(SCAN, SCAN_HEAD + b"short"), "has closed the connection after 15 of 100 bytes"),
        (odd(SCAN, pack_int(-5)), "sent a message of -5 bytes"),
        (odd(SCAN, struct.pack("<iqh", 10, 77, 0)), "answered request 77"),
        (odd(SCAN, struct.pack("<i", MOST_MESSAGE_BYTES + 1)), "A row must be smaller than 256 MiB"),
        (odd(GET_NAMES, INACTIVE), r"the cluster is inactive. Look at the servers' logs"),
        (odd(GET_ENDPOINTS, struct.pack("<iqhqi", 22, 4, 0, 1, 10**9)), "elements are announced"),
    ],
)
def test_a_server_that_answers_oddly_is_named(
    paths: Paths, behave: Any, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "0.3")
    with cluster_of(1, drawings(10), behave) as cluster, pytest.raises(SourceError, match=message):
        import_cache(paths, "digits", [cluster.address()])
    assert Catalog(paths).caches() == []


def test_a_server_that_stops_answering_ends_in_bounded_time(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "0.2")
    release = threading.Event()

    def hang(server: FakeServer, operation: int, count: int) -> bytes | None:
        if operation == SCAN and count > 6:
            release.wait(60)
            return b""
        return None

    with (
        cluster_of(1, drawings(10), hang) as cluster,
        pytest.raises(SourceError, match=r"then nothing until its deadline"),
    ):
        import_cache(paths, "digits", [cluster.address()])
        release.set()
    assert Catalog(paths).caches() == []


def test_a_server_that_stops_altogether_is_given_up_after_a_few_timeouts(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
):
    """As a process that is paused: connections are taken in, and nothing is answered."""
    monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "0.2")
    release, tried = threading.Event(), []

    def hang(server: FakeServer, operation: int, count: int) -> bytes | None:
        if server.requests.get(SCAN, 0) < 9:
            return None
        tried.append(operation)
        release.wait(60)
        return b""

    with (
        cluster_of(1, drawings(100), hang) as cluster,
        pytest.raises(SourceError, match=r"Partition \d of cache CACHE must answer"),
    ):
        try:
            import_cache(paths, "digits", [cluster.address()])
        finally:
            release.set()
    assert SCAN in tried and len(tried) <= 7


def test_a_program_that_says_nothing_is_perhaps_another_one(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "0.2")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"ignite://127.0.0.1:{silent.getsockname()[1]}/CACHE"
        with pytest.raises(SourceError, match=r"at the handshake. Look whether another program listens"):
            import_cache(paths, "digits", [address])


def test_pages_without_rows_and_without_end_are_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        cluster_module, "decode_page", lambda contents, cursor: Page(0, contents[:0], True, 1)
    )
    with cluster_of(1, drawings(10)) as cluster:
        read = Cluster(parse_address(cluster.address()), ConnectionSettings(timeout=60))
        with read, pytest.raises(SourceError, match=r"16 pages without rows"):
            read.find_cache()
            read.scan([0], 4)


def test_more_rows_than_fit_into_memory_end_the_reading(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    """A server may announce few rows and send others without end."""
    monkeypatch.setattr(cluster_module, "_MOST_PARTITION_BYTES", 300)
    with (
        cluster_of(1, drawings(500, 1)) as cluster,
        pytest.raises(SourceError, match=r"must fit into memory 4 times.*more"),
    ):
        import_cache(paths, "digits", [cluster.address()])


def test_schemas_without_end_are_an_error():
    first = BinaryType(1, "example.Person")
    book = TypeBook(cast("Any", None), {1: first})
    schemas: dict[int, tuple[int, ...]] = {}

    def find_type(number: int) -> BinaryType:
        schemas[len(schemas)] = ()
        return BinaryType(number, "example.Person", (), dict(schemas))

    book._cluster = cast("Any", SimpleNamespace(find_type=find_type))
    with pytest.raises(SourceError, match="new schemas 1000 times"):
        for _ in range(2000):
            book.refresh(1, may_grow=True)


def test_a_page_that_is_too_large_is_asked_for_in_parts(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "MOST_MESSAGE_BYTES", 2000)
    with cluster_of(1, drawings(400)) as cluster:
        (cache,) = import_cache(paths, "digits", [cluster.address()])
    assert cache.rows == 400


def test_no_server_no_cache_and_no_rows_are_named(paths: Paths):
    with cluster_of(1, drawings(0)) as cluster:
        address = cluster.address()
        with pytest.raises(SourceError, match=r"has no rows"):
            import_cache(paths, "digits", [address])
        with pytest.raises(SourceError, match=r"Cache NONE must exist.*Received: CACHE, other"):
            import_cache(paths, "digits", [address.replace("CACHE", "NONE")])
    with pytest.raises(SourceError, match=r"can't be reached"):
        import_cache(paths, "digits", [address])


def test_a_wrong_password_is_final_and_not_shown(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    with cluster_of(1, drawings(10)) as cluster:
        cluster.password = "right one"
        with pytest.raises(SourceError, match=r"wants a user and a password. Received: no user"):
            import_cache(paths, "digits", [cluster.address()])
        monkeypatch.setenv("INSITU_IGNITE_USERNAME", "ann")
        monkeypatch.setenv("INSITU_IGNITE_PASSWORD", "wrong one")
        with pytest.raises(SourceError, match=r"Received: another user or password") as caught:
            import_cache(paths, "digits", [cluster.address()])
        assert "wrong one" not in str(caught.value) and "ann" not in str(caught.value)
        monkeypatch.setenv("INSITU_IGNITE_PASSWORD", "right one")
        (cache,) = import_cache(paths, "digits", [cluster.address()])
    assert cache.rows == 10


@pytest.fixture
def server_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """TLS of a server whose certificate is trusted, and is for another name than its address."""
    made = make_certificate("localhost")
    both = tmp_path / "both.pem"
    both.write_text(made.pem + made.key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    monkeypatch.setenv("INSITU_IGNITE_CA", str(both))
    return context


def test_a_client_has_a_certificate_for_servers_that_want_one(
    paths: Paths, server_tls: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = make_certificate("client")
    (tmp_path / "client.pem").write_text(made.pem)
    (tmp_path / "client.key").write_text(made.key_pem)
    server_tls.verify_mode = ssl.CERT_REQUIRED
    server_tls.load_verify_locations(tmp_path / "client.pem")
    monkeypatch.setenv("INSITU_IGNITE_SERVER_NAME", "localhost")
    with cluster_of(1, drawings(10), tls=server_tls) as cluster:
        with pytest.raises(SourceError, match=r"If it wants a certificate, name it by INSITU_IGNITE_CERT"):
            import_cache(paths, "digits", [cluster.address()])
        monkeypatch.setenv("INSITU_IGNITE_CERT", str(tmp_path / "client.pem"))
        monkeypatch.setenv("INSITU_IGNITE_KEY", str(tmp_path / "client.key"))
        (cache,) = import_cache(paths, "digits", [cluster.address()])
    assert cache.rows == 10


def test_a_certificate_for_another_name_is_refused(paths: Paths, server_tls: ssl.SSLContext):
    with (
        cluster_of(1, drawings(10), tls=server_tls) as cluster,
        pytest.raises(SourceError, match=r"for the server's name.*INSITU_IGNITE_SERVER_NAME"),
    ):
        import_cache(paths, "digits", [cluster.address()])


def test_tls_that_one_side_lacks_is_named(
    paths: Paths, server_tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
):
    with cluster_of(1, drawings(10)) as cluster, pytest.raises(SourceError, match=r"doesn't speak TLS"):
        import_cache(paths, "digits", [cluster.address()])
    monkeypatch.setenv("INSITU_IGNITE_TLS", "0")
    with (
        cluster_of(1, drawings(10), tls=server_tls) as cluster,
        pytest.raises(SourceError, match=r"INSITU_IGNITE_CA"),
    ):
        import_cache(paths, "digits", [cluster.address()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"append": True}, "Received: --append"),
        ({"resume": True}, "Received: --resume"),
        ({"format": "npy", "column": "x"}, "Received: --format and --column"),
        ({"label_from_filename": True}, "Received: --label-from-filename"),
    ],
)
def test_options_of_files_are_refused(paths: Paths, options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        import_cache(paths, "digits", ["ignite://127.0.0.1:1/C"], **options)


def test_options_of_ignite_are_refused_for_files(paths: Paths, tmp_path: Path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"--tensor is for tables"):
        import_cache(paths, "a", [str(tmp_path / "a.npy")], tensor=TENSOR)


def test_several_addresses_are_refused(paths: Paths):
    with pytest.raises(InputError, match=r"imported alone. Received: 2 sources"):
        import_cache(paths, "a", ["ignite://a/C", "ignite://b/C"])


def test_a_schema_that_comes_while_rows_are_read_is_asked_for(paths: Paths):
    """An old field that new objects have alone: a new schema without new fields."""
    kind = binary_type("example.Person", [("age", 3), ("height", 6)], ["age", "height"])
    later = binary_type("example.Person", [("age", 3), ("height", 6)], ["age", "height"], ["age"])
    both = binary_object(kind, [("age", number(3, "i", 1)), ("height", number(6, "d", 1.5))])
    one = binary_object(kind, [("age", number(3, "i", 2))])
    cache = FakeCache([[(number(4, "q", i), both) for i in range(300)], [(number(4, "q", 300), one)]], [kind])

    def learn(server: FakeServer, operation: int, count: int) -> bytes | None:
        if operation == SCAN and server.requests.get(GET_TYPE):
            cache.types = [later]
        return None

    with cluster_of(1, cache, learn) as cluster:
        (made,) = import_cache(paths, "people", [cluster.address()])
    assert made.rows == 301 and np.isnan(rows_of(paths, made)["height"][300])


def test_a_field_that_comes_while_rows_are_read_is_an_error(paths: Paths):
    kind = binary_type("example.Person", [("age", 3)])
    later = binary_type("example.Person", [("age", 3), ("city", 9)], ["age"], ["age", "city"])
    old = binary_object(kind, [("age", number(3, "i", 1))])
    new = binary_object(kind, [("age", number(3, "i", 2)), ("city", pack_string("Rome"))])
    cache = FakeCache([[(number(4, "q", i), old) for i in range(300)], [(number(4, "q", 300), new)]], [kind])

    def learn(server: FakeServer, operation: int, count: int) -> bytes | None:
        if operation == SCAN and server.requests.get(GET_TYPE):
            cache.types = [later]
        return None

    with (
        cluster_of(1, cache, learn) as cluster,
        pytest.raises(SourceError, match=r"must stay as they are.*new schema with city"),
    ):
        import_cache(paths, "people", [cluster.address()])


def test_a_cache_is_described(paths: Paths):
    with cluster_of(2, drawings(40)) as cluster:
        found = describe_ignite(cluster.address(), count_rows=False)
        assert (found["rows"], found["partitions"], found["topology"]) == (40, 5, [1, 0])
        assert [node["primaries"] for node in found["nodes"]] == [3, 2]
        assert [column["name"] for column in found["columns"]] == ["key", "image", "label"]
        counted = describe_ignite(cluster.address(), count_rows=True)
    assert [part["rows"] for part in counted["partition_list"]] == [8] * 5


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_pages_are_an_error_of_insitu(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    """A server that sends a page with some bytes changed: rows, or an error that says what is wrong."""
    cache = drawings(20, 1)
    page = bytearray(b"".join(key + value for key, value in cache.partitions[0]))
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(page) - 1), st.integers(0, 255)), min_size=1, max_size=4)
    ):
        page[place] = value
    cache.partitions = [[(bytes(page), b"")] + [(b"", b"")] * 19]
    with pytest.MonkeyPatch.context() as monkeypatch, cluster_of(1, cache) as cluster:
        monkeypatch.setattr(cluster_module, "_PAUSES", (0.0,))
        with contextlib.suppress(InsituError):
            import_cache(Paths(tmp_path_factory.mktemp("home")), "digits", [cluster.address()])


def test_what_is_tried_again_is_told_once_for_each_reason(caplog: pytest.LogCaptureFixture):
    with (
        cluster_of(1, drawings(10)) as fake,
        Cluster(parse_address(fake.address()), ConnectionSettings(timeout=0.2)) as cluster,
    ):
        cluster.find_cache()
        cluster.find_layout()
        fake.servers[0].stop()
        with pytest.raises(SourceError, match=r"The cluster must answer"):
            cluster.count_rows()
    told = [record.getMessage() for record in caplog.records]
    assert told and len(told) == len(set(told))
