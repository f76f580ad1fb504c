"""Runs of Weights & Biases. Its own process keeps what was logged on the disk, and sends it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from insitu.extensions.tracking.trackers import RunSpec, Status, TrackedRun


class WandbTracker:
    """See Tracker."""

    package = "wandb"
    install = "'insitu[wandb]'"

    def open(self, spec: RunSpec) -> TrackedRun:
        import wandb

        entity, _, project = spec.experiment.rpartition("/")
        settings = {"silent": True, "console": "off"} | ({"base_url": spec.address} if spec.address else {})
        run = wandb.init(
            entity=entity or None,
            project=project,
            id=spec.name,
            name=spec.name,
            resume="allow",
            settings=wandb.Settings(**settings),
        )
        return _WandbRun(run)


class _WandbRun:
    def __init__(self, run: Any) -> None:
        self._run = run
        self.link = str(run.url or "")

    def read_last_steps(self) -> Mapping[str, int]:
        return {"": int(self._run.step) - 1} if self._run.resumed else {}

    def log_parameters(self, values: Mapping[str, Any]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def log_metrics(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._run.log(dict(values), step=step, commit=True)

    def log_file(self, path: Path) -> None:
        self._run.log_artifact(str(path), name=f"{self._run.id}-{path.stem}", type="model")

    def flush(self) -> None:
        """Its process has what was logged."""

    def end(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


TRACKER = WandbTracker()
