"""Injects faults into running jobs, for `insitu chaos` and the tests.

It may import every other room of `cluster`. Begin reading with `injector.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.cluster.chaos.injector import (
        FaultInjector,
        InjectedFault,
        find_leftovers,
        plan_faults,
        read_results,
        wait_until_ended,
    )

__getattr__, __dir__ = export_lazily(__name__)
