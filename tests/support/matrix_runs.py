"""Trains in cells of the matrix on the backend of KERAS_BACKEND; prints one line of JSON.

python matrix_runs.py alone '[[ROW, WAY], ...]'      cells of one process, which has two devices
python matrix_runs.py task '[ROW, WAY, REFERENCE]'   one task of several
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import insitu

ALONE = sys.argv[1] == "alone"
if ALONE:
    insitu.config.set_virtual_devices(2)

import keras  # noqa: E402
import numpy as np  # noqa: E402
from matrix import PLAIN, ROWS, SHARDS  # noqa: E402
from matrix_models import BACKEND, WAYS, Outcome, by_exchange_and_tables, by_fit, by_servers  # noqa: E402
from models import in_shards  # noqa: E402

DEVICES = ["cpu:0", "cpu:1"]


class Plain:
    """No strategy at all."""

    scope = staticmethod(contextlib.nullcontext)


def two_shards() -> Any:
    return insitu.MultiWorkerMirroredStrategy("ring", context=in_shards((0, 1), 2))


def on_servers(mode: Any) -> Any:
    return insitu.ParameterServerStrategy(mode=mode, context=in_shards((0, 1), 2))


def layer_by_layer() -> Any:
    strategy = insitu.ModelParallelStrategy()
    strategy.place({"hidden": "cpu:1", "out": "cpu:1"})
    return strategy


MAKE: dict[str, Callable[[], Any]] = {
    "OneDeviceStrategy": lambda: insitu.OneDeviceStrategy(DEVICES[BACKEND != "torch"]),
    "MirroredStrategy": lambda: insitu.MirroredStrategy(DEVICES),
    "MultiWorkerMirroredStrategy (ring)": lambda: insitu.MultiWorkerMirroredStrategy("ring"),
    "MultiWorkerMirroredStrategy (xla)": lambda: insitu.MultiWorkerMirroredStrategy("xla"),
    "CentralStorageStrategy": lambda: insitu.CentralStorageStrategy(DEVICES, "cpu:0"),
    "ParameterServerStrategy (sync)": lambda: on_servers("sync"),
    "ParameterServerStrategy (async)": lambda: on_servers("async"),
    "ParameterServerStrategy (bounded)": lambda: on_servers("bounded"),
    "ModelParallelStrategy (layout map)": lambda: insitu.ModelParallelStrategy(
        {".*hidden.*kernel": (None, "model")}, mesh={"data": 1, "model": 2}
    ),
    "ModelParallelStrategy (layers on devices)": layer_by_layer,
}


def reference(kind: str) -> Outcome:
    keras.utils.set_random_seed(7)
    return by_fit(Plain if kind == PLAIN else two_shards())


def trained(name: str, way: str) -> Outcome:
    if name.startswith("ParameterServerStrategy") and way == "low level":
        return by_servers(name.partition("(")[2].rstrip(")"))
    if name == "HybridStrategy":
        strategy = insitu.HybridStrategy(context=in_shards((0, 1), 2))
        if way == "fit":
            return by_fit(strategy, insitu.layers.Embedding)
        return by_exchange_and_tables(strategy)
    return WAYS[way](MAKE[name]())


def measure(name: str, way: str, expected: Outcome | None) -> dict[str, Any]:
    """How far a cell's losses and weights are from the reference's, relative to the largest of each; without
    one, how far the loss fell."""
    if not hasattr(insitu, name.partition(" ")[0]):
        return {"error": "not there yet"}
    keras.utils.set_random_seed(7)
    try:
        found = trained(name, way)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    if expected is None:
        return {"fall": found["losses"][-1] / found["losses"][0]}
    losses = expected["losses"][: len(found["losses"])]
    pairs = list(zip(found["weights"], expected["weights"], strict=True))
    return {
        "losses": max(abs(a - b) / abs(b) for a, b in zip(found["losses"], losses, strict=True)),
        "weights": max(float(np.abs(np.subtract(a, b)).max() / np.abs(b).max()) for a, b in pairs),
        "bits": all(a == b for a, b in pairs),
    }


def main() -> None:
    asked = json.loads(sys.argv[2])
    results: dict[str, Any]
    if ALONE:
        references = {kind: reference(kind) for kind in (PLAIN, SHARDS)}
        results = {"references": references}
        for name, way in asked:
            row = next(row for row in ROWS if row.name == name)
            results[f"{name}/{way}"] = measure(name, way, references.get(row.reference_of(BACKEND, way)))
    else:
        results = measure(*asked)
    sys.stdout.write(f"\nRESULTS{json.dumps(results)}\n")


if __name__ == "__main__":
    main()
