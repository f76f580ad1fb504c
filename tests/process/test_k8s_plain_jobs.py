"""Jobs whose tasks run in pods of their own, on a control plane without JobSet."""

from __future__ import annotations

from collections.abc import Iterator

import hosts_lab
import k8s_binaries
import pytest

pytest.importorskip("kubernetes", reason="the library `kubernetes` must be installed: make ready-k8s")

from k8s_insitu import (
    CODE,
    IMAGE,
    IN_PODS,
    START,
    head,
    make_stores,
    read_weights,
    run_in,
    start_in_pods,
    train_in_stores,
    wait_for_state,
    wait_until_trains,
)
from k8s_kubelet import Cluster
from k8s_plane import Object, wait_for

_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
_OBSTACLE = hosts_lab.find_obstacle() or k8s_binaries.find_obstacle(*_PROGRAMS)
pytestmark = [
    pytest.mark.k8s,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(_OBSTACLE), reason=_OBSTACLE),
]
SPACE = "plain"
JOBS = f"/apis/batch/v1/namespaces/{SPACE}/jobs"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("k8s"), 3, {}, images=[IMAGE]) as made:
        make_stores(made, SPACE)
        yield made


@pytest.fixture(scope="module")
def weights(cluster: Cluster) -> str:
    """The weights of the same job in the pods of the stores."""
    return train_in_stores(cluster, SPACE)


def jobs_of(cluster: Cluster, job: str) -> list[Object]:
    found: list[Object] = cluster.plane.get(f"{JOBS}?labelSelector=insitu.dev/job={job}")["items"]
    return sorted(found, key=lambda each: str(each["metadata"]["name"]))


def has_pods(cluster: Cluster, job: str) -> bool:
    return bool(
        cluster.plane.get(f"/api/v1/namespaces/{SPACE}/pods?labelSelector=insitu.dev/job={job}")["items"]
    )


def test_a_job_trains_in_plain_jobs_with_the_bits_of_the_stores_pods(cluster: Cluster, weights: str) -> None:
    job = start_in_pods(cluster, SPACE, "pods")
    wait_for_state(cluster, SPACE, "pods", "finished")
    assert read_weights(cluster, SPACE, "pods") == {weights}
    first, second = jobs_of(cluster, job)
    assert [first["metadata"]["name"], second["metadata"]["name"]] == [
        f"job-{job}-{store}" for store in ("store-0", "store-1")
    ]
    (owner,) = second["metadata"]["ownerReferences"]
    assert owner["uid"] == first["metadata"]["uid"]
    wait_for(lambda: [each["status"].get("succeeded") for each in jobs_of(cluster, job)] == [1, 1])


def test_deleting_the_first_job_deletes_all_and_stops_the_training(cluster: Cluster, weights: str) -> None:
    job = start_in_pods(cluster, SPACE, "deleted")
    wait_until_trains(cluster, SPACE, "deleted")
    first, _ = jobs_of(cluster, job)
    policy = {"propagationPolicy": "Background"}
    cluster.plane.api.ask("DELETE", f"{JOBS}/{first['metadata']['name']}", policy)
    wait_for_state(cluster, SPACE, "deleted", "stopped")
    assert "was deleted in Kubernetes: the job is stopped" in head(cluster, SPACE, "insitu", "logs", job)
    wait_for(lambda: not jobs_of(cluster, job) and not has_pods(cluster, job))
    resume = ("insitu", "resume", "--detach", job)  # refused until the last supervisor has ended
    wait_for(lambda: run_in(cluster, SPACE, "head-0", *resume).returncode == 0)
    wait_for_state(cluster, SPACE, "deleted", "finished")
    assert read_weights(cluster, SPACE, "deleted") == {weights}
    assert len(jobs_of(cluster, job)) == 2


def test_a_job_that_fails_ends_the_others_and_the_training(cluster: Cluster) -> None:
    job = start_in_pods(cluster, SPACE, "failing")
    wait_until_trains(cluster, SPACE, "failing")
    _, second = jobs_of(cluster, job)
    path = f"{JOBS}/{second['metadata']['name']}"
    cluster.plane.api.patch(path, {"spec": {"activeDeadlineSeconds": 1}}, "merge-patch+json")
    wait_for_state(cluster, SPACE, "failing", "stopped")
    assert "has failed in Kubernetes: the job is stopped" in head(cluster, SPACE, "insitu", "logs", job)
    wait_for(lambda: all(each["status"].get("failed") for each in jobs_of(cluster, job)))
    assert not any(each["status"].get("active") for each in jobs_of(cluster, job))


def test_a_queue_is_refused_with_the_reason(cluster: Cluster) -> None:
    done = run_in(cluster, SPACE, "head-0", *START, *IN_PODS, "--pod", "queue=research", *CODE)
    assert done.returncode == 2 and "needs JobSet" in " ".join(done.stderr.split()), done.stderr
