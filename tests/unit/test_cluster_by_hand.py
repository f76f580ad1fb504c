"""Clusters by TF_CONFIG, without a job: who a process is, and the secret that it shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from insitu.base.context import Context, find_secret, read_cluster, read_context
from insitu.base.errors import InputError, TrainingError
from insitu.base.paths import Paths
from insitu.base.spec import TaskId
from insitu.train.elastic.membership import SynchronousMembership
from insitu.train.parameter_server.server_task import serve_or_configure

LOCAL = ("127.0.0.1:2301", "localhost:2302")
REMOTE = ("10.0.0.1:2301", "10.0.0.2:2301")


def environment(role: str, index: int = 0, **cluster: Any) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})}


def test_each_worker_has_a_shard() -> None:
    context = read_context(environment("worker", 1, worker=LOCAL))
    assert (context.task, context.shards, context.num_shards) == (TaskId("worker", 1), (1,), 2)
    assert context.workers == LOCAL and context.by_hand and not context.is_chief


def test_a_chief_is_the_first_worker() -> None:
    cluster = {"chief": ["localhost:1"], "worker": ["localhost:2", "localhost:3"]}
    chief, last = (read_context(environment(*task, **cluster)) for task in (("chief", 0), ("worker", 1)))
    assert chief.is_chief and chief.task == TaskId("worker", 0) and chief.shards == (0,)
    assert last.task == TaskId("worker", 2) and last.shards == (2,) and not last.is_chief
    assert chief.workers == last.workers == ("localhost:1", "localhost:2", "localhost:3")


@pytest.mark.parametrize("text", ['{"cluster": {}}', '{"cluster": {"worker": ["a:1", "b:1"]}}', "{}"])
def test_a_process_without_a_place_is_alone(text: str) -> None:
    context = read_context({"TF_CONFIG": text})
    assert (context.task, context.shards, context.num_shards) == (TaskId("worker", 0), (0,), 1)
    assert not context.by_hand


def test_a_cluster_of_one_is_alone() -> None:
    context = read_context(environment("worker", worker=["10.0.0.1:1"]))
    assert context.num_shards == 1 and not context.by_hand and context.secret() is None


def test_a_job_says_who_its_tasks_are() -> None:
    given = {**environment("worker", 1, worker=LOCAL), "INSITU_JOB_ID": "j-1", "INSITU_TASK": "worker:0"}
    assert read_context(given).task == TaskId("worker", 0) and not read_context(given).by_hand


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}, "must be in its cluster"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "master", "index": 0}}, "must be one of chief"),
        (
            {"cluster": {"worker": ["a:1"], "trainer": ["b:1"]}, "task": {"type": "worker", "index": 0}},
            "Received: trainer. Name the tasks that train worker",
        ),
        ({"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "chief", "index": 1}}, "has one chief"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}, "must have the form"),
        ({"cluster": ["a:1"], "task": {"type": "worker"}}, "must have the form"),
    ],
)
def test_a_place_that_cannot_be_is_refused(config: Any, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        read_cluster(config)


def test_a_role_that_does_not_train_is_refused_with_what_to_do() -> None:
    cluster = {"worker": ["localhost:1"], "ps": ["localhost:2"]}
    with pytest.raises(TrainingError, match="insitu start --ps"):
        SynchronousMembership(read_context(environment("ps", **cluster)), "auto")
    worker = read_context(environment("worker", **cluster))
    with pytest.raises(TrainingError, match="Received: a cluster by TF_CONFIG"):
        serve_or_configure(worker, None, "refuse", "It needs.")  # type: ignore[arg-type]


# Secrets


def test_processes_of_one_user_share_a_file(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "home")
    secret = find_secret({}, paths, LOCAL)
    assert len(secret) == 32 and find_secret({}, paths, LOCAL) == secret
    assert find_secret({}, paths, LOCAL[:1]) != secret
    assert paths.cluster_secret.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in paths.home.iterdir()] == [paths.cluster_secret.name]
    assert find_secret({}, Paths(tmp_path / "other"), LOCAL) != secret
    context = read_context({**environment("worker", worker=LOCAL), "INSITU_HOME": str(paths.home)})
    assert context.secret() == secret and secret.hex() not in repr(context)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    find_secret({}, paths, LOCAL)
    paths.cluster_secret.chmod(0o640)
    with pytest.raises(InputError, match=r"readable by nobody else.*mode 640.*Remove it"):
        find_secret({}, paths, LOCAL)


def test_several_hosts_need_the_users_own_secret(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    with pytest.raises(InputError, match=r"10\.0\.0\.2:2301, neither INSITU_SECRET_FILE nor INSITU_SECRET"):
        find_secret({}, paths, REMOTE)
    with pytest.raises(InputError, match="at least 16 bytes"):
        find_secret({"INSITU_SECRET": "short"}, paths, REMOTE)
    with pytest.raises(InputError, match="a file that can be read"):
        find_secret({"INSITU_SECRET_FILE": str(tmp_path / "none")}, paths, REMOTE)
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(InputError, match=r"mode 644\. Give it mode 0600"):
        find_secret({"INSITU_SECRET_FILE": str(tmp_path / "secret")}, paths, REMOTE)
    (tmp_path / "secret").chmod(0o600)
    assert find_secret({"INSITU_SECRET_FILE": str(tmp_path / "secret")}, paths, REMOTE) == b"0123456789abcdef"
    assert find_secret({"INSITU_SECRET": "0123456789abcdef"}, paths, REMOTE) == b"0123456789abcdef"
    with pytest.raises(InputError, match="neither INSITU_SECRET_FILE nor INSITU_SECRET"):
        Context(paths, workers=REMOTE).secret()
    assert Context(paths).secret() is None
