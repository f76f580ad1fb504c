"""Find out how the parts of a model that are the user's own combine over replicas.

Before a replica is compiled, the model's steps run on a few rows that are the same in each process, once on
the whole batch and once on its parts. The results of the parts must combine to that of the whole: gradients
as a mean over rows, metrics and other state by some operation. The same holds for rows of the first batch,
and for one whose label says that it has none. Models of Keras' own parts alone aren't probed.

Begin reading with `probe.py`; `decisions.py` decides, from numbers alone.
"""

from insitu.train.replica.probe.observer import SAMPLE_ROWS
from insitu.train.replica.probe.outcome import (
    EagerSteps,
    Outcome,
    Totals,
    add_rows,
    losses_of,
    make_outcome,
    read_logs,
    split_inputs,
    to_float64,
)
from insitu.train.replica.probe.probe import has_custom_parts, plan_combination
