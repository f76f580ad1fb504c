"""Where loops stand in their data."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest

from insitu.base.context import Context
from insitu.base.errors import InputError
from insitu.grid import DataPosition, Dataset, dataset


@pytest.fixture
def make(cache: str, alone: Context) -> Any:
    def make(**changes: Any) -> Dataset:
        opened = dataset(cache, features="id", label=None, context=replace(alone, **changes))
        return opened.shuffle(3).batch(300)

    return make


def read(data: Dataset) -> list[list[int]]:
    return [batch.tolist() for batch in data]


def test_a_position_goes_from_one_process_to_the_next(make: Any) -> None:
    first = make()
    epochs = [read(first) for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    assert first.state_dict() == {"epoch": 3, "step": 0}

    second = make()
    second.set_epoch(1)
    iterator = iter(second)
    assert next(iterator).tolist() == epochs[1][0]
    assert second.state_dict() == {"epoch": 1, "step": 1}

    third = make()
    third.load_state_dict(second.state_dict())
    assert read(third) == epochs[1][1:]
    assert read(third) == epochs[2]
    # One that was saved behind the last step has nothing left in its epoch.
    third.load_state_dict({"epoch": 1, "step": len(third)})
    assert read(third) == []
    assert read(third) == epochs[2]


def test_an_epoch_of_several_passes_goes_on_in_one_of_them(make: Any) -> None:
    whole = read(make().repeat(2))
    data = make().repeat(2)
    data.load_state_dict({"epoch": 0, "step": len(make()) + 1})
    assert read(data) == whole[len(make()) + 1 :]
    endless = make().repeat()
    endless.load_state_dict({"epoch": 0, "step": len(make()) + 1})
    assert next(iter(endless)).tolist() == whole[len(make()) + 1]


def test_an_epoch_that_is_left_in_its_middle_is_over() -> None:
    position = DataPosition()
    first = position.begin()
    position.advance(first)
    position.advance(first)
    assert (position.epoch, position.step, position.is_under_way) == (0, 2, True)
    second = position.begin()
    assert (position.epoch, position.step) == (1, 0)
    # What the script let go of late changes nothing.
    position.advance(first)
    position.end(first)
    assert (position.epoch, position.step) == (1, 0)
    position.advance(second)
    position.end(second)
    assert (position.epoch, position.step, position.is_under_way) == (2, 0, False)


@pytest.mark.parametrize("state", [{}, {"epoch": -1}, {"epoch": 1, "step": -2}, {"epoch": 1.5}, "1", None])
def test_what_is_no_position_is_refused(make: Any, state: Any) -> None:
    data = make()
    with pytest.raises(InputError, match=r'position in data is \{"epoch": E, "step": S\}'):
        data.load_state_dict(state)
    assert data.state_dict() == {"epoch": 0, "step": 0}


def test_a_task_that_was_started_again_is_told_that_it_must_say_where_it_is(make: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(make())
        said = make(incarnation=2)
        said.set_epoch(1)
        read(said)
        read(said)
        unshuffled = dataset("a", features="id", label=None, context=said._context).batch(300)
        read(unshuffled)
    with pytest.warns(UserWarning, match=r"started again.*set_epoch\(N\).*epoch 0 of <insitu.dataset\('a'\)"):
        read(make(incarnation=2))
