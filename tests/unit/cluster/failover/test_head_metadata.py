"""What `insitu up --metadata` refuses, and how the head of a home begins and ends to lead, by a real etcd."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from etcd_servers import ETCD, Etcd, add_users, make_certificates, needs_etcd
from free_ports import free_addresses

from insitu.base.errors import (
    ClusterError,
    GridError,
    InputError,
    InsituError,
    MetadataRefused,
    StoreUnavailable,
)
from insitu.base.net.certificates import make_certificate
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, Column, NodeId, PartitionInfo
from insitu.cluster.failover import head_metadata
from insitu.cluster.failover.head_metadata import (
    begin_to_lead,
    drop_cluster,
    end_cluster,
    end_leading,
    prepare_etcd,
)
from insitu.cluster.leases.leading import Lead
from insitu.cluster.wire.records import AgentRecord, change_head, read_head, write_agent
from insitu.grid import Catalog, is_catalog_copy
from insitu.grid.shared_files import NameTree
from insitu.metadata import HEAD_KEY, MetadataSettings, open_etcd, read_leader, read_settings, write_settings
from insitu.metadata.etcd import EtcdStore

pytestmark = needs_etcd
PARTITION = PartitionInfo(0, 1, 2, "crc32:00000000", (NodeId("a"),))
SPEC = CacheSpec("digits", 1, (Column("x", "uint8", (2,)),), (PARTITION,), 0, None, 1.5, ())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    if ETCD is None:
        pytest.skip("no etcd")
    made = Etcd(tmp_path_factory.mktemp("etcd")).wait()
    yield made
    made.close()


@pytest.fixture
def etcd(server: Etcd) -> Etcd:
    server.ask(0, "kv/deleterange", {"key": "AA==", "range_end": "AA=="})
    return server


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    (tmp_path / "home").mkdir(mode=0o700)
    return Paths(tmp_path / "home")


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Where heads answer."""
    found: set[str] = set()
    monkeypatch.setattr(head_metadata, "answers_as_head", lambda address, token: address in found)
    monkeypatch.setattr(head_metadata, "read_token", lambda paths: "token")
    return found


def assert_refused(paths: Paths, url: str, kind: type[InsituError], said: str) -> None:
    """Assert that a new cluster can't have this etcd, and that the home stays as it was."""
    with pytest.raises(kind, match=said):
        prepare_etcd(paths, url)
    assert list(paths.home.iterdir()) == []


def test_a_cluster_gets_an_etcd_once(etcd: Etcd, paths: Paths, tmp_path: Path) -> None:
    prepare_etcd(paths, etcd.url)
    record, settings = read_head(paths), read_settings(paths)
    assert record is not None and record.has_metadata and settings is not None
    assert settings.cluster == record.cluster and paths.metadata_settings.stat().st_mode & 0o777 == 0o600
    prepare_etcd(paths, etcd.url)
    other = etcd.url.replace("127.0.0.1", "localhost")  # the same one, by another name
    prepare_etcd(paths, other)
    settings = read_settings(paths)
    assert settings is not None and settings.url == other
    second = Paths(tmp_path / "second")
    second.home.mkdir(mode=0o700)
    assert_refused(second, etcd.url, InputError, f"an etcd with that of {record.cluster}")


def test_another_store_than_the_one_that_a_cluster_was_made_with_is_refused(
    etcd: Etcd, paths: Paths, tmp_path: Path
) -> None:
    prepare_etcd(paths, etcd.url)
    another = Etcd(tmp_path / "another").wait()
    try:
        with pytest.raises(InputError, match="keeps the metadata store that it was made with") as refused:
            prepare_etcd(paths, another.url)
        assert etcd.url in str(refused.value) and "Leave --metadata out" in str(refused.value)
    finally:
        another.close()
    embedded = Paths(tmp_path / "embedded")
    change_head(embedded, has_metadata=True)
    with pytest.raises(
        InputError, match=r"a cluster whose metadata is in .*metadata.sqlite. Leave --metadata"
    ):
        prepare_etcd(embedded, etcd.url)
    with pytest.raises(InputError, match="must hold no password"):
        prepare_etcd(embedded, "etcd://me:sesame@h1:2379")


def test_an_etcd_that_cannot_be_used_is_named(
    etcd: Etcd, paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (address,) = free_addresses(1)
    said = f"(?s)Most members of etcd must answer.*{address}.*etcdctl endpoint health"
    assert_refused(paths, f"etcd://{address}", StoreUnavailable, said)
    assert_refused(paths, "file:///tmp/x", InputError, "--metadata names an etcd as etcd://HOST:PORT")
    assert_refused(paths, "etcd://me:sesame@h1:2379", InputError, "Put it into a file")
    for url in ("http://me:sesame@h1:2379", "ETCD://me:sesame@h1:2379", "etcd:me:sesame@h1:2379"):
        with pytest.raises(InputError, match=r"(?i)(http|etcd)://...@h1:2379") as refused:
            prepare_etcd(paths, url)
        assert "sesame" not in str(refused.value)
    ask = EtcdStore._call
    monkeypatch.setattr(
        EtcdStore,
        "_call",
        lambda store, path, *rest: {"etcdserver": "3.3.27"} if path == "version" else ask(store, path, *rest),
    )
    assert_refused(paths, etcd.url, MetadataRefused, r"3\.4 or newer. Received: '3\.3\.27'. Update it")


def test_a_wrong_password_is_named_and_a_right_one_is_kept_with_the_settings(
    paths: Paths, tmp_path: Path
) -> None:
    etcd = Etcd(tmp_path / "etcd").wait()
    try:
        add_users(etcd, {"me": b"/insitu/"}, "sesame")
        password = tmp_path / "password"
        password.write_text("wrong")
        password.chmod(0o600)
        url = f"etcd://me@{etcd.clients[0]}?password={password}"
        assert_refused(paths, etcd.url, MetadataRefused, "Give etcd://USER@")
        assert_refused(paths, url, MetadataRefused, "invalid user ID or password. Give etcd://USER@")
        password.chmod(0o644)
        assert_refused(paths, url, InputError, "Run chmod 600")
        password.chmod(0o600)
        password.write_text("sesame")
        prepare_etcd(paths, url)
        password.unlink()
        settings = read_settings(paths)
        assert settings is not None
        open_etcd(settings).close()
    finally:
        etcd.close()


def test_a_wrong_certificate_is_named_and_a_right_one_is_kept(paths: Paths, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    options = ["--cert-file", "server.pem", "--key-file", "server.key", "--trusted-ca-file", "ca.pem"]
    options = [str(tmp_path / each) if "." in each else each for each in options]
    etcd = Etcd(tmp_path / "etcd", options=[*options, "--client-cert-auth"], scheme="https")
    own = f"certificate={tmp_path}/client.pem&key={tmp_path}/client.key"
    try:
        (tmp_path / "other.pem").write_text(make_certificate().pem)
        for _ in range(20):
            try:
                prepare_etcd(paths, f"{etcd.url}?ca={tmp_path}/ca.pem&{own}")
                break
            except StoreUnavailable:
                continue
        settings = read_settings(paths)
        assert settings is not None
        fresh = Paths(tmp_path / "fresh")
        fresh.home.mkdir(mode=0o700)
        for query in (f"?ca={tmp_path}/other.pem&{own}", f"?ca={tmp_path}/ca.pem"):
            assert_refused(fresh, f"{etcd.url}{query}", MetadataRefused, "as this etcd wants them")
        assert_refused(fresh, f"{etcd.url}?ca={tmp_path}/none.pem", InputError, "must be PEM files")
        for name in ("client.pem", "client.key"):
            (tmp_path / name).unlink()
        open_etcd(settings).close()
    finally:
        etcd.close()


@pytest.fixture
def lead(answering: set[str]) -> Iterator[Callable[..., Lead]]:
    """Have a home lead, where no other one does."""
    made = []

    def begin(paths: Paths, address: str = "h:1") -> Lead:
        settings = read_settings(paths)
        assert settings is not None
        made.append(begin_to_lead(paths, settings, address, "")[1])
        return made[-1]

    yield begin
    for each in made:
        each.close()
        each.store.close()


def make_home_of_agent(paths: Paths, home: Path) -> Paths:
    """Make the home of an agent, as it is once the agent has joined."""
    settings, record = read_settings(paths), read_head(paths)
    assert settings is not None and record is not None
    other = Paths(home)
    other.node("a").mkdir(parents=True)
    write_agent(
        other, NodeId("a"), AgentRecord(record.cluster, "h:1", record.epoch, record.instance, "", 0, 0)
    )
    write_settings(other, settings)
    return other


def test_heads_of_several_homes_lead_one_after_the_other(
    etcd: Etcd, paths: Paths, tmp_path: Path, lead: Callable[..., Lead]
) -> None:
    prepare_etcd(paths, etcd.url)
    first = lead(paths)
    first.options = {"copy_lost_after": None}
    first._write_options()
    Catalog(paths).publish([SPEC])
    change_head(paths, hosts={"h": "stop"})
    other = make_home_of_agent(paths, tmp_path / "other")
    with pytest.raises(ClusterError, match="the one at h:1 leads"):
        lead(other, "h:2")
    assert read_head(other) is None
    first.close()  # it is suspended, and its lease ends
    first.store.revoke(first.won.lease)
    second = lead(other, "h:2")
    record, before = read_head(other), read_head(paths)
    assert record is not None and before is not None and record.copy_lost_after is None
    assert record.cluster == before.cluster and record.epoch == before.epoch + (1 << 20)
    assert Catalog(other).caches() == [SPEC]
    # The home of before changes nothing. Once its head knows that, it has a copy.
    with pytest.raises(GridError, match="the head that leads is the one at h:2"):
        Catalog(paths).delete("digits")
    first._end()
    assert end_leading(paths, first, down=False)
    record = read_head(paths)
    assert record is not None and record.replaced_by == "h:2" and is_catalog_copy(paths)
    # It leads again, and the other home is that of an agent alone.
    Catalog(other).delete("digits")
    second.resign()
    assert not end_leading(other, second, down=False)
    assert read_head(other) is None and is_catalog_copy(other) and not other.fence.exists()
    third = lead(paths)
    record = read_head(paths)
    assert Catalog(paths).caches() == [] and record is not None and not record.replaced_by
    assert record.hosts == {"h": "stop"}
    third.close()


def test_a_head_that_was_killed_is_followed_at_once_by_another_of_its_home(
    etcd: Etcd, paths: Paths, lead: Callable[..., Lead]
) -> None:
    prepare_etcd(paths, etcd.url)
    lead(paths).close()  # nobody has said that it ended
    again = lead(paths)
    assert again.may_lead()
    again.close()


def test_a_copy_of_the_home_of_a_head_that_lives_does_not_take_its_place(
    etcd: Etcd, paths: Paths, lead: Callable[..., Lead], answering: set[str]
) -> None:
    prepare_etcd(paths, etcd.url)
    first = lead(paths)
    answering.add("h:1")
    with pytest.raises(ClusterError, match="the one at h:1 leads"):
        lead(paths, "h:2")
    assert first.may_lead()


def test_nobody_leads_a_cluster_that_was_ended_until_a_person_says_so(
    etcd: Etcd, paths: Paths, tmp_path: Path, lead: Callable[..., Lead]
) -> None:
    prepare_etcd(paths, etcd.url)
    first = lead(paths)
    record = read_head(paths)
    assert record is not None
    end_leading(paths, first, down=True)
    assert end_cluster(paths, record) == {}
    settings = read_settings(paths)
    assert settings is not None
    store = open_etcd(settings)
    leader = read_leader(store.get([HEAD_KEY])[0][HEAD_KEY])
    assert leader is not None and leader.is_down
    lead(paths).close()
    # One that has ended by itself is ended, too, and one of another home is not.
    record = read_head(paths)
    assert record is not None and end_cluster(paths, record) == {}
    other = make_home_of_agent(paths, tmp_path / "other")
    second = lead(other, "h:2")
    with pytest.raises(ClusterError, match="the one at h:2 leads"):
        end_cluster(paths, record)
    end_leading(other, second, down=True)
    assert end_cluster(paths, record) == {}
    drop_cluster(paths)
    with pytest.raises(InputError, match="none of"):
        open_etcd(settings)
    store.close()


def test_names_of_files_stay(etcd: Etcd, paths: Paths, tmp_path: Path, lead: Callable[..., Lead]) -> None:
    prepare_etcd(paths, etcd.url)
    first = lead(paths)
    NameTree(first.make_store()).make_folder("v", "x", secrets.token_hex(16))
    first.resign()
    other = make_home_of_agent(paths, tmp_path / "other")
    second = lead(other, "h:2")
    assert NameTree(second.make_store()).look("v", "x") is not None
    with pytest.raises(StoreUnavailable):
        NameTree(first.make_store()).make_folder("v", "y", secrets.token_hex(16))
    second.close()


def test_a_cluster_whose_own_etcd_has_ended_is_down(paths: Paths) -> None:
    record = change_head(paths, has_metadata=True)
    url = f"etcd://{free_addresses(1)[0]}"
    write_settings(paths, MetadataSettings(record.cluster, url))
    assert "can't be asked" in str(end_cluster(paths, record))
    write_settings(paths, MetadataSettings(record.cluster, url, peers="a=https://h:1"))
    assert end_cluster(paths, record) == {}
    drop_cluster(paths)
