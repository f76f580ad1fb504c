"""What a page shows, from objects as Kubernetes and Kueue have them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.extensions.kubernetes.objects import make_objects
from insitu.extensions.kubernetes.options import ClusterOptions
from insitu.extensions.kubernetes.views import choose_events, describe_job_pods, describe_queues, read_fields
from insitu.extensions.kubernetes.waits import Snapshot
from insitu.ui.forms import make_request, write_fields


def workload(
    name: str, at: int, *conditions: tuple[str, str, str], priority: int = 0, queue: str = "q"
) -> Any:
    found = [{"type": kind, "status": status, "message": said} for kind, status, said in conditions]
    owner = {"kind": "JobSet", "name": f"job-{name}"}
    return {
        "metadata": {"name": name, "creationTimestamp": f"2026-01-0{at}", "ownerReferences": [owner]},
        "spec": {"queueName": queue, "priority": priority},
        "status": {"conditions": found},
    }


LOCAL = {
    "metadata": {"name": "q"},
    "spec": {"clusterQueue": "all"},
    "status": {
        "pendingWorkloads": 3,
        "flavorsReservation": [{"name": "any", "resources": [{"name": "cpu", "total": "2"}]}],
    },
}
BEHIND = {
    "spec": {
        "resourceGroups": [
            {
                "flavors": [
                    {"name": "any", "resources": [{"name": "cpu", "nominalQuota": 4}]},
                    {"name": "spot", "resources": [{"name": "cpu", "nominalQuota": 8}]},
                ]
            }
        ]
    }
}


def test_places_in_a_queue_are_by_priority_and_then_by_age() -> None:
    found = [
        workload("late", 3, ("QuotaReserved", "False", "no room for cpu")),
        workload("runs", 1, ("QuotaReserved", "True", "")),
        workload("over", 1, ("Finished", "True", "")),
        workload("early", 2),
        workload("urgent", 4, priority=10),
        workload("elsewhere", 1, queue="other"),
    ]
    (queue,) = describe_queues([LOCAL], {"all": BEHIND}, found)
    assert queue.places == {
        "job-urgent": "1 of 3 in queue q",
        "job-early": "2 of 3 in queue q",
        "job-late": "3 of 3 in queue q: no room for cpu",
    }
    assert (queue.pending, queue.quotas) == (3, ("cpu: 2 of 4 + 8",))


def test_a_quota_that_may_not_be_read_is_not_guessed() -> None:
    (queue,) = describe_queues([LOCAL], {}, [])
    assert queue.quotas == ("cpu: 2 of ?",)
    (queue,) = describe_queues([{"metadata": {"name": "q"}, "spec": {}}], {}, [])
    assert (queue.quotas, queue.pending, queue.cluster_queue) == ((), 0, "")


def test_pods_of_jobs_say_what_they_wait_for() -> None:
    waiting = {
        "metadata": {"name": "b"},
        "spec": {},
        "status": {
            "phase": "Pending",
            "conditions": [
                {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient cpu."}
            ],
        },
    }
    runs = {"metadata": {"name": "a"}, "spec": {"nodeName": "n1"}, "status": {"phase": "Running"}}
    assert describe_job_pods([waiting, runs], Snapshot({}, {}, {})) == [
        {"name": "a", "state": "running", "node": "n1", "waits": ""},
        {"name": "b", "state": "pending", "node": "", "waits": "a node: 0/3 nodes: Insufficient cpu"},
    ]


def event(kind: str, name: str, at: str) -> Any:
    return {
        "metadata": {},
        "involvedObject": {"kind": kind, "name": name},
        "reason": "Failed",
        "message": "why\n  it has",
        "type": "Warning",
        "lastTimestamp": at,
    }


def test_events_of_others_are_left_out_and_the_newest_come_first() -> None:
    found = [
        event("Pod", "store-7", "1"),
        event("Pod", "store-front", "2"),
        event("Job", "mine", "3"),
        event("Deployment", "other", "4"),
    ]
    chosen = choose_events(found, {"mine"})
    assert [each["title"] for each in chosen] == ["Job mine: Failed", "Pod store-7: Failed"]
    assert chosen[0] == {"at": "3", "kind": "Warning", "title": "Job mine: Failed", "text": "why it has"}


names = st.sampled_from(["", "fast", "slow"])


@pytest.mark.parametrize("again", [False, True])
@given(
    options=st.builds(
        ClusterOptions,
        nodes=st.integers(1, 9),
        gpus=st.integers(0, 8),
        cpu=st.sampled_from(["2", "500m"]),
        memory=st.sampled_from(["8Gi", "1Gi"]),
        storage=st.sampled_from(["50Gi", "1Ti"]),
        head_storage=st.sampled_from(["20Gi", "30Gi"]),
        storage_class=names,
        image=st.sampled_from(["insitu:1", "registry.example.com/insitu:2"]),
        queue=names,
        page_url=st.sampled_from(["", "https://insitu.example.com"]),
        log_format=st.sampled_from(["text", "json"]),
        monitor=st.booleans(),
    )
)
def test_the_form_of_a_cluster_that_is_there_would_change_nothing(options: Any, again: bool) -> None:
    sets = {each["metadata"]["name"]: each for each in make_objects(options) if each["kind"] == "StatefulSet"}
    fields = write_fields(options) if again else read_fields(sets)
    assert make_request(ClusterOptions, fields) == options
    assert read_fields({}) == {}
