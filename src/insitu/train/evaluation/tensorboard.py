"""Writes what TensorBoard shows while a model trains, on every backend and without TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.base.context import context as read_context
from insitu.base.errors import TrainingError
from insitu.train.devices import device_of
from insitu.train.evaluation.event_files import EventFile, GraphNode, is_url
from insitu.train.fit import KerasTrainer, trainer_of
from insitu.train.replica import read_update_count, to_numpy

WEIGHTS, GRADIENTS = "weights", "gradients"
_KINDS = (WEIGHTS, GRADIENTS)


class TensorBoard(keras.callbacks.Callback):
    """Writes scalars, histograms and the model's graph for TensorBoard, in the chief.

    Tags are the names of the logs (`loss`, `val_loss`, ...) and `learning_rate`. The step of each is the
    number of updates of the model, also after a recovery, and after a restart: TensorBoard drops what was
    written of steps that are done again. A job's runs are named by the task. `insitu tensorboard JOB` shows
    them.

    Args:
        log_dir: folder for the event files, also as `insitu://VOLUME/PATH`; None: one in the job's folder,
            outside a job `logs`.
        histograms: "weights" for a histogram of each trainable variable at each epoch's end; "gradients" for
            one of its gradient in the epoch's last step: the mean over all tasks, as it is applied, before
            clipping. They are seen when tasks or devices exchange them, and cost a copy in each step.
        graph: whether to write the model's layers as a graph.
        update_freq: "epoch", or a number of steps after which logs are written too.

    Raises:
        TrainingError: for other arguments; as training begins, for gradients under a strategy that doesn't
            exchange them between tasks, and for those that a LossScaleOptimizer has multiplied.

    Example:
        >>> callback = insitu.TensorBoard("logs", histograms=["weights"])
    """

    hears_batches = False
    """Read by `fit` under a strategy, which calls `end_step` instead."""

    def __init__(
        self,
        log_dir: str | Path | None = None,
        *,
        histograms: Sequence[str] = (),
        graph: bool = True,
        update_freq: str | int = "epoch",
    ) -> None:
        super().__init__()
        kinds = (histograms,) if isinstance(histograms, str) else tuple(histograms)
        if unknown := [kind for kind in kinds if kind not in _KINDS]:
            raise TrainingError(f"histograms are any of 'weights' and 'gradients'. Received: {unknown[0]!r}")
        if update_freq != "epoch" and not (isinstance(update_freq, int) and update_freq > 0):
            raise TrainingError(
                f"update_freq is 'epoch' or a number of steps above 0. Received: {update_freq!r}"
            )
        self._log_dir = log_dir
        self._histograms = kinds
        self._graph = graph
        self._update_freq = update_freq
        #: The file of the training under way; None in tasks that write none. Written as a training begins.
        self._file: EventFile | None = None
        #: Returns the trainer if insitu does the steps, else None. Written as a training begins.
        self._find_trainer: Callable[[], KerasTrainer | None] = _nobody
        #: Updates of the model as the training began, and at the last event with the logs of a step.
        self._first_update = self._newest_update = 0
        #: The logs of that step, by tag.
        self._newest_numbers: dict[str, float] = {}
        #: Paths of the event files that the training under way has begun, in this process or another.
        self._paths: list[str] = []

    @property
    def remembers_steps(self) -> bool:
        """Whether it writes between the ends of epochs. Read by `fit`."""
        return self._update_freq != "epoch"

    @property
    def event_folders(self) -> list[Path | str]:
        """The folder in which a training begins its event file. Read by `fit`."""
        return [self._choose_folder()]

    @property
    def appended_files(self) -> list[Path]:
        """The event files of the training under way on this machine. Read by `fit`: what a task has written
        that is lost, and is written again, is taken out of them."""
        own = [str(self._file.path)] if self._file is not None else []
        return [Path(path) for path in dict.fromkeys([*self._paths, *own]) if not is_url(path)]

    def on_train_begin(self, logs: Any = None) -> None:
        trainer = trainer_of(self.model)
        trainer = trainer if trainer is not None and trainer.callbacks is not None else None
        self._find_trainer = (lambda: trainer) if trainer is not None else _nobody
        if GRADIENTS in self._histograms:
            _keep_gradients(self.model, trainer)
        self._paths, self._newest_update, self._newest_numbers = [], 0, {}
        self._first_update = self._read_updates()
        if trainer is not None and not trainer.membership.context.is_chief:
            self._file = None
            return
        self._file = EventFile(self._choose_folder())

    def _choose_folder(self) -> Path | str:
        context = read_context()
        if self._log_dir is not None:
            return self._log_dir if is_url(self._log_dir) else Path(self._log_dir)
        return context.job.summaries(context.task) if context.job is not None else Path("logs")

    def _read_updates(self) -> int:
        trainer = self._find_trainer()
        if trainer is not None:
            return trainer.loop.count_updates(trainer.loop.position) or 0
        return read_update_count(self.model.optimizer)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Hear of a step from Keras' own loop."""
        if self._find_trainer() is None:
            self.end_step(logs)

    def end_step(self, logs: Any) -> None:
        """Hear of a step that was done."""
        if self._file is None or self._update_freq == "epoch":
            return
        step = self._read_updates()
        if (step - self._first_update) % int(self._update_freq) == 0:
            numbers = _as_numbers(logs or {})
            self._begin(self._file).write(step, numbers)
            self._newest_update, self._newest_numbers = step, numbers

    def _begin(self, file: EventFile) -> EventFile:
        """Return the file, in which the first event says where the training resumes. A task that takes up a
        fit in its middle knows that from its first step on."""
        path = str(file.path)
        if path not in self._paths:
            begun = bool(self._paths)
            self._paths = [*self._paths, path]
            file.begin_at(self._read_updates())
            if self._graph and not begun:
                file.write_graph(describe_graph(self.model))
        return file

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._file is None:
            return
        step = self._read_updates()
        rate = {"learning_rate": _read_learning_rate(self.model)}
        file = self._begin(self._file)
        # An epoch's end repeats the logs of its last step, beside those of the validation.
        there = self._newest_numbers if self._newest_update == step else {}
        numbers = {name: n for name, n in _as_numbers(logs or {}).items() if there.get(name) != n}
        file.write(step, {**numbers, **rate})
        arrays: dict[str, NDArray[Any]] = {}
        if WEIGHTS in self._histograms:
            arrays |= {f"weights/{v.path}": to_numpy(v) for v in self.model.trainable_variables}
        trainer = self._find_trainer()
        if GRADIENTS in self._histograms and trainer is not None:
            for each in _find_keepers(trainer):
                arrays |= {f"gradients/{path}": values for path, values in each.read_gradients().items()}
        if arrays:
            file.write_histograms(step, arrays)

    def on_train_end(self, logs: Any = None) -> None:
        self._file = None


def _nobody() -> None:
    return None


def _read_learning_rate(model: Any) -> float:
    """Return the learning rate, which is a variable, or what a schedule has computed."""
    rate = model.optimizer.learning_rate
    return float(to_numpy(rate) if isinstance(rate, keras.Variable) else keras.ops.convert_to_numpy(rate))


def _as_numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}


def _keep_gradients(model: Any, trainer: KerasTrainer | None) -> None:
    """Have the steps keep the gradients that they apply. Raises TrainingError if they can't."""
    if hasattr(model.optimizer, "inner_optimizer"):
        raise TrainingError(
            "Histograms of gradients are of gradients as they are. Received: a LossScaleOptimizer, which "
            "multiplies them. Leave 'gradients' out of histograms."
        )
    executors = trainer.executors if trainer is not None else ()
    keepers = _find_keepers(trainer) if trainer is not None else []
    if not keepers or len(keepers) < len(executors):
        raise TrainingError(
            "Histograms of gradients are made where replicas exchange them. Received: a training whose steps "
            "never have them outside of one compiled function: one replica, parameter servers, "
            "devices on JAX or communication='xla'. Use MultiWorkerMirroredStrategy with several workers, on "
            "TensorFlow MirroredStrategy or CentralStorageStrategy with several devices, or leave "
            "'gradients' out of histograms."
        )
    for each in keepers:
        each.keep_gradients()


def _find_keepers(trainer: KerasTrainer) -> list[Any]:
    """Return the executors of a training that can keep gradients."""
    inner = [getattr(each, "unpinned", each) for each in trainer.executors]
    return [each for each in inner if hasattr(each, "keep_gradients")]


def describe_graph(model: Any) -> list[GraphNode]:
    """Return the layers of a model as a graph: with what each takes if that is known, else in order, and the
    devices of its variables."""
    nodes: list[GraphNode] = []
    before: list[str] = []
    functional = getattr(model, "_functional", None) or model
    names = {id(layer): _make_name(layer) for layer in functional.layers}
    for layer in functional.layers:
        taken = _find_inputs(layer, names) if hasattr(functional, "inputs") else before
        devices = ", ".join(sorted({device_of(variable) for variable in layer.variables}))
        nodes.append(GraphNode(names[id(layer)], type(layer).__name__, taken, devices))
        before = [names[id(layer)]]
    return nodes


def _make_name(layer: Any) -> str:
    return str(layer.name).strip("/") or "layer"


def _find_inputs(layer: Any, names: Mapping[int, str]) -> list[str]:
    """Return the names of the layers whose outputs a layer takes."""
    found: list[str] = []
    for node in layer._inbound_nodes:
        for parent in node.parent_nodes:
            name = names.get(id(parent.operation))
            if name is not None and name not in found:
                found.append(name)
    return found
