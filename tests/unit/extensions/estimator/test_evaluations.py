"""When an evaluation is due, on what, and what becomes of exporters that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from insitu.base.context import Context
from insitu.base.errors import InputError, TrainingError
from insitu.base.evaluations import Training, read_evaluations, record_training
from insitu.base.paths import Paths
from insitu.base.roster import Roster, write_roster
from insitu.base.spec import TaskId
from insitu.extensions.estimator.evaluations import (
    InTurnEvaluator,
    Pace,
    Publisher,
    SpecEvaluator,
    count_steps,
    find_inputs,
    is_of_training,
)
from insitu.extensions.estimator.exporters import Exporter, LatestExporter
from insitu.extensions.estimator.specs import EvalSpec
from insitu.train.evaluation.checkpoints import Candidate, Loaded

# Keras, as it saves
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X = np.arange(100, dtype="float32").reshape(50, 2)


def test_the_first_evaluation_is_delayed_and_the_others_are_throttled() -> None:
    now = [0.0]
    pace = Pace(EvalSpec(lambda: X, start_delay_secs=5, throttle_secs=20), lambda: now[0])
    due = []
    for second in range(50):
        now[0] = float(second)
        if pace.is_due():
            due.append(second)
            pace.begin()
    assert due == [5, 25, 45]
    pace.begin(at=40.0)  # an evaluation is over that had begun then
    now[0] = 59.0
    assert not pace.is_due()
    now[0] = 60.0
    assert pace.is_due()


class OneCheckpoint:
    """A source whose checkpoints change nothing."""

    def find(self) -> list[Candidate]:
        return [Candidate("one")]

    def load(self, candidate: Candidate, model: Any) -> Loaded:
        return Loaded(iterations=5, is_final=False)


def test_an_evaluator_counts_from_the_beginning_of_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, now = EvalSpec(lambda: (X, X[:, :1]), start_delay_secs=0, throttle_secs=20), [100.0]
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    evaluator = SpecEvaluator(model, spec, tmp_path, Publisher(spec, None))

    def evaluate(steps: int | None = None) -> dict[str, float]:
        now[0] += 15.0
        return {"loss": 1.0}

    monkeypatch.setattr(evaluator, "_pace", Pace(spec, lambda: now[0]))
    monkeypatch.setattr(evaluator, "_source", OneCheckpoint())
    monkeypatch.setattr(evaluator, "_evaluate", evaluate)
    assert evaluator._is_due()
    evaluator._score(Candidate("one"))
    assert now[0] == 115.0 and not evaluator._is_due()
    now[0] = 120.0
    assert evaluator._is_due()


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return X[index * 4 : index * 4 + 4], X[:4]


@pytest.mark.parametrize(
    ("data", "rows"),
    [((X, X), 32), ((X[:5],), 5), (Batches(), 4), ([(X[:3], X[:3])], 3), ([X[:2]], 2)],
)
def test_the_inputs_of_the_first_batch_are_found(data: Any, rows: int) -> None:
    assert np.array_equal(find_inputs(data), X[:rows])


def test_arrays_have_as_many_batches_as_they_have() -> None:
    assert count_steps((X, X), 100) == 2 and count_steps((X, X), 1) == 1
    assert count_steps((X, X), None) is None and count_steps(Batches(), 100) == 100


def test_rows_that_are_left_out_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    rows = np.zeros((3217, 1), "float32")
    assert count_steps((rows,), 100) == count_steps((rows,), 100) == 100
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("Evaluations are on the first 3200 of 3217 rows: steps=100 batches of 32.")
    assert count_steps((rows,), 101) == 101 and len(caplog.records) == 1


class Failing(Exporter):
    def export(self, *args: Any, **kwargs: Any) -> Path | None:
        raise TrainingError("Received: nothing good.")


def test_an_exporter_that_fails_harms_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    publisher = Publisher(EvalSpec(lambda: (X, X), exporters=[Failing("f"), LatestExporter()]), tmp_path)
    publisher.export(model, 7, {}, is_final=False)
    assert publisher.published == [tmp_path / "latest" / "00000007.keras"]
    assert "'f' published nothing: Received: nothing good." in caplog.text


def test_trainings_of_one_job_have_evaluations_of_their_own(home: Path) -> None:
    context = Context(Paths(home), job_id="j-1")
    assert context.job is not None
    context.job.evaluations.parent.mkdir(parents=True)
    spec = EvalSpec(lambda: (X, X))
    first, second = (InTurnEvaluator(spec, Publisher(spec, None), context, number) for number in (0, 1))
    for evaluator, loss in ((first, 1.0), (second, 2.0), (second, 3.0)):
        evaluator._note(20, {"loss": loss}, 0.1)  # what was noted before the script was run again stays
    found = read_evaluations(context.job.evaluations)
    assert [each.checkpoint for each in found] == ["step 20", "training 2, step 20"]
    assert [each.metrics["loss"] for each in found if is_of_training(each, 1)] == [2.0]


def test_exports_need_a_folder() -> None:
    with pytest.raises(InputError, match="model_dir is a URL"):
        Publisher(EvalSpec(lambda: X, exporters=LatestExporter()), None)
    Publisher(EvalSpec(lambda: X), None).export(None, 0, {}, is_final=True)


def test_an_evaluator_scores_the_checkpoints_of_its_training_alone(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = Context(Paths(home), job_id="j-1", task=TaskId("evaluator", 0))
    job = context.job
    assert job is not None
    job.root.mkdir(parents=True)
    spec = EvalSpec(lambda: (X, X[:, :1]))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    evaluator = SpecEvaluator(model, spec, tmp_path, Publisher(spec, None), 1)
    evaluator._context = context
    found = [Candidate(f"{fit}:{epoch}", fit, (epoch, 0)) for fit in (0, 1) for epoch in (1, 2, 3)]

    class Source(OneCheckpoint):
        def find(self) -> list[Candidate]:
            return found

    evaluator._source = Source()  # type: ignore[assignment]

    def look() -> tuple[bool, list[str]]:
        evaluator._training_over = evaluator._is_training_over()
        return evaluator._training_over, [each.name for each in evaluator._find()]

    write_roster(job.roster, Roster(2, (), ()))
    record_training(job.trainings, Training(0, 0))
    assert look() == (False, [])  # that of this call hasn't begun
    record_training(job.trainings, Training(1, 1))
    assert look() == (False, ["1:1", "1:2", "1:3"])
    record_training(job.trainings, Training(1, 1, True, (4, 0)))
    assert look() == (False, ["1:1", "1:2", "1:3"])  # its last one is on its way
    found += [Candidate("1:4", 1, (4, 0)), Candidate("1:5", 1, (5, 0))]  # and the next training has saved
    assert look() == (True, ["1:1", "1:2", "1:3", "1:4"])
    assert evaluator._identify(found[0]) == "1/0:1"
    evaluator._end()
    assert "wasn't scored" not in caplog.text
    found.remove(Candidate("1:4", 1, (4, 0)))
    assert look() == (True, ["1:1", "1:2", "1:3"])  # the next one has removed it
    evaluator._end()
    assert "The last checkpoint of training 2 wasn't scored: the next one" in caplog.text
    job.trainings.unlink()
    write_roster(job.roster, Roster(3, (), (), training_over=True))
    assert look() == (True, [each.name for each in found])  # nobody has said whose they are
