"""The largest losses of a job are told in words, with who caused them and what to do."""

from __future__ import annotations

from insitu.base.measure.task_samples import Sample
from insitu.cluster.decide.goodput import JOB_ACTIVITIES, PRODUCTIVE
from insitu.cluster.decide.losses import find_losses, measure_pace


def sample(gradient: float, steps: int = 100, last: dict[str, int] | None = None, attempt: int = 1) -> Sample:
    seconds = {"gradient": gradient, "data": 0.0, "wait": 1.0}
    return Sample(at=1.0, attempt=attempt, started=0.0, steps=steps, seconds=seconds, last=last or {})


def test_the_five_largest_are_told_and_what_trains_is_none() -> None:
    seconds = {name: float(number) for number, name in enumerate(JOB_ACTIVITIES, 1)}
    losses = find_losses(seconds, 100.0, {}, {})
    assert len(losses) == 5 and losses[0].activity == "away"
    assert [loss.seconds for loss in losses] == sorted((loss.seconds for loss in losses), reverse=True)
    assert not {loss.activity for loss in losses} & set(PRODUCTIVE)
    assert all(loss.text and loss.advice for loss in losses)
    assert losses[0].share == 0.17 and losses[0].text.startswith("17 s (17.0%)")


def test_each_activity_that_is_no_training_has_words() -> None:
    for name in set(JOB_ACTIVITIES) - set(PRODUCTIVE):
        (loss,) = find_losses({name: 1.0}, 2.0, {}, {})
        assert loss.activity == name


def test_what_hardly_took_time_is_not_told() -> None:
    assert find_losses({"data": 0.001, "import": 0.0}, 10.0, {}, {}) == []
    assert find_losses({"data": 0.0}, 0.0, {}, {}) == []


def test_the_slowest_task_is_named_with_its_node() -> None:
    last = {"worker:0": 3, "worker:2": 17}
    samples = {
        "worker:0": [sample(1.0, last=last)],
        "worker:1": [sample(1.0, last=last)],
        "worker:2": [sample(0.5, 50, {"worker:2": 8}), sample(0.81, 50, {"worker:2": 8}, attempt=2)],
    }
    (loss,) = find_losses({"wait": 5.0}, 50.0, samples, {"worker:2": "node-1"})
    assert "worker:2 on node-1 came last in 85% of the steps" in loss.text
    assert "worker:2 on node-1 is 31% slower than the median of the others: 13.1 ms" in loss.text
    even = {"worker:0": [sample(1.0)], "worker:1": [sample(1.05)]}
    (loss,) = find_losses({"wait": 5.0}, 50.0, even, {})
    assert "slower" not in loss.text and "last" not in loss.text


def test_the_pace_of_a_task_is_that_of_all_its_steps() -> None:
    assert measure_pace([sample(0.4, 10), sample(1.0, 20), sample(2.0, 10, attempt=2)]) == 0.1
    assert measure_pace([]) is None
