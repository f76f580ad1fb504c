"""`insitu.track`: logs a training for an experiment tracker."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil

from insitu.base._version import __version__
from insitu.base.context import Context
from insitu.base.context import context as read_context
from insitu.base.errors import InputError
from insitu.base.spec import NO_CACHE
from insitu.base.tracking import TRACK_ENV, Tracking, parse_tracking
from insitu.extensions.tracking.run_folder import RunFolder, choose_folder
from insitu.extensions.tracking.trackers import RunSpec, find_tracker
from insitu.train.fit import trainer_of
from insitu.train.replica import read_update_count

MODELS = ("*.keras", "*.weights.h5", "*.h5")
"""Files that are logged at the script's end, unless others are named."""
_JOB_FIELDS = (
    *("cache", "command", "workers", "shards", "ps", "seed", "threads", "engine", "on_loss"),
    *("gpus_per_worker", "cores_per_worker", "memory_per_worker", "refresh"),
)
_MOST_TEXT = 250
_folders: dict[Path, RunFolder] = {}
"""The runs of this process, by folder: no attribute of a callback, which another process continues with."""
_of_job: dict[str, Track] = {}
"""The callbacks of `insitu start --track`, by URI."""
_usage: dict[Path, tuple[float, float]] = {}
"""Time and processor seconds at the last record, by folder."""
_started = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
"""Names the run of a process outside a job."""


def track(
    uri: str,
    *,
    experiment: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    every: int | None = None,
    artifacts: Sequence[str] = MODELS,
) -> Track:
    """Return a callback that logs a training for an experiment tracker, as one run for each job.

    The chief logs. A job that is resumed, or whose chief is replaced, continues its run, and each step is
    logged once. Records are on the job's disk first, and a process of its own sends them: a tracker that
    is slow or unreachable costs a training nothing. Logged are the job's options, the model's size and its
    optimizer; the logs of each epoch; processor and memory of the chief; and files at the script's end.

    Args:
        uri: TRACKER[:ADDRESS][#EXPERIMENT], such as "mlflow:http://host:5000", "trackio" or
            "wandb#team/project". The address is what the tracker's library takes; without it, its own
            settings count. Passwords belong in variables of the environment.
        experiment: name of the experiment or project; None: that of `uri`, else the cache's name.
        parameters: further parameters, such as {"learning_rate": 0.1}.
        every: steps after which the logs of the epoch so far are logged, too, as `batch/loss`. Then steps
            are updates of the model; else they are epochs, from 0.
        artifacts: patterns of files that the script has written, in its folder.

    Raises:
        InputError: for an unknown tracker, one whose library isn't installed, or a URI with a password.

    Example:

        model.fit(train, epochs=3, callbacks=[insitu.track("mlflow:http://tracker:5000#census")])
    """
    tracking = parse_tracking(uri)
    find_tracker(tracking.tracker)
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise InputError(f"every is a number of steps, at least 1, or None. Received: {every!r}")
    chosen = Tracking(tracking.tracker, tracking.address, experiment or tracking.experiment)
    return Track(chosen, dict(parameters or {}), every, tuple(artifacts))


def make_callback_of_job(given: Sequence[Any]) -> Track | None:
    """Return the callback that `insitu start --track` asks for; None without it, or if the script has given
    it."""
    uri = os.environ.get(TRACK_ENV)
    if not uri:
        return None
    tracking = parse_tracking(uri)
    if any(isinstance(each, Track) and each.tracking == tracking for each in given):
        return None
    # One for all fits of a script: it remembers up to which step it has logged.
    if uri not in _of_job:
        _of_job[uri] = track(uri)
    return _of_job[uri]


class Track(keras.callbacks.Callback):
    """Logs a training for an experiment tracker. Made by `insitu.track`.

    All attributes are plain values: a chief that takes another one's place continues with them.
    """

    runs_in_chief_alone = True
    """Read by `fit` under a strategy."""
    hears_batches = False
    """Read by `fit` under a strategy, which calls `end_step` instead."""

    def __init__(
        self, tracking: Tracking, parameters: dict[str, Any], every: int | None, artifacts: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.tracking = tracking
        self._parameters = parameters
        self._every = every
        self._artifacts = artifacts
        #: The step that comes behind all that was logged. Written with each record.
        self._next = 0
        #: What is added to epochs, or updates, of this fit: another fit doesn't begin at step 0 again.
        self._offset = 0
        #: Whether a fit has begun, and nothing of it is logged. Written as it begins.
        self._is_new = True

    @property
    def remembers_steps(self) -> bool:
        """Whether it logs between the ends of epochs. Read by `fit`."""
        return self._every is not None

    def on_train_begin(self, logs: Any = None) -> None:
        self._is_new = True
        context = read_context()
        if not context.is_chief:
            return
        self._open(context).log_parameters(self._describe(context))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._is_new:
            self._is_new = False
            self._offset = max(0, self._next - (epoch if self._every is None else self._count_updates() + 1))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Hear of a step from Keras' own loop."""
        if self._find_trainer() is None:
            self.end_step(logs)

    def end_step(self, logs: Any) -> None:
        """Hear of a step that was done."""
        if self._every is not None and (updates := self._count_updates()) % self._every == 0:
            self._log(updates, {f"batch/{name}": value for name, value in _as_numbers(logs).items()})

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        position = epoch if self._every is None else self._count_updates()
        self._log(position, _as_numbers(logs), with_usage=True)

    def _log(self, position: int, values: dict[str, float], with_usage: bool = False) -> None:
        context = read_context()
        if not context.is_chief:
            return
        run = self._open(context)
        step = position + self._offset
        self._next = step + 1
        run.log_metrics(step, values | (_measure_usage(self._choose_folder(context)) if with_usage else {}))

    def _choose_folder(self, context: Context) -> Path:
        runs = context.job.tracking if context.job is not None else context.paths.tracked_runs / _started
        return choose_folder(runs, self.tracking)

    def _open(self, context: Context) -> RunFolder:
        """Return the run, which this process opens when it first needs it."""
        folder = self._choose_folder(context)
        if folder not in _folders:
            name = context.job_id or _started
            experiment = self.tracking.experiment or _name_experiment(context)
            spec = RunSpec(self.tracking.address, experiment, name)
            _folders[folder] = RunFolder(folder, self.tracking, spec)
            _usage[folder] = time.monotonic(), _read_processor_seconds()
        run = _folders[folder]
        place, patterns = Path.cwd(), self._artifacts
        run.list_files = lambda: _find_files(place, patterns, run.began)
        return run

    def _describe(self, context: Context) -> dict[str, Any]:
        """Return the parameters of the run."""
        spec: dict[str, Any] = {}
        if context.job is not None:
            spec = _read_spec(context)
        found: dict[str, Any] = {f"job/{name}": spec[name] for name in _JOB_FIELDS if name in spec}
        found |= {"job/cache": context.cache} if context.cache not in (None, NO_CACHE) else {}
        found |= {
            "insitu": __version__,
            "keras": keras.__version__,
            "backend": keras.backend.backend(),
            "epochs": (self.params or {}).get("epochs"),
            "steps": (self.params or {}).get("steps"),
            "model/name": self.model.name,
            "model/parameters": int(self.model.count_params()) if self.model.built else None,
        }
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:
            found |= {f"optimizer/{name}": value for name, value in optimizer.get_config().items()}
        found |= self._parameters
        return {_clean(name): _as_plain(value) for name, value in found.items() if value is not None}

    def _find_trainer(self) -> Any:
        trainer = trainer_of(self.model)
        return trainer if trainer is not None and trainer.callbacks is not None else None

    def _count_updates(self) -> int:
        trainer = self._find_trainer()
        if trainer is not None:
            return int(trainer.loop.count_updates(trainer.loop.position) or 0)
        return read_update_count(self.model.optimizer)


def _name_experiment(context: Context) -> str:
    """Return the first part of the cache's name, or that of the job's id."""
    if context.cache not in (None, NO_CACHE):
        return str(context.cache).partition("/")[0]
    return (context.job_id or "insitu").rpartition("-")[0] or "insitu"


def _read_spec(context: Context) -> dict[str, Any]:
    try:
        return dict(json.loads(context.job.spec.read_text())) if context.job is not None else {}
    except (OSError, ValueError):  # on hosts, whose tasks have most of it in their environment
        return {"workers": len(context.workers), "shards": context.num_shards, "seed": context.seed}


def _find_files(folder: Path, patterns: Sequence[str], since: float) -> list[Path]:
    """Return the files of these patterns that were written since then."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.stat().st_mtime >= since - 1)


def _as_numbers(logs: Any) -> dict[str, float]:
    return {_clean(str(n)): float(value) for n, value in (logs or {}).items() if np.ndim(value) == 0}


def _clean(name: str) -> str:
    """Return a name of the characters that all trackers take."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)


def _as_plain(value: Any) -> str | int | float | bool:
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, np.generic):
        return _as_plain(value.item())
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text[:_MOST_TEXT]


def _read_processor_seconds() -> float:
    used = psutil.Process().cpu_times()
    return float(used.user + used.system)


def _measure_usage(folder: Path) -> dict[str, float]:
    """Return the processors that this process used since the last record, and its memory in bytes."""
    now, seconds = time.monotonic(), _read_processor_seconds()
    before, used = _usage.get(folder, (now, seconds))
    _usage[folder] = now, seconds
    found = {"system/memory_bytes": float(psutil.Process().memory_info().rss)}
    return found | ({"system/cores": (seconds - used) / (now - before)} if now > before else {})
