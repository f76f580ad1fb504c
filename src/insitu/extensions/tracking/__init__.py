"""Logs of a training for experiment trackers: a callback, an outbox on the disk, and a process that sends it.

The callback writes records to a folder of the job. `sender.py` runs as a process of its own and gives them
to a library such as MLflow, in their order, each once. So a training never waits for a tracker, and loses
nothing if one is unreachable. Begin reading with `callback.py`, then `sender.py`; the interface is in
`trackers.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.extensions.tracking.callback import Track, make_callback_of_job, track
    from insitu.extensions.tracking.run_folder import send_waiting
    from insitu.extensions.tracking.trackers import RunSpec, TrackedRun, Tracker, check_tracker

__getattr__, __dir__ = export_lazily(__name__)
