"""Draws what a description of a training does with its model: data, fits, callbacks, single batches."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from random_descriptions import Description, Draw, Setting, compilations, pick, rarely, some

ROWS = pick(20, 16, 8, 11, 5, 31)
BATCH = pick(8, 4, 5, 3, 16, 2)


def needs_weights(compiled: Description) -> bool:
    return any(compiled.get("weighted_metrics", []))


def data(draw: Draw, setting: Setting, model: Description, *, batches: bool = False) -> Description:
    """Rows in some form; `batches` leaves the form to the caller."""
    found: Description = {"kind": "arrays", "rows": draw(ROWS), "batch": draw(BATCH)}
    if rarely(draw, 30):
        found["batch"] = 1
    if rarely(draw, 3):
        found["tag"] = 1
    if rarely(draw, 4):
        found["weights"] = draw(pick("rows", "outputs")) if len(model["heads"]) > 1 else "rows"
    if not batches and rarely(draw, 2):
        kinds = {"tensorflow": ["tf.data"], "torch": ["DataLoader"]}.get(setting.backend, [])
        found |= _form(draw, setting, draw(pick("PyDataset", "tensors", "generator", *kinds)))
    return found


def _form(draw: Draw, setting: Setting, kind: str) -> Description:
    if kind == "PyDataset":
        return {"kind": kind, **some(draw, 5, turns=st.just(1), workers=st.just(2), endless=st.just(True))}
    if kind == "tf.data":
        more = some(
            draw, 5, drop=st.just(True), prefetch=st.just(True), endless=st.just(True), shuffled=st.just(3)
        )
        # Plain Keras on TensorFlow counts an update too many in each epoch of unknown length.
        return {"kind": kind, **more, **(some(draw, 5, unknown=st.just(True)) if setting.alone else {})}
    if kind == "generator":
        return {"kind": kind, **some(draw, 2, endless=st.just(True))}
    return {"kind": kind, **(some(draw, 5, drop=st.just(True)) if kind == "DataLoader" else {})}


def number_of_batches(found: Description) -> int:
    return -(-int(found["rows"]) // int(found["batch"]))


def steps(draw: Draw, found: Description, times: int = 6) -> int | None:
    """A number of steps; always one for data without an end."""
    if not found.get("endless") and not rarely(draw, times):
        return None
    whole = number_of_batches(found)
    return int(draw(pick(*{max(1, whole - 1), whole, whole + 1, 1})))


# Callbacks


def callbacks(draw: Draw, compiled: Description, validates: bool, half: bool) -> list[Any]:
    monitor = draw(pick("loss", "val_loss")) if validates else "loss"
    watch = {"monitor": monitor, "min_delta": 0.001, "patience": draw(pick(0, 1))}
    choices: list[Any] = [
        ["Counts", {}],
        ["Notes", {}],
        ["CSVLogger", {"filename": "log.csv"}],
        ["ModelCheckpoint", {"filepath": "{epoch}.weights.h5", "save_weights_only": True}],
        ["Scales", {"on": draw(pick("epoch", "batch")), "number": draw(pick(0, 1)), "factor": 0.5}],
        ["Stops", {"number": draw(pick(0, 1, 3))}],
        ["Looks", {}],
    ]
    if not half:
        best = {"save_best_only": True, "monitor": monitor}
        choices += [
            ["EarlyStopping", {**watch, "restore_best_weights": draw(st.booleans())}],
            ["ModelCheckpoint", {"filepath": "{epoch}.weights.h5", "save_weights_only": True, **best}],
        ]
    if not compiled.get("schedule"):
        choices += [
            ["LearningRateScheduler", {"factor": 0.7}],
            ["SetsRate", {"number": draw(pick(0, 1)), "rate": 0.01}],
            *([] if half else [["ReduceLROnPlateau", {**watch, "factor": 0.5}]]),
        ]
    if compiled["optimizer"][1].get("use_ema"):
        choices += [["SwapEMAWeights", {"swap_on_epoch": draw(st.booleans())}]]
    return [draw(pick(*choices)) for _ in range(draw(pick(0, 0, 1, 1, 2)))]


# Calls


def fit(draw: Draw, setting: Setting, model: Description, compiled: Description, half: bool) -> Description:
    found = data(draw, setting, model)
    options: Description = {"epochs": draw(pick(2, 1, 3))}
    if count := steps(draw, found):
        options["steps_per_epoch"] = count
    if found["kind"] == "generator" and not found.get("endless"):
        options["epochs"] = 1
    options |= some(draw, 8, initial_epoch=st.just(1)) if options["epochs"] > 1 else {}
    if setting.alone and found["kind"] in ("arrays", "tensors", "PyDataset") and rarely(draw, 5):
        options["shuffle"] = True
    if [head["task"] for head in model["heads"]] == ["classes"] and not found.get("weights"):
        options |= some(draw, 5, class_weight=st.just({"0": 0.5, "1": 1.0, "2": 2.0}))
    made: Description = {"call": "fit", "data": found, "options": options}
    if rarely(draw, 3):
        _add_validation(draw, setting, model, made)
    validates = "validation" in made or "validation_split" in options
    heard = callbacks(draw, compiled, validates and "validation_freq" not in options, half)
    return {**made, **({"callbacks": heard} if heard else {})}


def _add_validation(draw: Draw, setting: Setting, model: Description, made: Description) -> None:
    found, options = made["data"], made["options"]
    if found["kind"] in ("arrays", "tensors") and rarely(draw, 3):
        options["validation_split"] = draw(pick(0.25, 0.5))
    else:
        held_out = made["validation"] = data(draw, setting, model)
        if held_out["kind"] == "generator" and setting.backend == "tensorflow" and options["epochs"] > 1:
            # Keras on TensorFlow drops the batches that it has read ahead when a validation ends, so the next
            # one begins at a batch that depends on its threads.
            held_out.update(kind="PyDataset", endless=True)
        if count := steps(draw, held_out, 4):
            options["validation_steps"] = count
        if held_out["kind"] == "generator":
            held_out["endless"] = True
            options.setdefault("validation_steps", 2)
    options |= some(draw, 6, validation_freq=pick(2, [1, 3]))


def evaluate(draw: Draw, setting: Setting, model: Description) -> Description:
    found = data(draw, setting, model)
    count = steps(draw, found)
    return {"call": "evaluate", "data": found, "options": {"steps": count} if count else {}}


def predict(draw: Draw, setting: Setting, model: Description) -> Description:
    found = data(draw, setting, model)
    count = steps(draw, found)
    made = {"call": "predict", "data": found, "options": {"steps": count} if count else {}}
    return {**made, "labels": True} if found["kind"] not in ("arrays", "tensors") else made


def batches(draw: Draw, setting: Setting, model: Description) -> Description:
    method = draw(pick("train_on_batch", "test_on_batch", "predict_on_batch"))
    made = {"call": "batches", "method": method, "data": data(draw, setting, model, batches=True)}
    if method != "predict_on_batch":
        made["options"] = some(draw, 2, return_dict=st.just(True))
    return made


@st.composite
def calls(draw: Draw, setting: Setting, model: Description, compiled: Description, half: bool) -> list[Any]:
    """A fit, and what comes after it. In one training of eight something else comes first."""

    def another(kind: str) -> list[Any]:
        nonlocal compiled
        if kind == "fit":
            return [fit(draw, setting, model, compiled, half)]
        if kind == "set":
            what = "weights" if compiled.get("schedule") else draw(pick("weights", "rate"))
            factor = 0.5 if what == "weights" else 0.01
            return [{"call": "set", "what": what, "factor": factor}, *another("fit")]
        if kind in ("compile", "freeze"):
            compiled = draw(compilations(setting, model, half))
            more = some(draw, 3, outside=st.just(True))
            again = [{"call": "compile", "compile": compiled, **more}, *another("fit")]
            return [{"call": "freeze", "trainable": False}, *again] if kind == "freeze" else again
        return [{"evaluate": evaluate, "predict": predict, "batches": batches}[kind](draw, setting, model)]

    found = another(draw(pick("evaluate", "predict", "batches"))) if rarely(draw, 8) else []
    found += another("fit")
    for _ in range(draw(pick(0, 0, 1, 1, 2))):
        kinds = pick(
            "evaluate", "predict", "fit", "batches", "evaluate", "predict", "compile", "freeze", "set"
        )
        found += another(draw(kinds))
    return found
