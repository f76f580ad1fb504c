"""A plan refuses a step by itself."""

from __future__ import annotations

import pytest

from insitu.base.errors import TrainingError
from insitu.train.replica.plan import CombinationPlan


def test_each_step_is_refused_for_itself() -> None:
    CombinationPlan().check_train()
    CombinationPlan().check_test()
    plan = CombinationPlan(train_refusal="no training")
    plan.check_test()
    with pytest.raises(TrainingError, match="no training"):
        plan.check_train()
    with pytest.raises(TrainingError, match="no tests"):
        CombinationPlan(test_refusal="no tests").check_test()
