"""A task that enters a fit in its middle hears what is behind the last unit, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from insitu.train.elastic.position import TRAIN, LoopPosition
from insitu.train.fit import entry as e
from insitu.train.fit.entry import Entry, Key

HERE = LoopPosition(0, TRAIN, 1)


@dataclass(frozen=True)
class Unit:
    """Something that all tasks do together."""

    position: LoopPosition


@dataclass(frozen=True)
class Fit:
    """How long the epochs of a fit are: steps, and tests; None if nothing is tested."""

    epochs: tuple[tuple[int, int | None], ...]
    initial_epoch: int = 0
    steps_per_execution: int = 1


def events_and_units(fit: Fit) -> Iterator[tuple[str, Key] | Unit]:
    """Yield in order what callbacks hear, and units, as Keras' loop and `EpochCallbacks` do."""
    yield "train begin", e.TRAIN_BEGIN
    yield Unit(HERE.at_begin())
    stride, epoch = fit.steps_per_execution, fit.initial_epoch
    for epoch, (steps, tests) in enumerate(fit.epochs, fit.initial_epoch):
        yield f"epoch {epoch}", e.key_of_epoch_begin(epoch)
        for first in range(0, steps, stride):
            yield f"batch {epoch} {first}", e.key_of_batch_begin(epoch, first)
            last = min(first + stride, steps)
            for step in range(first, last):
                yield Unit(HERE.at_step(epoch, step))
            yield f"batch end {epoch} {last}", e.key_of_batch_end(epoch, last - 1)
        if tests is not None:
            yield f"tests {epoch}", e.key_of_test_begin(epoch)
            for first in range(0, tests, stride):
                yield f"test {epoch} {first}", e.key_of_test_batch_begin(epoch, first)
                for test in range(first, min(first + stride, tests)):
                    yield Unit(HERE.at_step(epoch, steps).at_test(test))
                # As Keras counts: the last execution may have fewer.
                yield f"test end {epoch} {first}", e.key_of_test_batch_end(epoch, first + stride - 1)
            yield f"tests end {epoch}", e.key_of_test_end(epoch)
        yield f"epoch end {epoch}", e.key_of_epoch_end(epoch)
        yield Unit(HERE.at_step(epoch, steps).at_test(tests or 0).at_epoch_end())
    yield "train end", e.TRAIN_END
    yield Unit(HERE.at_step(epoch + 1 if fit.epochs else 0, 0).at_end())


lengths = st.tuples(st.integers(0, 5), st.none() | st.integers(0, 4))
fits = st.builds(Fit, st.lists(lengths, max_size=4).map(tuple), st.integers(0, 3), st.integers(1, 3))


def split(fit: Fit, unit: int) -> tuple[LoopPosition, list[str], list[str], list[tuple[str, Key]]]:
    """Return the position of a unit, the events before the unit before it, those between the two, and all."""
    behind, between, listed = [], [], []
    position = None
    for one in events_and_units(fit):
        if isinstance(one, Unit):
            if unit == 0:
                position = one.position
            elif unit > 0:
                behind, between = behind + between, []
            unit -= 1
        else:
            listed.append(one)
            if position is None:
                between.append(one[0])
    assert position is not None
    return position, behind, between, listed


def heard(entry: Entry, listed: list[tuple[str, Key]]) -> list[str]:
    return [name for name, key in listed if not entry.was_heard(key)]


def repeated(entry: Entry, listed: list[tuple[str, Key]]) -> list[str]:
    return [name for name, key in listed if not entry.was_heard(key) and entry.repeats(key)]


def first_of(fit: Fit) -> LoopPosition:
    """The unit that follows the beginning of a fit."""
    return [one.position for one in events_and_units(fit) if isinstance(one, Unit)][1]


@given(fits, st.data())
def test_a_replacement_hears_what_lies_behind_the_last_unit(fit: Fit, data: st.DataObject) -> None:
    units = sum(isinstance(one, Unit) for one in events_and_units(fit))
    position, before, between, listed = split(fit, data.draw(st.integers(1, units - 1)))
    entry = e.enter_beside_others(position, e.NOTHING if position == first_of(fit) else None)
    names = [name for name, _ in listed]
    assert [name for name in names if name not in before] == heard(entry, listed)
    assert between == repeated(entry, listed)
    assert entry.is_in_middle
    assert entry.is_at_end == (position.kind == "end")


def test_before_the_first_unit_all_is_heard_and_the_beginning_again() -> None:
    position, before, between, listed = split(Fit(((2, 1),)), 0)
    assert (position, before, between) == (HERE.at_begin(), [], ["train begin"])
    entry = e.enter_at_beginning(Entry().heard, 0, 0)
    assert heard(entry, listed) == [name for name, _ in listed]
    assert repeated(entry, listed) == ["train begin"]
    assert not entry.is_in_middle and heard(Entry(), listed) == [name for name, _ in listed]
    assert repeated(Entry(), listed) == []


@given(fits, st.data())
def test_a_checkpoint_repeats_nothing(fit: Fit, data: st.DataObject) -> None:
    """It is saved as a batch's events end, or an epoch's."""
    listed = [one for one in events_and_units(fit) if not isinstance(one, Unit)]
    places = [(i, name) for i, (name, _) in enumerate(listed) if name.startswith(("batch end", "epoch end"))]
    if not places:
        return
    index, name = data.draw(st.sampled_from(places))
    numbers = [int(number) for number in name.split()[2:]]
    at = (numbers[0], numbers[1]) if name.startswith("batch") else (numbers[0] + 1, 0)
    entry = e.enter_by_checkpoint(*at)
    assert heard(entry, listed) == [name for name, _ in listed[index + 1 :]]
    assert repeated(entry, listed) == []
    # Others that are lost before their first unit, and behind the beginning.
    again = e.enter_at_beginning(entry.heard, *at)
    assert heard(again, listed) == heard(entry, listed)
    assert repeated(again, listed) == []


@given(fits, st.data())
def test_who_replaces_a_task_in_its_first_unit_behind_a_checkpoint_hears_of_no_step_before(
    fit: Fit, data: st.DataObject
) -> None:
    """The step is that of the checkpoint: nobody has done it in this attempt."""
    listed = [one for one in events_and_units(fit) if not isinstance(one, Unit)]
    steps = [
        one.position
        for one in events_and_units(fit)
        if isinstance(one, Unit)
        and one.position.kind == TRAIN
        and one.position.step % fit.steps_per_execution == 0
    ]
    if not steps:
        return
    position = data.draw(st.sampled_from(steps))
    own = e.enter_by_checkpoint(position.epoch, position.step)
    entry = e.enter_beside_others(position, own.heard)
    assert heard(entry, listed) == heard(own, listed)


@given(fits, st.data())
def test_new_callbacks_hear_of_the_beginning_and_of_no_step_that_was_done(
    fit: Fit, data: st.DataObject
) -> None:
    listed = [one for one in events_and_units(fit) if not isinstance(one, Unit)]
    epoch = data.draw(st.integers(0, len(fit.epochs)))
    steps = fit.epochs[epoch][0] if epoch < len(fit.epochs) else 0
    done = -(-data.draw(st.integers(0, steps)) // fit.steps_per_execution) * fit.steps_per_execution
    at = epoch + fit.initial_epoch, min(done, steps)
    skipped = {f"batch {at[0]} {step}" for step in range(at[1])}
    skipped |= {f"batch end {at[0]} {step}" for step in range(at[1] + 1)}
    for entry in (e.enter_without_memory(*at), e.enter_at_beginning(e.NOTHING, *at)):
        assert heard(entry, listed) == [name for name, _ in listed if name not in skipped]
    assert repeated(e.enter_without_memory(*at), listed) == []


def test_keys_are_in_the_order_of_what_happens() -> None:
    fit = Fit(((3, 2), (0, None), (2, 0), (5, 4)), 2, 2)
    keys = [one[1] for one in events_and_units(fit) if not isinstance(one, Unit)]
    assert keys == sorted(set(keys))
