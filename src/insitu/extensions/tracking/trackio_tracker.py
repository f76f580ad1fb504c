"""Runs of Trackio: in its folder on this machine, on a Space of Hugging Face, or on a server of your own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from insitu.extensions.tracking.trackers import RunSpec, Status, TrackedRun


class TrackioTracker:
    """See Tracker."""

    package = "trackio"
    install = "'insitu[trackio]'"

    def open(self, spec: RunSpec) -> TrackedRun:
        return _TrackioRun(spec)


class _TrackioRun:
    """It is opened again after each `flush`: only `finish` returns once all is written."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._run: Any = None
        self._last: int | None = None
        self._open()
        address = spec.address
        is_space = bool(address) and "://" not in address
        self.link = f"https://huggingface.co/spaces/{address}" if is_space else address

    def _open(self) -> Any:
        import trackio

        if self._run is None:
            address = self._spec.address
            place = {"server_url" if "://" in address else "space_id": address} if address else {}
            self._run = trackio.init(
                project=self._spec.experiment,
                name=self._spec.name,
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
                **place,
            )
            self._last = getattr(self._run, "_initial_last_step", None)
        return self._run

    def read_last_steps(self) -> Mapping[str, int]:
        if self._last is None or self._spec.address:
            return {} if self._last is None else {"": self._last}
        from trackio.sqlite_storage import SQLiteStorage

        found: dict[str, int] = {}
        for record in SQLiteStorage.get_logs(self._spec.experiment, self._spec.name):
            for name in record:
                found[name] = max(int(record["step"]), found.get(name, -1))
        return found

    def log_parameters(self, values: Mapping[str, Any]) -> None:
        # It takes the configuration with the first metrics.
        self._open().config.update(values)

    def log_metrics(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._open().log(dict(values), step=step)

    def log_file(self, path: Path) -> None:
        import trackio

        artifact = trackio.Artifact(name=f"{self._spec.name}-{path.stem}", type="model")
        artifact.add_file(str(path))
        self._open().log_artifact(artifact)

    def flush(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    def end(self, status: Status) -> None:
        self.flush()


TRACKER = TrackioTracker()
