"""Kills or suspends a task of a job where a test says, without help from its script. Python imports this
module as a process starts whose PYTHONPATH names its folder.

`INSITU_TEST_FAULTS` lists faults as JSON, each {"task": "worker:0", "event": "epoch_end", "when": "first" or
"last", "epoch": 1, "batch": 0, "call": 0, "attempt": 1, "signal": "KILL", "target": ..., "name": ...}. One
fires once in all of a job: before the user's callbacks hear of the event ("first"), or behind them ("last"),
in that attempt of the task. It leaves a file of its name in the folder `INSITU_TEST_FIRED`. It hits the task
itself, or what "target" names, for which the task waits: see `disturbed_hits.py`.

`INSITU_TEST_KILLS` is "SEED,COUNT,SECONDS": each process of a task kills itself after a random time of so
many seconds on average, until COUNT of the job have.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from typing import Any

_EVENTS = (
    "train_begin",
    "epoch_begin",
    "train_batch_begin",
    "train_batch_end",
    "test_begin",
    "test_batch_begin",
    "test_batch_end",
    "test_end",
    "epoch_end",
    "train_end",
    "predict_begin",
    "predict_batch_begin",
    "predict_batch_end",
    "predict_end",
)


def _fire(fault: dict[str, Any]) -> None:
    path = os.path.join(os.environ["INSITU_TEST_FIRED"], fault["name"])
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    if "target" not in fault:
        os.kill(os.getpid(), getattr(signal, f"SIG{fault.get('signal', 'KILL')}"))
        return
    with open(f"{path}.part", "w") as file:
        json.dump({**fault, "space": os.readlink("/proc/self/ns/pid")}, file)
    os.rename(f"{path}.part", f"{path}.wanted")
    while not os.path.exists(f"{path}.hit"):
        time.sleep(0.01)


def _faults() -> list[dict[str, Any]]:
    task = os.environ.get("INSITU_TASK")
    return [one for one in json.loads(os.environ["INSITU_TEST_FAULTS"]) if one["task"] == task]


def fire_at(event: str, **where: Any) -> None:
    """Fire the faults of this task that are due at an event."""
    where["attempt"] = int(os.environ.get("INSITU_ATTEMPT", "1"))
    for fault in _faults():
        if fault["event"] == event and all(fault.get(key, value) == value for key, value in where.items()):
            _fire(fault)


def _make_callback(when: str) -> Any:
    import keras

    events = {one["event"] for one in _faults() if one.get("when", "last") == when}

    class Injecting(keras.callbacks.Callback):
        epoch = -1

        def set_model(self, model: Any) -> None:
            super().set_model(model)
            fire_at("set_model", when=when)

    def make(event: str) -> Any:
        def hear(self: Any, *args: Any) -> None:
            where: dict[str, Any] = {"when": when, "call": _counts.get("call", -1)}
            if event.startswith("epoch"):
                type(self).epoch = args[0]
            if "batch" in event:
                where["batch"] = args[0]
            if "train_begin" not in event and "train_end" not in event:
                where["epoch"] = type(self).epoch
            fire_at(event, **where)

        if "batch" in event or event.startswith("epoch_"):
            return lambda self, number, logs=None: hear(self, number)
        return lambda self, logs=None: hear(self)

    for event in _EVENTS:
        # A callback that hears of batches changes what insitu does: only where a fault is there.
        if "batch" not in event or event in events:
            setattr(Injecting, f"on_{event}", make(event))
    return Injecting()


def _install_callbacks(module: Any) -> None:
    own = module.own_callbacks

    def own_callbacks(callbacks: Any, is_chief: bool) -> list[Any]:
        return [_make_callback("first"), *own(callbacks, is_chief), _make_callback("last")]

    module.own_callbacks = own_callbacks


def _install_saving(module: Any) -> None:
    save = module._save_model_to_fileobj

    def save_and_fire(model: Any, fileobj: Any, weights_format: Any) -> None:
        fileobj.write(b"half of a model")
        fire_at("save", epoch=_calls("save"))
        fileobj.seek(0)
        fileobj.truncate()
        save(model, fileobj, weights_format)

    module._save_model_to_fileobj = save_and_fire


def _install_trainer(module: Any) -> None:
    _install_prediction(module)
    call = module.KerasTrainer.call

    def call_and_fire(self: Any, name: str, args: Any, kwargs: Any) -> Any:
        number = _calls("call") if not self.calls.is_under_way else -1
        fire_at("before_call", epoch=number)
        result = call(self, name, args, kwargs)
        fire_at("after_call", epoch=number)
        return result

    module.KerasTrainer.call = call_and_fire


def _install_prediction(module: Any) -> None:
    run = module.PredictionLoop.run

    def run_and_fire(self: Any, read_steps: Any, outputs: Any, predict: Any) -> Any:
        def predict_and_fire(index: int, batch: Any) -> Any:
            fire_at("predict", batch=index)
            return predict(index, batch)

        return run(self, read_steps, outputs, predict_and_fire)

    module.PredictionLoop.run = run_and_fire


def _install_store(module: Any) -> None:
    write = module.write_pages

    def write_half(path: Any, pages: Any, size: int) -> None:
        path.write_bytes(bytes(pages[: size // 2]))
        fire_at("checkpoint", epoch=_calls("checkpoint"))
        write(path, pages, size)

    module.write_pages = write_half


def _install_server(module: Any) -> None:
    push = module.ServerState.push

    def push_and_fire(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = push(self, *args, **kwargs)
        # Nobody has been answered yet.
        fire_at("push", batch=_calls("push"))
        return result

    module.ServerState.push = push_and_fire


def _install_evaluator(module: Any) -> None:
    evaluate = module.SidecarEvaluator._evaluate

    def evaluate_and_fire(self: Any, steps: Any = None) -> Any:
        scores = evaluate(self, steps)
        fire_at("score", batch=_calls("score"))
        return scores

    module.SidecarEvaluator._evaluate = evaluate_and_fire


def _install_rendezvous(module: Any) -> None:
    rejoin = module.RosterRendezvous.rejoin

    def rejoin_and_fire(self: Any, group: Any, lost: Any) -> None:
        fire_at("recovery", epoch=_calls("recovery"))
        rejoin(self, group, lost)

    module.RosterRendezvous.rejoin = rejoin_and_fire


def _install_loops(module: Any) -> None:
    run = module.LoopRunner.run

    def run_and_fire(self: Any, *args: Any) -> Any:
        number = _calls("loop")
        fire_at("loop_begin", batch=number)
        result = run(self, *args)
        fire_at("loop_end", batch=number)
        return result

    module.LoopRunner.run = run_and_fire


def _install_sharing(module: Any) -> None:
    share = module.ChiefMemory.share

    def share_and_fire(self: Any, group: Any, chief: Any, position: Any, hearing: Any) -> None:
        share(self, group, chief, position, hearing)
        # In the unit: others have what this task has sent, and nobody has done it.
        fire_at(f"shared_{position.kind}", epoch=position.epoch, batch=position.step)

    module.ChiefMemory.share = share_and_fire


_counts: dict[str, int] = {}


def _calls(what: str) -> int:
    """Return how often this process was there before."""
    _counts[what] = _counts.get(what, -1) + 1
    return _counts[what]


_PATCHES = {
    "insitu.train.evaluation.sidecar": _install_evaluator,
    "insitu.parameters.server_state": _install_server,
    "insitu.train.custom_loop.runner": _install_loops,
    "insitu.train.fit.callback_list": _install_callbacks,
    "insitu.train.fit.trainer": _install_trainer,
    "insitu.train.fit.chief_state": _install_sharing,
    "insitu.train.checkpoint.store": _install_store,
    "insitu.train.elastic.roster_rendezvous": _install_rendezvous,
    "keras.src.saving.saving_lib": _install_saving,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Patches a module once it was imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        patch = _PATCHES.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _kill_at_random() -> None:
    import random
    import threading

    seed, count, mean = os.environ["INSITU_TEST_KILLS"].split(",")
    drawn = random.Random(f"{seed} {os.getpid()}").expovariate(1 / float(mean))

    def kill() -> None:
        time.sleep(drawn)
        # A standby process isn't a task yet, or has become one since.
        if "INSITU_TASK" in os.environ:
            for number in range(int(count)):
                _fire({"name": f"kill-{number}"})

    threading.Thread(target=kill, daemon=True).start()


if os.environ.get("INSITU_TEST_KILLS"):
    _kill_at_random()
if os.environ.get("INSITU_TEST_FAULTS"):
    sys.meta_path.insert(0, _Finder())
