"""Jobs whose tasks run in pods of their own, admitted by a queue, against a real control plane."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import hosts_lab
import k8s_binaries
import pytest

pytest.importorskip("kubernetes", reason="the library `kubernetes` must be installed: make ready-k8s")

from k8s_insitu import (
    CODE,
    IMAGE,
    IN_PODS,
    SCRIPT,
    SMALL,
    START,
    act_as_administrator,
    head,
    insitu,
    list_jobs,
    make_stores,
    read_weights,
    run_in,
    start_in_pods,
    train_in_stores,
    wait_for_state,
    wait_until_trains,
    write_input,
)
from k8s_kubelet import Cluster
from k8s_plane import Object, wait_for

_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "jobset")
_OBSTACLE = hosts_lab.find_obstacle() or k8s_binaries.find_obstacle(*_PROGRAMS)
pytestmark = [
    pytest.mark.k8s,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(_OBSTACLE), reason=_OBSTACLE),
]
SPACE = "jobs"
JOBSETS = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{SPACE}/jobsets"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("k8s"), 3, {"nvidia.com/gpu": "1"}, images=[IMAGE]) as made:
        made.plane.add_jobset()
        make_stores(made, SPACE)
        yield made


@pytest.fixture(scope="module")
def weights(cluster: Cluster) -> str:
    """The weights of the same job in the pods of the stores."""
    return train_in_stores(cluster, SPACE)


def list_jobsets(cluster: Cluster, job: str) -> list[Object]:
    found: list[Object] = cluster.plane.get(f"{JOBSETS}?labelSelector=insitu.dev/job={job}")["items"]
    return found


def find_jobset(cluster: Cluster, job: str) -> Object:
    (found,) = list_jobsets(cluster, job)
    return found


def pods_of(cluster: Cluster, job: str) -> dict[str, Object]:
    """The pods of a job by the node of their store."""
    query = f"/api/v1/namespaces/{SPACE}/pods?labelSelector=insitu.dev/job={job}"
    found = {}
    for each in cluster.plane.get(query)["items"]:
        (claim,) = (
            v["persistentVolumeClaim"]["claimName"]
            for v in each["spec"]["volumes"]
            if "persistentVolumeClaim" in v
        )
        found[claim.removeprefix("data-")] = each
    return found


def has_condition(found: Object, kind: str) -> bool:
    return any(
        c["type"] == kind and c["status"] == "True" for c in found.get("status", {}).get("conditions", ())
    )


def test_tasks_run_in_pods_beside_their_stores_with_the_same_bits(cluster: Cluster, weights: str) -> None:
    job = start_in_pods(cluster, SPACE, "pods", "--gpus-per-worker", "0")
    wait_until_trains(cluster, SPACE, "pods")
    pods = pods_of(cluster, job)
    assert pods.keys() == {"store-0", "store-1"}
    for store, pod in pods.items():
        stores = cluster.get_pod(SPACE, store)
        assert pod["spec"]["nodeName"] == stores["spec"]["nodeName"] and pod["status"]["phase"] == "Running"
        assert pod["status"]["podIP"] != stores["status"]["podIP"]
    wait_for_state(cluster, SPACE, "pods", "finished")
    assert read_weights(cluster, SPACE, "pods") == {weights}
    wait_for(lambda: has_condition(find_jobset(cluster, job), "Completed"))
    for pod in pods_of(cluster, job).values():
        (ended,) = pod["status"]["containerStatuses"]
        assert ended["state"]["terminated"]["exitCode"] == 0


def test_a_pod_that_is_evicted_is_made_again_and_the_job_continues(cluster: Cluster, weights: str) -> None:
    job = start_in_pods(cluster, SPACE, "evicted")
    wait_until_trains(cluster, SPACE, "evicted")
    pod = pods_of(cluster, job)["store-1"]["metadata"]
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod["name"], "namespace": SPACE},
    }
    cluster.plane.api.ask("POST", f"/api/v1/namespaces/{SPACE}/pods/{pod['name']}/eviction", eviction)
    wait_for_state(cluster, SPACE, "evicted", "finished")
    assert read_weights(cluster, SPACE, "evicted") == {weights}
    assert pods_of(cluster, job)["store-1"]["metadata"]["uid"] != pod["uid"]


def test_a_jobset_that_is_deleted_stops_its_job(cluster: Cluster) -> None:
    job = start_in_pods(cluster, SPACE, "deleted")
    wait_until_trains(cluster, SPACE, "deleted")
    name = find_jobset(cluster, job)["metadata"]["name"]
    cluster.plane.api.ask("DELETE", f"{JOBSETS}/{name}")
    wait_for_state(cluster, SPACE, "deleted", "stopped")
    assert f"{name} was deleted in Kubernetes: the job is stopped" in head(
        cluster, SPACE, "insitu", "logs", job
    )
    wait_for(lambda: not pods_of(cluster, job))


def test_the_pods_of_a_job_that_fails_end_for_good(cluster: Cluster) -> None:
    write = ("sh", "-c", "mkdir -p /tmp/bad && cat > /tmp/bad/train.py")
    head(cluster, SPACE, *write, given=SCRIPT.replace("model.fit", "raise SystemExit(7)\nmodel.fit").encode())
    options = ("--detach", "--max-restarts", "0", "--name", "bad", *IN_PODS)
    job = head(cluster, SPACE, *START, *options, "d", "/tmp/bad", "train.py").strip()
    wait_for_state(cluster, SPACE, "bad", "failed")
    wait_for(lambda: has_condition(find_jobset(cluster, job), "Failed"))
    wait_for(lambda: {pod["status"]["phase"] for pod in pods_of(cluster, job).values()} <= {"Failed"})
    for pod in pods_of(cluster, job).values():
        (ended,) = pod["status"]["containerStatuses"]
        assert ended["state"]["terminated"]["exitCode"] == 7


def test_a_job_that_was_stopped_resumes_at_once(cluster: Cluster, weights: str) -> None:
    job = start_in_pods(cluster, SPACE, "again")
    wait_until_trains(cluster, SPACE, "again")
    before = find_jobset(cluster, job)["metadata"]["uid"]
    head(cluster, SPACE, "insitu", "stop", job)
    head(cluster, SPACE, "insitu", "resume", "--detach", job)
    wait_for_state(cluster, SPACE, "again", "finished")
    assert read_weights(cluster, SPACE, "again") == {weights}
    assert find_jobset(cluster, job)["metadata"]["uid"] != before


def test_the_pods_of_a_job_wait_for_the_next_pod_of_the_head(cluster: Cluster, weights: str) -> None:
    job = start_in_pods(cluster, SPACE, "headless")
    wait_until_trains(cluster, SPACE, "headless")
    before = {store: pod["metadata"]["uid"] for store, pod in pods_of(cluster, job).items()}
    old = cluster.get_pod(SPACE, "head-0")["metadata"]["uid"]
    cluster.plane.api.ask("DELETE", f"/api/v1/namespaces/{SPACE}/pods/head-0")
    wait_for(lambda: cluster.get_pod(SPACE, "head-0").get("metadata", {}).get("uid", old) != old)
    cluster.wait_phase(SPACE, "head-0", "Ready")
    write_input(cluster, SPACE)
    wait_for_state(cluster, SPACE, "headless", "finished")
    assert read_weights(cluster, SPACE, "headless") == {weights}
    assert {store: pod["metadata"]["uid"] for store, pod in pods_of(cluster, job).items()} == before


def test_training_continues_while_the_api_server_is_away(cluster: Cluster, weights: str) -> None:
    job = start_in_pods(cluster, SPACE, "away")
    wait_until_trains(cluster, SPACE, "away")
    cluster.plane.stop("kube-apiserver")
    try:
        wait_for_state(cluster, SPACE, "away", "finished")
    finally:
        cluster.plane.start("kube-apiserver")
        cluster.plane.wait_ready()
    assert read_weights(cluster, SPACE, "away") == {weights}
    wait_for(lambda: has_condition(find_jobset(cluster, job), "Completed"), 120)


@pytest.mark.parametrize(
    "options, said",
    [
        (("--pod", "queue=none"), "is a LocalQueue of Kueue in the namespace jobs. Received: none"),
        (("--pod", "nodes=3"), "Received: 'nodes=3'"),
    ],
)
def test_what_can_not_be_is_refused_at_start(cluster: Cluster, options: tuple[str, ...], said: str) -> None:
    done = run_in(cluster, SPACE, "head-0", *START, *IN_PODS, *options, *CODE)
    assert done.returncode == 2 and said in " ".join(done.stderr.split()), done.stderr


def test_pods_without_engine_are_refused(cluster: Cluster) -> None:
    done = run_in(cluster, SPACE, "head-0", *START, "--pod", "image=x", *CODE)
    assert done.returncode == 2 and "Leave it out, or give --engine k8s" in " ".join(done.stderr.split())


def test_gpus_that_no_node_has_are_what_is_waited_for(cluster: Cluster) -> None:
    job = start_in_pods(cluster, SPACE, "many", "--gpus-per-worker", "2")
    logs = ("insitu", "logs", job)
    wait_for(
        lambda: "Insufficient nvidia.com/gpu" in head(cluster, SPACE, *logs),
        60,
        lambda: head(cluster, SPACE, *logs),
    )
    head(cluster, SPACE, "insitu", "stop", job)
    wait_for_state(cluster, SPACE, "many", "stopped")
    assert not list_jobsets(cluster, job)


SetPolicy = Callable[[str], None]
IN_QUEUE = ("--pod", "queue=research")


@pytest.fixture(scope="module")
def set_policy(cluster: Cluster) -> SetPolicy:
    """Sets the policy of a queue with room for one job: None, Hold or HoldAndDrain."""
    if obstacle := k8s_binaries.find_obstacle("kueue"):
        pytest.skip(obstacle)
    cluster.plane.add_kueue()
    version = "kueue.x-k8s.io/v1beta2"
    flavor = {"apiVersion": version, "kind": "ResourceFlavor", "metadata": {"name": "any"}}
    covered = ["cpu", "memory"]
    quota = [{"name": "cpu", "nominalQuota": 2}, {"name": "memory", "nominalQuota": "64Gi"}]
    group = {"coveredResources": covered, "flavors": [{"name": "any", "resources": quota}]}
    queue: dict[str, Any] = {
        "apiVersion": version,
        "kind": "ClusterQueue",
        "metadata": {"name": "all"},
        "spec": {
            "namespaceSelector": {},
            "resourceGroups": [group],
            "preemption": {"withinClusterQueue": "LowerPriority"},
        },
    }
    local = {
        "apiVersion": version,
        "kind": "LocalQueue",
        "metadata": {"name": "research", "namespace": SPACE},
        "spec": {"clusterQueue": "all"},
    }
    classes = (
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": n}, "value": v}
        for n, v in (("low", 1), ("high", 100))
    )

    def set_policy(policy: str) -> None:
        queue["spec"]["stopPolicy"] = policy
        cluster.plane.apply(queue)

    cluster.plane.apply(flavor, local, *classes)
    set_policy("Hold")
    return set_policy


def test_a_queue_admits_suspends_and_admits_again(
    cluster: Cluster, weights: str, set_policy: SetPolicy
) -> None:
    set_policy("Hold")
    job = start_in_pods(cluster, SPACE, "queued", *IN_QUEUE)
    wait_for(lambda: "wait for queue research to admit them" in head(cluster, SPACE, "insitu", "logs", job))
    assert not pods_of(cluster, job)
    set_policy("None")
    wait_until_trains(cluster, SPACE, "queued")
    set_policy("HoldAndDrain")
    wait_for_state(cluster, SPACE, "queued", "stopped")
    assert "the job pauses" in head(cluster, SPACE, "insitu", "logs", job) and not pods_of(cluster, job)
    set_policy("None")
    wait_for_state(cluster, SPACE, "queued", "finished")
    assert read_weights(cluster, SPACE, "queued") == {weights}
    assert json.loads(head(cluster, SPACE, "insitu", "describe", job, "--ledger", "--json"))["attempt"] >= 2


def test_a_paused_job_is_stopped_for_good(cluster: Cluster, set_policy: SetPolicy) -> None:
    set_policy("None")
    job = start_in_pods(cluster, SPACE, "halted", *IN_QUEUE)
    wait_until_trains(cluster, SPACE, "halted")
    set_policy("HoldAndDrain")
    wait_for_state(cluster, SPACE, "halted", "stopped")
    head(cluster, SPACE, "insitu", "stop", job)
    assert not list_jobsets(cluster, job)
    set_policy("None")
    assert list_jobs(cluster, SPACE)["halted"]["state"] == "stopped"
    assert run_in(cluster, SPACE, "head-0", "insitu", "stop", job).returncode == 3


@pytest.mark.slow
def test_a_job_of_higher_priority_goes_first_and_the_other_one_resumes(
    cluster: Cluster, weights: str, set_policy: SetPolicy
) -> None:
    set_policy("None")
    low = start_in_pods(cluster, SPACE, "low", *IN_QUEUE, "--pod", "priority=low")
    wait_until_trains(cluster, SPACE, "low")
    start_in_pods(cluster, SPACE, "high", *IN_QUEUE, "--pod", "priority=high")
    wait_for_state(cluster, SPACE, "low", "stopped")
    assert "the job pauses" in head(cluster, SPACE, "insitu", "logs", low)
    wait_for_state(cluster, SPACE, "high", "finished")
    wait_for_state(cluster, SPACE, "low", "finished")
    assert read_weights(cluster, SPACE, "high") == read_weights(cluster, SPACE, "low") == {weights}
    assert "continues from the checkpoint of epoch" in head(cluster, SPACE, "insitu", "logs", low)


def test_a_cluster_that_is_taken_down_resumes_its_jobs_once_it_is_up(
    cluster: Cluster, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test here: the disks go."""
    act_as_administrator(cluster, monkeypatch)
    where = ("--namespace", SPACE)

    def take_down_while_it_trains(name: str, *options: str) -> None:
        job = start_in_pods(cluster, SPACE, name)
        wait_until_trains(cluster, SPACE, name)
        jobset = find_jobset(cluster, job)["metadata"]["name"]
        code, out, said = insitu("down", *where, *options, "--json")
        assert code == 0 and jobset in json.loads(out)["deleted"]["JobSet"], said
        assert not cluster.plane.get(f"/api/v1/namespaces/{SPACE}/pods")["items"]

    take_down_while_it_trains("down")
    code, _, said = insitu("up", "--nodes", "2", *where, *SMALL)
    assert code == 0, said
    wait_for_state(cluster, SPACE, "down", "finished")
    assert read_weights(cluster, SPACE, "down") == {weights}

    write_input(cluster, SPACE)
    take_down_while_it_trains("gone", "--claims", "--yes")
    claims = f"/api/v1/namespaces/{SPACE}/persistentvolumeclaims"
    wait_for(lambda: not cluster.plane.get(claims)["items"], why=lambda: cluster.plane.get(claims))
