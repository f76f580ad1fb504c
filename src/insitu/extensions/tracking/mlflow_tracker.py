"""Runs of MLflow. Each has a tag with the id of its job, by which it is found again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from insitu.extensions.tracking.trackers import RunSpec, Status, TrackedRun

_TAG = "insitu-job"
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_MOST_AT_ONCE = 100
"""Parameters that MLflow takes in a call."""
_QUIET = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""The sender tries again by itself."""


class MlflowTracker:
    """See Tracker."""

    package = "mlflow"
    install = "'insitu[mlflow]'"

    def open(self, spec: RunSpec) -> TrackedRun:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=spec.address or None)
        experiment = client.get_experiment_by_name(spec.experiment)
        try:
            number = experiment.experiment_id if experiment else client.create_experiment(spec.experiment)
        except MlflowException:  # another job was first
            number = client.get_experiment_by_name(spec.experiment).experiment_id
        found = client.search_runs([number], f"tags.`{_TAG}` = '{spec.name}'", max_results=1)
        run = found[0] if found else client.create_run(number, tags={_TAG: spec.name}, run_name=spec.name)
        if run.info.status != "RUNNING":
            client.update_run(run.info.run_id, status="RUNNING")
        return _MlflowRun(client, run.info.run_id, number)


class _MlflowRun:
    def __init__(self, client: Any, run_id: str, experiment: str) -> None:
        self._client = client
        self._id = run_id
        address = str(client.tracking_uri).rstrip("/")
        is_server = address.startswith(("http://", "https://"))
        self.link = f"{address}/#/experiments/{experiment}/runs/{run_id}" if is_server else run_id

    def read_last_steps(self) -> Mapping[str, int]:
        names = self._client.get_run(self._id).data.metrics
        return {
            name: max(each.step for each in self._client.get_metric_history(self._id, name)) for name in names
        }

    def log_parameters(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        there = self._client.get_run(self._id).data.params
        new = [Param(name, str(value)) for name, value in values.items() if name not in there]
        for first in range(0, len(new), _MOST_AT_ONCE):
            self._client.log_batch(self._id, params=new[first : first + _MOST_AT_ONCE])

    def log_metrics(self, step: int, values: Mapping[str, float], at: float) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(name, value, int(1000 * at), step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def log_file(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def flush(self) -> None:
        """Each call has returned once the server had it."""

    def end(self, status: Status) -> None:
        self._client.set_terminated(self._id, _STATUS[status])


TRACKER = MlflowTracker()
