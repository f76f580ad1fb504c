"""What is said where Ray can't read. With Ray itself: tests/process/test_ray_import.py."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from insitu.base.errors import InputError
from insitu.grid.ray_data import session
from insitu.grid.ray_data.readers import ReaderRequest
from insitu.grid.ray_data.session import RaySession, describe_failure, find_damaged_picture

CSV = ReaderRequest("csv")


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)


def test_what_is_not_installed_is_named(without_ray: None) -> None:
    with pytest.raises(InputError, match=r"Received: a Python without ray.*pip install 'insitu\[ray-data\]'"):
        RaySession(CSV).connect(to_cluster=False)


def test_nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_DATA_WEBDATASET_ALLOW_UNSAFE_DESERIALIZATION", "1")
    with pytest.raises(InputError, match=r"unpickles nothing.*Unset it"):
        RaySession(CSV).connect(to_cluster=False)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://head:10001", "which is of Ray's client"),
        ("", "Received: a machine without Ray. Join the cluster"),
    ],
)
def test_nodes_read_only_in_a_cluster(monkeypatch: pytest.MonkeyPatch, address: str, message: str) -> None:
    ray = SimpleNamespace(data=SimpleNamespace(), is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", ray.data)
    monkeypatch.setattr(session, "runs_raylet", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(InputError, match=message):
        RaySession(CSV).connect(to_cluster=True)


def test_the_first_error_of_a_trace_says_why() -> None:
    error = RuntimeError(
        "ray::ReadImage() (pid=1)\n  File 'x', line 1\n    else: Image.open(x)\n"
        "OSError: image file is truncated\n\n"
        "The above exception was the direct cause of the following exception:\n\n  File 'y', line 2\n"
        "RuntimeError: Failed to read.\nTo change retry attempts, backoff and so on, set them in DataContext"
    )
    assert describe_failure(error) == "OSError: image file is truncated"
    assert describe_failure(ValueError("all\nis lost")) == "is lost"


def test_the_last_line_of_a_trace_says_why() -> None:
    error = ValueError("ray::ReadCSV() (pid=1)\n  File 'x', line 1\nArrowInvalid: CSV parse error")
    assert describe_failure(error) == "ArrowInvalid: CSV parse error"
    assert describe_failure(ValueError()) == "ValueError"
    assert len(describe_failure(ValueError("x" * 1000))) == 300


def test_a_damaged_picture_is_named(tmp_path: Path) -> None:
    good, cut = tmp_path / "good.png", tmp_path / "cut.png"
    Image.effect_noise((40, 40), 9).save(good)
    cut.write_bytes(good.read_bytes()[:-400])
    found = find_damaged_picture([str(good), str(cut)])
    assert found.startswith(f"{cut}: ") and "truncated" in found
    assert find_damaged_picture([str(good)]) == find_damaged_picture(["s3://a/b.png"]) == ""
