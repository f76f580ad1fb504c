"""A step is the one that was compiled while its code reads the same objects and plain values."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from insitu.train.custom_loop.step_identity import MISSING, identify_step, name_changes

BETA = 0.5
CONFIG = {"beta": 0.5, "layers": [1, 2], "parts": [SimpleNamespace(beta=0.5)]}
TABLE = np.full(3, 0.5)
MODEL: Any = SimpleNamespace(beta=0.5, inner=SimpleNamespace(beta=0.5))
COUNTED = 0
SEEN: list[Any] = []


class Settings:
    beta = 0.5


class Slotted:
    __slots__ = ("beta",)

    def __init__(self) -> None:
        self.beta = 0.5

    @property
    def computed(self) -> float:
        raise AssertionError("this runs code")


class Trainer:
    kind: ClassVar[dict[str, float]] = {"beta": 0.5}

    def __init__(self) -> None:
        self.beta, self.settings = 0.5, {"beta": 0.5}

    @property
    def doubled(self) -> float:
        return 2 * self.beta

    def weigh(self, x: Any) -> Any:
        return x * self.beta

    def by_a_method(self, x: Any) -> Any:
        return self.weigh(x)

    def by_a_property(self, x: Any) -> Any:
        return x * self.doubled

    def by_a_function_inside(self, x: Any) -> Any:
        return (lambda: x * self.beta)()

    def by_settings(self, x: Any) -> Any:
        return x * self.settings["beta"]

    def by_get(self, x: Any) -> Any:
        return x * self.settings.get("beta", 1.0)

    def by_its_class(self, x: Any) -> Any:
        return x * self.kind["beta"]


class Loss:
    """A loss of the script's, which a class of a library calls."""

    def __init__(self) -> None:
        self.beta = 0.5

    def call(self, x: Any) -> Any:
        return x * self.beta


SLOTTED, TRAINER, LOSS = Slotted(), Trainer(), Loss()


def helper(x: Any) -> Any:
    return x * BETA


def of_a_global(x: Any) -> Any:
    return x * BETA


def of_an_attribute(x: Any) -> Any:
    return MODEL.inner.beta * x


def of_a_class(x: Any) -> Any:
    return Settings.beta * x


def of_slots(x: Any) -> Any:
    return SLOTTED.beta * x + SLOTTED.computed


def of_a_dictionary(x: Any) -> Any:
    return CONFIG["beta"] * x


def of_a_helper(x: Any) -> Any:
    def inside() -> Any:
        return helper(x)

    return inside()


def of_an_array(x: Any) -> Any:
    return TABLE * x


def of_an_object_in_a_list(x: Any) -> Any:
    return CONFIG["parts"][0].beta * x


def of_a_loss(x: Any) -> Any:
    return LOSS(x)  # type: ignore[operator]


def of_an_alias(x: Any, model: Any = MODEL) -> Any:
    return model.beta * x


def set_beta(owner: Any) -> Any:
    return lambda patch: patch.setattr(owner, "beta", 0.75)


def change_global(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "BETA", 0.75)


CHANGES: dict[Any, Any] = {
    of_a_global: change_global,
    of_a_helper: change_global,
    of_an_attribute: lambda patch: patch.setattr(MODEL.inner, "beta", 0.75),
    of_a_class: lambda patch: patch.setattr(Settings, "beta", 0.75),
    of_slots: lambda patch: patch.setattr(SLOTTED, "beta", 0.75),
    of_a_dictionary: lambda patch: patch.setitem(CONFIG, "beta", 0.75),
    of_an_object_in_a_list: set_beta(CONFIG["parts"][0]),
    of_a_loss: set_beta(LOSS),
    functools.partial(of_an_alias, model=MODEL): set_beta(MODEL),
    functools.partial(helper): change_global,
    TRAINER.by_a_method: set_beta(TRAINER),
    TRAINER.by_a_property: set_beta(TRAINER),
    TRAINER.by_a_function_inside: set_beta(TRAINER),
    TRAINER.by_settings: lambda patch: patch.setitem(TRAINER.settings, "beta", 0.75),
    TRAINER.by_get: lambda patch: patch.setitem(TRAINER.settings, "beta", 0.75),
    TRAINER.by_its_class: lambda patch: patch.setitem(Trainer.kind, "beta", 0.75),
}


@pytest.mark.parametrize("step", CHANGES, ids=lambda step: getattr(step, "__name__", "partial"))
def test_a_number_that_a_step_reads_is_a_part_of_it(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identify_step(step)[0]
    assert identify_step(step)[0] == before
    CHANGES[step](monkeypatch)
    assert identify_step(step)[0] != before
    assert name_changes(before, identify_step(step)[0])
    monkeypatch.undo()
    assert identify_step(step)[0] == before


def test_an_array_that_is_changed_in_place_is_another_one() -> None:
    before = identify_step(of_an_array)[0]
    TABLE[1] = 0.75
    assert identify_step(of_an_array)[0] != before
    TABLE[1] = 0.5
    assert identify_step(of_an_array)[0] == before


def test_an_argument_that_is_an_object_counts_with_what_is_read_of_it() -> None:
    def step(x: Any, settings: Any, *, more: Any) -> Any:
        return x * settings.beta * more.beta

    one, more = SimpleNamespace(beta=0.5), SimpleNamespace(beta=0.5)
    before = identify_step(step, (MISSING, one), {"more": more})[0]
    for changed in (one, more):
        changed.beta = 0.75
        assert identify_step(step, (MISSING, one), {"more": more})[0] != before
        changed.beta = 0.5
    assert identify_step(step, (MISSING, one), {"more": more})[0] == before


def test_an_object_of_the_same_name_makes_another_step(monkeypatch: pytest.MonkeyPatch) -> None:
    before, objects = identify_step(of_an_attribute)
    assert any(each is MODEL for each in objects)
    monkeypatch.setitem(globals(), "MODEL", SimpleNamespace(inner=MODEL.inner))
    assert identify_step(of_an_attribute)[0] != before


def test_a_step_that_is_made_again_over_the_same_is_the_same() -> None:
    def make(beta: Any, objects: Any = MODEL) -> Any:
        def step(x: Any, scale: float = 2.0) -> Any:
            return x * beta * scale * objects.beta

        return step

    first = identify_step(make(float("0.5")))[0]
    assert identify_step(make(float("0.5")))[0] == first
    assert identify_step(make(0.75))[0] != first
    assert identify_step(make(0.5, SimpleNamespace(beta=0.5)))[0] != first
    other = make(0.5)
    other.__defaults__ = (3.0,)
    assert identify_step(other)[0] != first


def test_methods_and_callable_objects_read_their_own() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.beta, self.loss = 0.5, None

        def step(self, x: Any) -> Any:
            self.loss = self.beta * x  # type: ignore[assignment]
            return self.loss

        def __call__(self, x: Any) -> Any:
            return self.beta * x

    trainer = Trainer()
    for step in (lambda: trainer.step, lambda: trainer):
        trainer.beta = 0.5
        before = identify_step(step())[0]
        # What the step writes itself changes with each trace.
        trainer.step(3.0)
        assert identify_step(step())[0] == before
        trainer.beta = 0.75
        assert identify_step(step())[0] != before


def test_what_a_step_changes_while_it_is_traced_counts_nothing() -> None:
    counts = {"traced": 0}

    def step(x: Any) -> Any:
        global COUNTED
        COUNTED += 1
        counts["traced"] += 1
        SEEN.append(x)
        return x

    before = identify_step(step)[0]
    step(1)
    assert identify_step(step)[0] == before
