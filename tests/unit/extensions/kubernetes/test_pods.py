"""What runs in the pods, as far as no head is needed. tests/process/test_k8s_cluster.py runs them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from insitu.base.errors import InputError
from insitu.extensions.kubernetes import pods
from insitu.extensions.kubernetes.pods import prepare_home, run_head_here, run_store_here, run_tasks_here


def modes_of(home: Path) -> dict[str, int]:
    return {str(p.relative_to(home)): stat.S_IMODE(p.lstat().st_mode) for p in [home, *home.rglob("*")]}


def test_rights_that_the_group_was_given_are_taken_back(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "jobs" / "a").mkdir(parents=True, mode=0o700)
    (home / "token").write_text("secret")
    (home / "jobs" / "a" / "run.sh").write_text("")
    (home / "jobs" / "link").symlink_to("/etc/passwd")
    other = Path("/etc/passwd").stat().st_mode
    for each in (home, *home.rglob("*")):
        if not each.is_symlink():  # as a kubelet does for fsGroup
            each.chmod(0o2770 if each.is_dir() else 0o660)
    (home / "jobs" / "a" / "run.sh").chmod(0o770)
    prepare_home(home)
    found = modes_of(home)
    found.pop("jobs/link")
    assert found == {".": 0o700, "jobs": 0o700, "jobs/a": 0o700, "token": 0o600, "jobs/a/run.sh": 0o700}
    assert Path("/etc/passwd").stat().st_mode == other


def test_a_home_that_is_private_is_not_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    prepare_home(home)
    assert not home.exists(), "insitu makes it, with its own modes"
    home.mkdir(mode=0o700)
    monkeypatch.setattr(os, "fwalk", lambda *_, **__: pytest.fail("walked"))
    prepare_home(home)


@pytest.mark.parametrize(("code", "of_pod"), [(0, 0), (7, 7), (139, 139), (137, 1), (143, 1)])
def test_a_job_that_was_killed_ends_its_pod_for_good(
    code: int, of_pod: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "start_logging", lambda: None)
    monkeypatch.setattr(pods.signal, "signal", lambda *_: None)
    monkeypatch.setattr("insitu.cluster.keep_server", lambda paths, job, start, ending: code)
    variables = {"POD_IP": "10.0.0.1", "INSITU_TOKEN_FILE": "token", "INSITU_HOME": "home"}
    assert run_tasks_here("job", "store-0", variables) == of_pod


def test_outside_of_a_pod_it_is_said_what_to_use() -> None:
    with pytest.raises(InputError, match=r"no POD_IP, INSITU_TOKEN_FILE, INSITU_HOME\. Use `insitu up` and"):
        run_head_here({})
    with pytest.raises(InputError, match=r"no INSITU_TOKEN_FILE, INSITU_HOME\."):
        run_store_here("head:7070", {"POD_IP": "10.0.0.1"})
