"""What the head makes in Kubernetes for the pods of a job, with JobSet and without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from k8s_fake import FakeApi

from insitu.base.errors import ClusterError, JobSpecError
from insitu.base.paths import JobPaths
from insitu.base.spec import JobSpec, NodeId, TaskId, TaskSpec
from insitu.extensions.kubernetes import job_starter
from insitu.extensions.kubernetes.client import path_of
from insitu.extensions.kubernetes.job_starter import PodStarter

JOB = "digits-3fa9c1"
STORES = [NodeId("store-0"), NodeId("store-1")]


def make_spec(*pod: str) -> JobSpec:
    return JobSpec(job_id=JOB, name="digits", cache="digits", command=("t.py",), workers=2, shards=2, pod=pod)


class Placed:
    tasks = tuple(TaskSpec(TaskId("worker", i), node, (i,)) for i, node in enumerate(STORES))


@pytest.fixture
def starter(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PodStarter:
    monkeypatch.setattr(job_starter, "open_client", api.client)
    monkeypatch.setattr(job_starter, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(job_starter, "_REMOVED_SECONDS", 0.05)
    monkeypatch.setattr("insitu.cluster.read_spec", lambda job: make_spec())
    monkeypatch.setattr("insitu.cluster.read_placement", lambda job: (Placed, None))
    api.put("Pod", "store-0", spec={"containers": [{"image": "registry/insitu:1"}]})
    return PodStarter(JobPaths(tmp_path / JOB))


def end(api: FakeApi, name: str) -> None:
    condition = {"type": "Failed", "status": "True", "message": "exit code 126."}
    api.get("Job", name)["status"] = {"conditions": [condition]}


def collect_garbage(api: FakeApi) -> None:
    """Do as Kubernetes does: delete what has no owner any more."""
    uids = {each["metadata"].get("uid") for each in api.objects.values()}
    for path, each in [*api.objects.items()]:
        owners: list[Any] = each["metadata"].get("ownerReferences", [])
        if any(owner["uid"] not in uids for owner in owners):
            del api.objects[path]


def test_without_jobset_the_first_job_owns_the_others(api: FakeApi, starter: PodStarter) -> None:
    starter.make_places(STORES)
    assert api.names("Job") == [f"job-{JOB}-store-0", f"job-{JOB}-store-1"]
    first, second = (api.get("Job", name) for name in api.names("Job"))
    assert "ownerReferences" not in first["metadata"]
    (owner,) = second["metadata"]["ownerReferences"]
    assert owner["uid"] == first["metadata"]["uid"]
    before = [*api.changes]
    starter.make_places(STORES)
    assert api.changes == before


def test_a_job_that_is_missing_is_made_again_with_its_owner(api: FakeApi, starter: PodStarter) -> None:
    starter.make_places(STORES)
    del api.objects[path_of("Job", "team", f"job-{JOB}-store-1")]
    starter.make_places(STORES)
    (owner,) = api.get("Job", f"job-{JOB}-store-1")["metadata"]["ownerReferences"]
    assert owner["uid"] == api.get("Job", f"job-{JOB}-store-0")["metadata"]["uid"]


def test_jobs_of_an_attempt_that_has_ended_go_before_others_are_made(
    api: FakeApi, starter: PodStarter
) -> None:
    starter.make_places(STORES)
    old = api.get("Job", f"job-{JOB}-store-0")["metadata"]["uid"]
    end(api, f"job-{JOB}-store-1")
    starter.make_places(STORES)
    assert api.get("Job", f"job-{JOB}-store-0")["metadata"]["uid"] != old
    assert len(api.names("Job")) == 2


def test_jobs_whose_owner_has_gone_are_not_taken_over(api: FakeApi, starter: PodStarter) -> None:
    starter.make_places(STORES)
    del api.objects[path_of("Job", "team", f"job-{JOB}-store-0")]
    starter.make_places(STORES)
    (second,) = api.get("Job", f"job-{JOB}-store-1")["metadata"]["ownerReferences"]
    assert second["uid"] == api.get("Job", f"job-{JOB}-store-0")["metadata"]["uid"]


def test_with_jobset_there_is_one_and_jobs_that_run_stay_once_it_is_installed(
    api: FakeApi, starter: PodStarter
) -> None:
    starter.make_places(STORES)
    api.groups.add("jobset.x-k8s.io/v1alpha2")
    starter.make_places(STORES)
    assert api.names("JobSet") == []
    end(api, f"job-{JOB}-store-0")
    starter.make_places(STORES)
    assert api.names("JobSet") == [f"job-{JOB}"] and api.names("Job") == []


def test_deleted_jobs_end_the_waiting(api: FakeApi, starter: PodStarter) -> None:
    starter.make_places(STORES)
    assert starter.explain_waiting(STORES, may_pause=True) == "its pods are being made"
    del api.objects[path_of("Job", "team", f"job-{JOB}-store-0")]
    collect_garbage(api)
    with pytest.raises(ClusterError, match="deleted in Kubernetes"):
        starter.explain_waiting(STORES, may_pause=True)


def test_a_job_whose_pods_fail_at_its_start_fails(api: FakeApi, starter: PodStarter) -> None:
    starter.make_places(STORES)
    end(api, f"job-{JOB}-store-1")
    with pytest.raises(ClusterError, match=f"Job job-{JOB}-store-1 has failed in Kubernetes: exit code 126$"):
        starter.explain_waiting(STORES, may_pause=True)


def test_pods_that_end_with_the_last_attempt_are_made_again(api: FakeApi, starter: PodStarter) -> None:
    starter.make_places(STORES)
    old = api.get("Job", f"job-{JOB}-store-0")["metadata"]["uid"]
    resumed = PodStarter(starter._job)
    resumed.make_places(STORES)
    assert api.get("Job", f"job-{JOB}-store-0")["metadata"]["uid"] == old
    end(api, f"job-{JOB}-store-1")
    assert resumed.explain_waiting(STORES[1:], may_pause=True) == "its pods are being made"
    assert api.get("Job", f"job-{JOB}-store-0")["metadata"]["uid"] != old and len(api.names("Job")) == 2


@pytest.mark.parametrize("path", ["jobs", "pods", "events"])
def test_a_waiting_job_outlasts_an_api_server_that_is_away(
    path: str, api: FakeApi, starter: PodStarter
) -> None:
    starter.make_places(STORES)
    labels = {"insitu.dev/job": JOB}
    api.put("Pod", "a", spec={}, status={"phase": "Pending"})["metadata"]["labels"] = labels
    api.answers[f"^GET .*/{path}"] = ConnectionRefusedError("refused")
    said = starter.explain_waiting(STORES, may_pause=False)
    assert said.startswith("its pods can't be looked at: ") and "refused" in said
    api.answers.clear()
    assert starter.explain_waiting(STORES, may_pause=False).startswith("pod a waits for ")


def test_a_waiting_pod_says_what_was_found_last(api: FakeApi, starter: PodStarter) -> None:
    """The API server lists events by name."""
    starter.make_places(STORES)
    pod = api.put("Pod", "a", spec={"nodeName": "n1"}, status={"phase": "Pending"})
    pod["metadata"]["labels"] = {"insitu.dev/job": JOB}
    about = {"involvedObject": {"kind": "Pod", "name": "a"}, "reason": "FailedMount", "type": "Warning"}
    api.put("Event", "a.1", **about, message="new", lastTimestamp="2026-01-02T00:00:00Z")
    api.put("Event", "a.2", **about, message="old", lastTimestamp="2026-01-01T00:00:00Z")
    said = starter.explain_waiting(STORES, may_pause=False)
    assert "new" in said and "old" not in said


def test_the_places_of_a_job_are_removed(api: FakeApi, starter: PodStarter) -> None:
    starter.make_places(STORES)
    api.put("Job", "mine")
    starter.remove_places()
    assert api.names("Job") == ["mine"]


def test_jobs_that_do_not_go_are_named(api: FakeApi, starter: PodStarter) -> None:
    starter.make_places(STORES)
    end(api, f"job-{JOB}-store-0")
    api.answers["^DELETE"] = (200, b"{}")
    with pytest.raises(ClusterError, match=f"Received: Job job-{JOB}-store-0, which is there after"):
        starter.make_places(STORES)


def test_a_queue_is_refused_without_jobset(api: FakeApi, starter: PodStarter) -> None:
    starter.check(make_spec("priority=high"))
    with pytest.raises(JobSpecError, match="needs JobSet"):
        starter.check(make_spec("queue=research"))
