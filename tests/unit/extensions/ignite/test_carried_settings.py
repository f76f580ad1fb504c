"""Settings of connections that one host sends to another."""

from __future__ import annotations

import json
import os
import ssl
from pathlib import Path
from typing import Any

import pytest

from insitu.base.errors import InputError
from insitu.base.net.certificates import make_certificate
from insitu.extensions.ignite.carried_settings import carry_settings, take_settings


def write(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_another_host_connects_as_this_one_would(tmp_path: Path):
    own = make_certificate()
    files = {
        "INSITU_IGNITE_CA": write(tmp_path / "ca.pem", own.pem),
        "INSITU_IGNITE_CERT": write(tmp_path / "own.pem", own.pem),
        "INSITU_IGNITE_KEY": write(tmp_path / "own.key", own.key_pem),
        "INSITU_IGNITE_CREDENTIALS": write(tmp_path / "user", "ada\nhidden\n"),
    }
    given = {**files, "INSITU_IGNITE_SERVER_NAME": "grid", "INSITU_IGNITE_TIMEOUT": "7", "PATH": "/bin"}
    carried = json.loads(json.dumps(carry_settings(given)))
    for path in files.values():
        os.unlink(path)
    before = set(os.listdir("/proc/self/fd"))
    with take_settings(carried) as settings:
        assert (settings.user, settings.password, settings.timeout) == ("ada", "hidden", 7.0)
        assert settings.server_name == "grid"
        assert settings.tls is not None and settings.tls.verify_mode == ssl.CERT_REQUIRED
        assert settings.tls.cert_store_stats()["x509"] == 1
    assert set(os.listdir("/proc/self/fd")) == before, "what was in memory is gone"
    assert "PATH" not in carried and str(tmp_path) not in json.dumps(carried)


def test_without_settings_nothing_is_carried(tmp_path: Path):
    assert carry_settings({}) == {}
    assert carry_settings({"INSITU_IGNITE_TLS": "0", "INSITU_IGNITE_CA": "/nowhere"}) == {
        "INSITU_IGNITE_TLS": "0"
    }
    with take_settings({}) as settings:
        assert settings.tls is None and settings.user == ""
    old = {"IGNITE_DATASET_USERNAME": "ada", "IGNITE_DATASET_PASSWORD": "hidden"}
    with take_settings(carry_settings(old)) as settings:
        assert (settings.user, settings.password) == ("ada", "hidden")


@pytest.mark.parametrize(
    "given",
    [
        None,
        ["hidden"],
        {"INSITU_IGNITE_PASSWORD": 5, "INSITU_IGNITE_USERNAME": "hidden"},
        {"LD_PRELOAD": "hidden"},
        {"INSITU_IGNITE_CREDENTIALS": "/hidden"},
        {"INSITU_IGNITE_CA": "hidden" * (1 << 20)},
    ],
)
def test_other_settings_are_refused_and_not_shown(given: Any):
    with pytest.raises(InputError, match="Received: something else") as caught, take_settings(given):
        pass
    assert "hidden" not in str(caught.value)
