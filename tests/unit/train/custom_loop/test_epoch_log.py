"""Where a restarted loop stands in its data, by the weights that it begins with."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest

from insitu.base.context import Context
from insitu.base.errors import UnknownPosition
from insitu.base.paths import Paths
from insitu.grid import DataPosition
from insitu.train.custom_loop import EpochLog


class Attempt:
    """The loop of one attempt of a job, over `datasets` distributed datasets."""

    def __init__(
        self, home: Path, generation: int, *, weight: float = 0.5, datasets: int = 1, in_job: bool = True
    ) -> None:
        context = Context(Paths(home), job_id="job-1" if in_job else None, generation=generation)
        if context.job is not None:
            context.job.loop_epochs.parent.mkdir(parents=True, exist_ok=True)
        self.weight = keras.Variable(weight)
        self.made = weight
        self.optimizer = keras.optimizers.SGD(0.1)
        self.runs = 0
        tracker: Any = SimpleNamespace(
            number=0,
            layers=[],
            optimizers=[self.optimizer],
            weights=lambda: [self.weight],
            are_weights_as_made=lambda: float(self.weight) == self.made,
        )
        self.log = EpochLog(context, tracker, lambda: self.runs)
        self.positions = [DataPosition() for _ in range(datasets)]
        for position in self.positions:
            self.log.add(position)

    def restore(self, weight: float, updates: int) -> None:
        self.weight.assign(weight)
        self.optimizer.iterations.assign(updates)

    def begin(self, number: int = 0, *, matters: bool = True) -> int:
        """The epoch that the next iteration of a dataset is."""
        self.positions[number].leave()
        self.log.find(number, "<data>", matters=matters)
        self.log.note(number)
        self.positions[number].begin()
        return self.positions[number].epoch

    def train(self, number: int = 0, *, steps: int = 2) -> None:
        """The rest of that iteration."""
        for _ in range(steps):
            self.weight.assign(self.weight * 0.5 + 1)
            self.optimizer.iterations.assign_add(1)
            self.runs += 1
        self.positions[number].leave()
        self.log.note()

    def run(self, epochs: int, number: int = 0) -> list[float]:
        """The weights behind each of so many epochs."""
        weights = []
        for _ in range(epochs):
            self.begin(number)
            self.train(number)
            weights.append(float(self.weight))
        return weights


def test_a_loop_goes_on_at_the_epoch_of_its_weights(tmp_path: Path) -> None:
    first = Attempt(tmp_path, 1)
    weights = first.run(3)
    first.begin()
    for generation, epoch in [(2, 3), (3, 2), (4, 1)]:
        restarted = Attempt(tmp_path, generation, weight=7.0)
        restarted.restore(weights[epoch - 1], 2 * epoch)
        assert restarted.log.is_restarted
        assert restarted.begin() == epoch
        restarted.train()
        assert restarted.begin() == epoch + 1


def test_a_loop_with_the_weights_that_were_made_starts_from_scratch(tmp_path: Path) -> None:
    Attempt(tmp_path, 1).run(3)
    anew = Attempt(tmp_path, 2, weight=9.0)
    assert [anew.begin(), anew.train(), anew.begin()] == [0, None, 1]
    # A look at the first batch is an epoch of its own, as in the first attempt.
    looks = Attempt(tmp_path, 3, weight=8.0)
    assert [looks.begin(), looks.begin()] == [0, 1]


def test_a_loop_that_looks_at_a_batch_first_goes_on_with_the_same_epoch(tmp_path: Path) -> None:
    first = Attempt(tmp_path, 1)
    first.begin()
    weights = first.run(2)
    assert first.begin() == 3
    restarted = Attempt(tmp_path, 2, weight=7.0)
    assert restarted.begin() == 0  # before it restores
    restarted.restore(weights[1], 4)
    assert [restarted.begin(), restarted.begin()] == [3, 3]


def test_what_is_not_known_is_refused_if_it_matters(tmp_path: Path) -> None:
    Attempt(tmp_path, 1).run(3)
    within = Attempt(tmp_path, 2)
    within.restore(1.234, 3)
    with pytest.raises(UnknownPosition, match=r"<data>.*come to epoch 3.*Checkpoint\(data=data.*set_epoch"):
        within.begin()
    assert UnknownPosition.is_final
    assert within.begin(matters=False) == 0
    said = Attempt(tmp_path, 3)
    said.restore(1.234, 3)
    said.positions[0].move(2)
    said.positions[0].is_said = True
    assert [said.begin(), said.train(), said.begin()] == [2, None, 3]


def test_weights_that_stand_still_tell_nothing(tmp_path: Path) -> None:
    first = Attempt(tmp_path, 1)
    for _ in range(2):
        first.begin()
        first.train(steps=0)
    with pytest.raises(UnknownPosition):
        Attempt(tmp_path, 2).begin()
    # Once training has moved them, those of the beginning tell of the beginning.
    moved = tmp_path / "moved"
    first = Attempt(moved, 1)
    first.begin()
    first.train(steps=0)
    first.run(1)
    assert Attempt(moved, 2).begin() == 0


def test_datasets_of_one_loop_go_on_together(tmp_path: Path) -> None:
    first = Attempt(tmp_path, 1, datasets=2)
    for _ in range(2):
        first.run(1)
        weight = float(first.weight)
        first.begin(1)
        first.train(1, steps=0)
    first.begin()
    restarted = Attempt(tmp_path, 2, datasets=2, weight=7.0)
    restarted.restore(weight, 4)
    assert restarted.begin() == 2
    restarted.train()
    assert restarted.begin(1) == 2
    said = Attempt(tmp_path, 3, datasets=2, weight=7.0)
    said.restore(1.234, 5)
    said.positions[0].move(2, 1)
    said.positions[0].is_said = True
    assert [said.begin(), said.begin(1)] == [2, 2]


def test_data_that_is_distributed_in_the_loop_must_be_said(tmp_path: Path) -> None:
    first = Attempt(tmp_path, 1)
    weights = first.run(1)
    first.positions.append(DataPosition())
    assert first.log.add(first.positions[1]) == 1
    first.run(1, number=1)
    for generation, restored in [(2, weights[0]), (3, float(first.weight))]:
        restarted = Attempt(tmp_path, generation, weight=7.0)
        restarted.restore(restored, 2)
        with pytest.raises(UnknownPosition):
            restarted.begin()
    # One that begins anew does as before.
    anew = Attempt(tmp_path, 4)
    anew.run(1)
    anew.positions.append(DataPosition())
    anew.log.add(anew.positions[1])
    assert anew.begin(1) == 0


def test_an_optimizer_that_was_restored_elsewhere_is_warned_of(tmp_path: Path) -> None:
    for options in ({}, {"in_job": False}):
        restored = Attempt(tmp_path, 1, **options)
        restored.restore(2.0, 12)
        with pytest.warns(UserWarning, match=r"epoch 0 of <data>, though.*12 updates elsewhere.*set_epoch"):
            assert restored.begin() == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            restored.train()
            assert restored.begin() == 1
            other = Attempt(tmp_path, 1, **options)
            other.restore(2.0, 12)
            other.begin(matters=False)


def test_lines_that_were_cut_off_are_left_out(tmp_path: Path) -> None:
    first = Attempt(tmp_path, 1)
    weights = first.run(2)
    first.begin()
    path = Context(Paths(tmp_path), job_id="job-1").job.loop_epochs
    path.write_text(path.read_text() + '[1, 0, "00')
    restarted = Attempt(tmp_path, 2, weight=7.0)
    restarted.restore(weights[1], 4)
    assert restarted.begin() == 2


def test_a_storage_that_fails_does_not_begin_a_loop_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Attempt(tmp_path, 0)
    first.begin()

    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(Path, "read_text", fail)
    with pytest.raises(OSError, match="the disk fails"):
        Attempt(tmp_path, 1)
