"""How the steps of a model combine over replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from insitu.base.errors import TrainingError
from insitu.train.replica.combination import Operation


@dataclass(frozen=True, slots=True)
class CombinationPlan:
    """Says how the variables of a model combine, and which of its steps can't be combined."""

    operations: Mapping[int, Operation] = field(default_factory=dict)
    """The operations of variables that combine otherwise than by default, by id."""
    train_refusal: str | None = None
    """Why training can't be combined."""
    test_refusal: str | None = None
    """Why evaluation can't be combined."""
    unchecked: tuple[str, ...] = ()
    """Facts that could not be found out, and why; each a sentence without its stop."""
    effects: tuple[str, ...] = ()
    """Attributes of the user's parts that finding out has changed, as `part.attribute`."""
    number: int = 0
    """A number below 2**32 that distinguishes the plans of two processes."""

    loss_exponent: int = 0
    """Losses that are scaled for half precision are scaled by 2**-loss_exponent too, since those of a replica
    are means over fewer rows than the batch has, so that their gradients are larger."""

    def check_train(self) -> None:
        """Raise TrainingError unless training can be combined."""
        if self.train_refusal is not None:
            raise TrainingError(self.train_refusal)

    def check_test(self) -> None:
        """Raise TrainingError unless evaluation can be combined."""
        if self.test_refusal is not None:
            raise TrainingError(self.test_refusal)
