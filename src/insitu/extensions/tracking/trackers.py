"""What a tracker offers: the interface for plug-ins of `insitu.trackers`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

from insitu.base.errors import InputError
from insitu.base.plugins import TRACKERS, load_plugin
from insitu.base.tracking import Tracking

Status = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The run that a tracker shows: one for each job, whatever becomes of its tasks."""

    #: The tracker's address, as its library takes it; empty: that of the library's own settings.
    address: str
    #: The experiment or project.
    experiment: str
    #: The job's id. A tracker that has a run of this name in the experiment continues that one.
    name: str


class TrackedRun(Protocol):
    """A run of a tracker. All methods may raise whatever the library raises: they are called again later."""

    link: str
    """The URL or file of the run, for people; empty if there is none."""

    def read_last_steps(self) -> Mapping[str, int]:
        """Return the largest step that the tracker has of each metric; by "" one of all metrics."""

    def log_parameters(self, values: Mapping[str, str | int | float | bool]) -> None:
        """Log parameters. Those that are there stay as they are."""

    def log_metrics(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Log metrics of a step, at a time in seconds since 1970. Steps never fall."""

    def log_file(self, path: Path) -> None:
        """Log a file under its name."""

    def flush(self) -> None:
        """Return once all that was logged is with the tracker, or on this disk in its library's care."""

    def end(self, status: Status) -> None:
        """Note how the job has ended, and close the run."""


class Tracker(Protocol):
    """A tracker's library. It is imported in a process of its own, by `open`."""

    package: str
    """The module that must be installed."""
    install: str
    """What `pip install` installs it."""

    def open(self, spec: RunSpec) -> TrackedRun:
        """Begin a run, or continue the one of this name."""


def find_tracker(name: str) -> Tracker:
    """Return the tracker of that name. Raises InputError if there is none, or its library isn't installed."""
    tracker = cast("Tracker", load_plugin(TRACKERS, name))
    if importlib.util.find_spec(tracker.package) is None:
        raise InputError(
            f"A tracker needs its library. Received: {name}, without {tracker.package}. Run `pip install "
            f"{tracker.install}` for the Python that runs insitu, on each host that trains"
        )
    return tracker


def check_tracker(tracking: Tracking) -> None:
    """Raise InputError if a tracker can't be used on this machine."""
    find_tracker(tracking.tracker)
