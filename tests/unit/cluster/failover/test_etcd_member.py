"""The member of etcd in an agent's home: what is started, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.cluster.failover.etcd_member import (
    do_about_member,
    find_binary,
    prepare_member,
    start_member,
)
from insitu.cluster.failover.etcd_process import make_command
from insitu.cluster.failover.etcd_record import list_environment, read_member

TOKEN = "0123456789abcdef"


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    (tmp_path / "home").mkdir(mode=0o700)
    name_binary(tmp_path, monkeypatch, "echo 'etcd Version: 3.5.17'")
    return Paths(tmp_path / "home")


def name_binary(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "etcd").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "etcd").chmod(0o700)
    monkeypatch.setenv("INSITU_ETCD", str(folder / "etcd"))


def test_an_etcd_that_is_missing_or_old_is_refused(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_binary() == str(tmp_path / "etcd")
    for script in ("echo 'etcd Version: 3.3.27'", "echo 'etcd Version: 2.3.8'", "exit 1", "echo hello"):
        name_binary(tmp_path, monkeypatch, script)
        with pytest.raises(InputError, match=r"insitu starts etcd 3\.4 or newer"):
            prepare_member(paths, "127.0.0.1")
    monkeypatch.setenv("INSITU_ETCD", "/nowhere")
    with pytest.raises(InputError, match="INSITU_ETCD=/nowhere, which is no program"):
        find_binary()
    monkeypatch.delenv("INSITU_ETCD")
    monkeypatch.setenv("PATH", str(tmp_path / "home"))
    with pytest.raises(InputError, match="Received: no etcd on PATH"):
        find_binary()
    assert not paths.etcd.exists()


def test_name_and_ports_are_drawn_once(paths: Paths) -> None:
    first = do_about_member(paths, "prepare", "127.0.0.1", "", [])
    assert (
        first == do_about_member(paths, "prepare", "127.0.0.1", "", []) and first["client"] != first["peer"]
    )
    assert paths.etcd.stat().st_mode & 0o777 == 0o700
    assert paths.etcd_file("member.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(InputError, match="prepared, started or stopped"):
        do_about_member(paths, "other", "", "", [])
    assert do_about_member(paths, "stop", "", "", []) == {}


def test_a_member_of_another_cluster_or_without_its_data_is_not_started(paths: Paths) -> None:
    order = {"cluster": "c", "peers": "x=https://h:1", "new": True}
    assert start_member(paths, TOKEN, order) == {}  # this home has none
    prepare_member(paths, "127.0.0.1")
    assert start_member(paths, TOKEN, order) == {}  # it isn't one of these
    record = read_member(paths)
    assert record is not None
    order["peers"] = f"{record.name}=https://{record.peer}"
    with pytest.raises(ClusterError, match="A member of etcd needs its data"):
        start_member(paths, TOKEN, {**order, "new": False})
    with pytest.raises(InputError, match=r"cluster d, and .* of cluster c"):
        start_member(paths, TOKEN, {**order, "cluster": "d"})
    # This binary ends at once.
    with pytest.raises(ClusterError, match="it has ended, or doesn't"):
        start_member(paths, TOKEN, order)
    assert all(paths.etcd_file(name).stat().st_mode & 0o777 == 0o600 for name in ("ca.pem", "member.key"))


def test_a_folder_that_others_may_write_is_not_believed(paths: Paths) -> None:
    prepare_member(paths, "127.0.0.1")
    paths.etcd.chmod(0o777)
    with pytest.raises(InputError, match="others may write"):
        read_member(paths)


def test_all_connections_want_certificates(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_member(paths, "127.0.0.1")
    record = read_member(paths)
    assert record is not None
    command = make_command(paths, record, "/bin/etcd")
    assert {"--client-cert-auth=true", "--peer-client-cert-auth=true"} <= set(command)
    assert not any("http://" in each for each in command)
    monkeypatch.setenv("ETCD_CLIENT_CERT_AUTH", "false")
    assert "ETCD_CLIENT_CERT_AUTH" not in list_environment()
