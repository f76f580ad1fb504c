"""The line per so many steps, under a strategy and without one."""

from __future__ import annotations

import re
from typing import Any

import pytest
from models import image_model, image_rows, in_shards

import insitu
from insitu.base.errors import TrainingError
from insitu.train import MultiWorkerMirroredStrategy, ParameterServerStrategy, StepLog

LINE = r"step (\d+), loss = \S+, accuracy = \S+, top = \S+(, [\d,]+ examples/s)?, [\d.e+]+ ms/batch"


def fit(model: Any, every: int, epochs: int = 3, **options: Any) -> list[str]:
    lines: list[str] = []
    x, y = image_rows()
    callbacks = [StepLog(every, write=lines.append), *options.pop("callbacks", [])]
    model.fit(x, y, batch_size=32, epochs=epochs, verbose=0, callbacks=callbacks, **options)
    return lines


def parse(lines: list[str]) -> list[int]:
    """Return the steps of the lines, which are as documented."""
    found = [re.fullmatch(LINE, line) for line in lines]
    assert all(found), lines
    return [int(match[1]) for match in found if match]


class EachBatch(insitu.estimator.SessionRunHook):
    """A callback for which Keras calls all others at each batch, too."""


@pytest.mark.parametrize("others", [[], [EachBatch]])
def test_a_line_has_the_updates_of_the_model_and_all_rows(others: list[Any]) -> None:
    with MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)).scope():
        model = image_model()
    x, y = image_rows()
    lines = fit(model, 4, validation_data=(x[:64], y[:64]), callbacks=[kind() for kind in others])
    assert parse(lines) == [4, 8, 12, 16, 20]
    assert all("examples/s" in line for line in lines)
    # The next fit continues counting.
    assert parse(fit(model, 10, epochs=2)) == [30]


def test_a_line_has_the_updates_of_parameter_servers() -> None:
    """In mode async each gradient of a step is one: a line had the steps of the chief."""
    with ParameterServerStrategy(context=in_shards((0, 1), 2), mode="async").scope():
        model = image_model()
    lines = fit(model, 6)
    assert parse(lines) == [6, 12, 18, 24, 30, 36, 42]
    assert parse(fit(model, 6, epochs=1)) == [48, 54]


def test_kerass_own_loop_counts_no_rows() -> None:
    model = image_model()
    lines = fit(model, 5)
    assert parse(lines) == [5, 10, 15, 20]
    assert not any("examples" in line for line in lines)
    # Of 7 steps an epoch, all in one call.
    assert parse(fit(image_model(steps_per_execution=7), 14, epochs=6)) == [14, 28, 42]


def test_the_line_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = image_model()
    x, y = image_rows()
    model.fit(x, y, batch_size=32, verbose=0, callbacks=[StepLog(3)])
    assert parse(capsys.readouterr().out.splitlines()) == [3, 6]


def test_workers_that_are_not_the_chief_print_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2))
    monkeypatch.setattr(type(strategy.membership.context), "is_chief", property(lambda self: False))
    with strategy.scope():
        model = image_model()
    assert fit(model, 2) == []


def test_every_is_a_number_of_steps() -> None:
    with pytest.raises(TrainingError, match="at least 1"):
        StepLog(0)
    with pytest.raises(TrainingError, match="Received: 'epoch'"):
        StepLog("epoch")  # type: ignore[arg-type]
