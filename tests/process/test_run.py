"""`insitu.run`: functions as jobs of several workers."""

from __future__ import annotations

import os
import signal
from typing import Any

import keras
import numpy as np
import pytest

import insitu
from insitu.base.errors import InputError, TaskFailed, UnknownCache
from insitu.base.paths import Paths
from insitu.cluster import is_running, list_job_ids

ROWS = 96
GENERATOR = np.random.default_rng(3)
X = GENERATOR.normal(size=(ROWS, 6)).astype("float32")
Y = GENERATOR.integers(0, 3, ROWS)


class Killer(keras.callbacks.Callback):
    """Kills its worker once, in the middle of the second epoch."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self.task = task

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        me = insitu.context()
        if (self.epoch, batch, me.incarnation, str(me.task)) == (1, 2, 1, self.task):
            os.kill(os.getpid(), signal.SIGKILL)


def train(killed: str = "") -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    strategy = insitu.MultiWorkerMirroredStrategy()
    with strategy.scope():
        layers = [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    fitted = model.fit(X, Y, batch_size=24, epochs=3, shuffle=False, verbose=0, callbacks=[Killer(killed)])
    print("trained by", insitu.context().task)
    me = insitu.context()
    facts = {"task": str(me.task), "replicas": strategy.num_replicas_in_sync, "seed": me.seed}
    return facts | {"weights": model.get_weights(), "history": fitted, "incarnation": me.incarnation}


def fail(wrong: str) -> None:
    if str(insitu.context().task) == wrong:
        raise ValueError("no such number: " + wrong)


def die() -> None:
    if insitu.context().task.index:
        os.kill(os.getpid(), signal.SIGKILL)


def call_run() -> Any:
    return insitu.run(die)


@pytest.mark.long
def test_two_workers_train_as_one_process_does(capfd: pytest.CaptureFixture[str]) -> None:
    plain = train()
    capfd.readouterr()
    results = insitu.run(train, workers=2, seed=7, name="both")
    out, err = capfd.readouterr()
    said = [line for line in out.splitlines() if "trained by" in line]
    assert sorted(said) == ["[worker:0] trained by worker:0", "[worker:1] trained by worker:1"]
    assert err.startswith("both-") and "[insitu] job finished" in err
    assert [(r["task"], r["replicas"], r["seed"]) for r in results] == [
        ("worker:0", 2, 7),
        ("worker:1", 2, 7),
    ]
    for one, two, alone in zip(*(r["weights"] for r in (*results, plain)), strict=True):
        assert one.tobytes() == two.tobytes()
        np.testing.assert_allclose(one, alone, rtol=2e-5, atol=2e-6)
    assert results[0]["history"] == results[1]["history"]
    np.testing.assert_allclose(results[0]["history"]["loss"], plain["history"].history["loss"], rtol=1e-5)
    killed = insitu.run(train, "worker:1", workers=2, seed=7)
    assert [result["incarnation"] for result in killed] == [1, 2]
    for result in killed:
        for one, other in zip(result["weights"], results[0]["weights"], strict=True):
            assert one.tobytes() == other.tobytes()
        assert result["history"] == results[0]["history"]


def test_the_rows_of_a_cache_are_read(capfd: pytest.CaptureFixture[str]) -> None:
    insitu.import_data("numbers", {"x": np.arange(50)})

    def count() -> tuple[str | None, int, list[int]]:
        me = insitu.context()
        rows = np.concatenate(list(insitu.dataset("numbers").batch(8)))
        return me.cache, me.num_shards, sorted(rows.tolist())

    one, two = insitu.run(count, cache="numbers", workers=2)
    assert one[:2] == two[:2] == ("numbers", 2)
    assert sorted(one[2] + two[2]) == list(range(50)) and one[2] and two[2]


def test_a_failure_has_the_traceback_of_its_task() -> None:
    with pytest.raises(TaskFailed) as caught:
        insitu.run(fail, "worker:1", workers=2)
    error = caught.value
    assert error.task == "worker:1" and error.job_id.startswith("fail-")
    assert error.traceback.startswith("Traceback") and error.traceback in str(error)
    assert error.traceback.rstrip().endswith("ValueError: no such number: worker:1")
    assert "in fail" in error.traceback and "function_jobs" not in error.traceback


def test_a_worker_that_is_killed_each_time_is_named() -> None:
    with pytest.raises(TaskFailed, match="worker:1 was killed by SIGKILL") as caught:
        insitu.run(die, workers=2, max_restarts=0)
    assert (caught.value.task, caught.value.traceback) == ("worker:1", "")


def test_a_run_in_a_task_is_refused() -> None:
    with pytest.raises(TaskFailed, match="is called outside of one"):
        insitu.run(call_run, workers=1)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"worker": 2}, InputError, "Did you mean 'workers'"),
        ({"workers": 0}, InputError, "at least 1"),
        ({"detach": True}, InputError, "Start a job without waiting by insitu.start"),
        ({"as_json": True}, InputError, "Leave it out"),
        ({"cache": "nowhere"}, UnknownCache, "nowhere"),
        ({"name": "a/b"}, InputError, "name"),
    ],
)
def test_wrong_options_start_nothing(options: dict[str, Any], kind: type[InputError], message: str) -> None:
    with pytest.raises(kind, match=message):
        insitu.run(die, **options)
    assert list_job_ids(Paths.default()) == []


def test_an_interrupt_stops_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> None:
        import time

        print("waiting", flush=True)
        time.sleep(1000)

    from insitu.service import Job

    follow = Job.logs

    def interrupt(job: Job, **options: Any) -> Any:
        for line in follow(job, **options):
            if "waiting" in line:
                raise KeyboardInterrupt
            yield line

    monkeypatch.setattr(Job, "logs", interrupt)
    with pytest.raises(KeyboardInterrupt):
        insitu.run(wait, workers=1)
    (job_id,) = list_job_ids(Paths.default())
    job = Job(job_id)
    job.wait(60)
    assert job.state == "stopped" and not is_running(job.paths)
