"""What a home keeps about the etcd of its cluster."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from etcd_servers import Etcd, needs_etcd

from insitu.base.errors import CorruptMetadata, InputError
from insitu.base.paths import Paths
from insitu.metadata import (
    Put,
    drop_etcd,
    encode_settings,
    open_etcd,
    parse_settings,
    read_settings,
    read_url,
    write_settings,
)


def test_settings_hold_what_the_files_held_and_stay_private(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("sesame\n")
    password.chmod(0o600)
    settings = read_url(f"etcd://me@h:1?password={password}", "c")
    password.unlink()
    assert parse_settings(encode_settings(settings)) == settings
    assert settings.files == {"password": "sesame"} and "sesame" not in repr(settings)
    paths = Paths(tmp_path)
    assert read_settings(paths) is None
    write_settings(paths, settings)
    assert read_settings(paths) == settings
    assert paths.metadata_settings.stat().st_mode & 0o777 == 0o600
    paths.metadata_settings.write_text('{"cluster": "c", "url": "etcd://h:1", "files": {"password": 1}}')
    with pytest.raises(CorruptMetadata, match="must say which etcd"):
        read_settings(paths)
    with pytest.raises(InputError, match="--metadata names an etcd"):
        read_url("file:///tmp/x", "c")
    with pytest.raises(ValueError):
        parse_settings({"cluster": "c", "url": "/tmp/other.sqlite", "files": {}})


@needs_etcd
def test_an_etcd_holds_one_cluster_until_that_is_dropped(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path / "etcd").wait()
    try:
        one, other = (read_url(etcd.url, name) for name in ("one", "other"))
        store = open_etcd(one, create=True)
        store.transact([], [Put("a", b"1")], secrets.token_hex(16))
        store.close()
        open_etcd(one, create=True).close()
        with pytest.raises(InputError, match="an etcd with that of one"):
            open_etcd(other, create=True)
        with pytest.raises(InputError, match="none of other, but of one"):
            open_etcd(other)
        drop_etcd(one)
        open_etcd(other, create=True).close()
    finally:
        etcd.close()
