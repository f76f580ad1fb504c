"""The pods of a job, as objects of Kubernetes."""

from __future__ import annotations

from typing import Any

import pytest

from insitu.base.errors import JobSpecError
from insitu.base.spec import JobSpec, NodeId, TaskId, TaskSpec
from insitu.extensions.kubernetes.job_pods import (
    find_owner,
    group_by_job,
    is_over,
    is_suspended,
    make_job_objects,
    name_of_job,
    parse_request,
    set_owner,
    store_of,
)


def make_spec(**options: Any) -> JobSpec:
    fixed: dict[str, Any] = {"job_id": "Digits_train.v2-3fa9c1", "name": "Digits_train.v2", "cache": "digits"}
    return JobSpec(**fixed, command=("train.py",), workers=3, shards=3, **options)


def make_placement(*nodes: str) -> Any:
    tasks = tuple(TaskSpec(TaskId("worker", i), NodeId(node), (i,)) for i, node in enumerate(nodes))

    class Placed:
        pass

    placed = Placed()
    placed.tasks = tasks  # type: ignore[attr-defined]
    return placed


def make(spec: JobSpec, *nodes: str) -> Any:
    found = [NodeId(each) for each in sorted(set(nodes))]
    (made,) = make_job_objects(
        spec, make_placement(*nodes), found, "team", "registry/insitu:1", has_jobsets=True
    )
    return made


def make_jobs(spec: JobSpec, *nodes: str) -> list[Any]:
    found = [NodeId(each) for each in nodes]
    return make_job_objects(
        spec, make_placement(*nodes), found, "team", "registry/insitu:1", has_jobsets=False
    )


def pods_of(jobset: Any) -> dict[str, Any]:
    return {
        each["name"]: each["template"]["spec"]["template"]["spec"]
        for each in jobset["spec"]["replicatedJobs"]
    }


def test_each_store_with_tasks_has_a_pod_that_mounts_its_disk() -> None:
    made = make(
        make_spec(gpus_per_worker=2, memory_per_worker=512, cores_per_worker=3),
        "store-0",
        "store-2",
        "store-0",
    )
    pods = pods_of(made)
    assert pods.keys() == {"store-0", "store-2"}
    for name, tasks in (("store-0", 2), ("store-2", 1)):
        claims = [
            v["persistentVolumeClaim"]["claimName"]
            for v in pods[name]["volumes"]
            if "persistentVolumeClaim" in v
        ]
        assert claims == [f"data-{name}"]
        (container,) = pods[name]["containers"]
        assert container["command"][-2:] == ["--node", name] and container["image"] == "registry/insitu:1"
        limits = {"memory": f"{512 * tasks}Mi", "nvidia.com/gpu": str(2 * tasks)}
        assert container["resources"] == {"limits": limits, "requests": {"cpu": str(3 * tasks), **limits}}
        # Nothing there may ask the API server, or restart by itself.
        assert pods[name]["automountServiceAccountToken"] is False and pods[name]["restartPolicy"] == "Never"
        assert "nodeName" not in pods[name] and "affinity" not in pods[name]
    assert made["spec"]["suspend"] is False and made["metadata"]["name"] == "job-digits-train-v2-3fa9c1"


def test_what_is_asked_of_pods_is_in_them() -> None:
    asked = (
        "queue=research",
        "priority=high",
        "image=other:2",
        "select=disk=ssd",
        "toleration=gpu=yes:NoSchedule",
    )
    made = make(make_spec(pod=(*asked, "toleration=spot")), "store-1")
    assert (
        made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
        and made["spec"]["suspend"] is True
    )
    (pod,) = pods_of(made).values()
    assert pod["priorityClassName"] == "high" and pod["nodeSelector"] == {"disk": "ssd"}
    assert pod["containers"][0]["image"] == "other:2"
    assert pod["tolerations"] == [
        {"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists"},
    ]


def test_variables_and_secrets_are_for_the_tasks_and_not_for_the_pod() -> None:
    given = ("env=MODE=a b=c", "env=EMPTY=", "secret=s3", "secret=hub")
    (pod,) = pods_of(make(make_spec(pod=given), "store-0")).values()
    (container,) = pod["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["INSITU_SET_MODE"] == "a b=c" and variables["INSITU_SET_EMPTY"] == ""
    assert container["envFrom"] == [
        {"prefix": "INSITU_SET_", "secretRef": {"name": name}} for name in ("s3", "hub")
    ]
    (pod,) = pods_of(make(make_spec(), "store-0")).values()
    assert "envFrom" not in pod["containers"][0]


@pytest.mark.parametrize(
    "given, message",
    [
        ("env=MODE", "env=NAME=VALUE sets a variable"),
        ("env=1A=b", "Names have letters"),
        ("env=INSITU_SEED=1", "isn't one of insitu's own"),
        ("env=HF_TOKEN=abc", "Received: env=HF_TOKEN=... Make a Secret"),
        ("secret=My_Secret", "small letters"),
        ("queue", "queue=..., priority=..., image=..."),
        ("nodes=3", "Received: 'nodes=3'"),
        ("queue=Research", "small letters"),
        ("toleration=a:Never", "effects are NoSchedule"),
        ("select=disk", "select=LABEL=VALUE"),
    ],
)
def test_what_pods_can_not_have_is_refused(given: str, message: str) -> None:
    with pytest.raises(JobSpecError, match=message):
        parse_request((given,))


def test_an_option_of_pods_is_given_once() -> None:
    with pytest.raises(JobSpecError, match="'a' and 'b'"):
        parse_request(("queue=a", "queue=b"))


def test_names_are_short_and_end_as_the_ids_of_jobs() -> None:
    name = name_of_job(f"{'long_NAME' * 9}-0a1b2c")
    assert len(name) <= 44 and name.endswith("-0a1b2c") and name == name.lower() and "--" not in name


def test_nodes_that_are_no_stores_have_no_pods() -> None:
    assert store_of(NodeId("store-12")) == "store-12"
    with pytest.raises(JobSpecError, match="the node host1, which is none"):
        store_of(NodeId("host1"))


def test_kubernetes_makes_another_pod_only_for_one_that_was_taken_away() -> None:
    job = make_jobs(make_spec(), "store-0")[0]["spec"]
    ignored, over = job["podFailurePolicy"]["rules"]
    assert ignored["action"] == "Ignore" and over["action"] == "FailJob"
    (container,) = job["template"]["spec"]["containers"]
    assert over["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "NotIn",
        "values": [137, 143],
    }


@pytest.mark.parametrize("version", ["1.33", "1.35", "1.37"])
def test_the_templates_are_jobs_that_kubernetes_takes(version: str) -> None:
    import kubernetes_validate

    made = make(make_spec(gpus_per_worker=1, pod=("priority=high", "toleration=gpu:NoSchedule")), "store-0")
    (replicated,) = made["spec"]["replicatedJobs"]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "x"},
        "spec": replicated["template"]["spec"],
    }
    kubernetes_validate.validate(job, version, strict=True)


def test_a_jobset_is_over_or_suspended() -> None:
    made = make(make_spec(pod=("queue=a",)), "store-0")
    assert is_suspended([made]) and not is_over([made])
    made["spec"]["suspend"] = False
    for kind, status in (
        ("Completed", "True"),
        ("Failed", "True"),
        ("Suspended", "True"),
        ("Completed", "False"),
    ):
        made["status"] = {"conditions": [{"type": kind, "status": status}]}
        assert is_over([made]) is (kind != "Suspended" and status == "True")
    assert not is_suspended([made])


def test_without_jobset_each_store_has_a_job_with_the_same_pod() -> None:
    import kubernetes_validate

    spec = make_spec(gpus_per_worker=1, pod=("priority=high", "toleration=gpu:NoSchedule"))
    jobs, jobset = make_jobs(spec, "store-0", "store-1"), make(spec, "store-0", "store-1")
    templates = [each["template"]["spec"] for each in jobset["spec"]["replicatedJobs"]]
    assert [each["spec"] for each in jobs] == templates
    assert [each["metadata"]["name"] for each in jobs] == [
        f"{jobset['metadata']['name']}-store-{number}" for number in range(2)
    ]
    for each in jobs:
        assert each["metadata"]["labels"] == jobset["metadata"]["labels"]
        kubernetes_validate.validate(each, "1.36", strict=True)


def test_a_queue_needs_jobset() -> None:
    with pytest.raises(JobSpecError, match="queue=research, and an API server without jobset"):
        make_jobs(make_spec(pod=("queue=research",)), "store-0")


def test_one_job_owns_the_others() -> None:
    first, second = make_jobs(make_spec(), "store-0", "store-1")
    first["metadata"]["uid"] = "u1"
    owned = set_owner(second, first)
    assert find_owner([owned, first]) is first and find_owner([owned]) is None
    (reference,) = owned["metadata"]["ownerReferences"]
    name = first["metadata"]["name"]
    assert reference == {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": "u1"}
    assert "ownerReferences" not in second["metadata"]


def test_jobs_are_over_once_one_has_ended_and_wait_while_one_is_suspended() -> None:
    jobs = make_jobs(make_spec(), "store-0", "store-1")
    assert not is_over(jobs) and not is_suspended(jobs) and not is_over([])
    jobs[1]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    assert is_over(jobs)
    jobs[1]["spec"] = {**jobs[1]["spec"], "suspend": True}
    assert is_suspended(jobs)


def test_the_jobs_of_a_jobset_count_once_it_has_gone() -> None:
    jobset, jobs = make(make_spec(), "store-0"), make_jobs(make_spec(), "store-0")
    name = make_spec().job_id
    assert group_by_job([*jobs, jobset]) == {name: [jobset]}
    assert group_by_job(jobs) == {name: jobs}
    assert group_by_job([]) == {}
