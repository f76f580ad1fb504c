"""A reservation ends with the process that runs the job's tasks on its node."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from insitu.cluster.ray import ray_cluster
from insitu.cluster.ray.ray_cluster import watch_lock


def test_a_process_that_never_begins_is_not_waited_for_without_end(tmp_path: Path) -> None:
    watch_lock(tmp_path / "none", begin=0.05, end=9e9, pause=0.001)


def test_a_held_lock_is_watched_until_it_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    seen: list[bool] = []
    looked = threading.Event()
    real = ray_cluster.is_locked

    def look(lock: Path) -> bool:
        seen.append(real(lock))
        if len(seen) == 20:
            looked.set()
        return seen[-1]

    monkeypatch.setattr(ray_cluster, "is_locked", look)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        watch = threading.Thread(target=watch_lock, args=(path, 60.0, 0.2, 0.001))
        watch.start()
        assert looked.wait(60) and watch.is_alive()
    watch.join(60)
    assert not watch.is_alive() and seen[0] and not seen[-1]
