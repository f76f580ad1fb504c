"""Training jobs on a small cache of images, run as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from insitu.base.paths import Paths
from insitu.grid import bring_up, import_cache

PATIENCE = 250.0

SCRIPT = """
import hashlib, json, os, signal, sys
from pathlib import Path
import keras
import numpy as np
import insitu

out, backup, kill_at, kind = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
me = insitu.context()
strategy = insitu.MultiWorkerMirroredStrategy()
layers = keras.layers


def prepare(x, y):
    return x[..., None].astype("float32") / 16, y


train = insitu.dataset("images/train").shuffle().batch(48).map(prepare)
held_out = insitu.dataset("images/test").batch(64).map(prepare)
options = {}
rng = np.random.default_rng(5)
X, Y = rng.normal(size=(230, 8, 8, 1)).astype("float32"), rng.integers(0, 4, 230)


class Shuffling(keras.utils.PyDataset):
    def __init__(self, x, y, seed):
        super().__init__()
        self.x, self.y, self.rng, self.order = x, y, np.random.default_rng(seed), np.arange(len(x))

    def __len__(self):
        return -(-len(self.x) // 48)

    def __getitem__(self, index):
        rows = self.order[48 * index : 48 * (index + 1)]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self):
        self.rng.shuffle(self.order)


if kind == "arrays":
    train, held_out = X, (X[:100], Y[:100])
    options = {"y": Y, "batch_size": 48, "shuffle": True}
elif kind == "PyDataset":
    train, held_out = Shuffling(X, Y, 1), Shuffling(X[:100], Y[:100], 2)
    options = {"shuffle": False}
elif kind == "tf.data":
    import tensorflow as tf

    def augment(x, y):
        return x + tf.random.normal((8, 8, 1), 0, 0.1), y

    train = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(230, seed=1)
    train = train.map(augment, num_parallel_calls=tf.data.AUTOTUNE).batch(48)
    held_out = tf.data.Dataset.from_tensor_slices((X[:100], Y[:100])).shuffle(100, seed=2).batch(32)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(6, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])


class KillAt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_test_batch_end(self, batch, logs=None):
        self.on_train_batch_end(f"test {batch}")

    def on_train_batch_end(self, batch, logs=None):
        if me.incarnation == 1 and [str(me.task), self.epoch, batch] == kill_at:
            (out / "injected").write_text(str(me.task))
            os.kill(os.getpid(), signal.SIGKILL)


callbacks = [insitu.BackupAndRestore(save_freq=backup)] if backup else []
history = model.fit(
    train, epochs=4, validation_data=held_out, verbose=0, callbacks=[*callbacks, KillAt()], **options
).history
if kind == "arrays":
    held_out = X[:100]
result = {
    "weights": hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest(),
    "last": {name: values[-1] for name, values in history.items()},
    "evaluated": model.evaluate(held_out, Y[:100] if kind == "arrays" else None, verbose=0),
    "predicted": float(model.predict(held_out, verbose=0).sum()),
}
(out / f"{me.index}.json").write_text(json.dumps(result))
"""


class TrainingJobs:
    """`insitu start` of one script on the cache `images/train`, which is on `nodes` nodes."""

    def __init__(self, root: Path, nodes: int) -> None:
        self.root = root
        self.paths = Paths(root / "home")
        self.folder = root / "job"
        self.folder.mkdir(parents=True)
        (self.folder / "train.py").write_text(SCRIPT)
        source = root / "images"
        source.mkdir()
        rng = np.random.default_rng(5)
        for label in range(4):
            images = rng.integers(0, 9, (110 + label, 8, 8)).astype(np.uint8)
            images[:, label : label + 3, label : label + 3] += 6
            np.save(source / f"{label}.npy", images)
        bring_up(self.paths, nodes)
        import_cache(
            self.paths,
            "images",
            [str(source)],
            partitions=6,
            label_from_filename=True,
            split={"train": 0.8, "test": 0.2},
        )

    def run(
        self, *options: str, backup: int = 0, kill_at: Any = None, kind: str = "cache"
    ) -> tuple[dict[str, Any], list[Any]]:
        """(what `describe --ledger` says of the job, each worker's result)."""
        out = self.root / f"out-{len(list(self.root.glob('out-*')))}"
        out.mkdir()
        environment = {**os.environ, "INSITU_HOME": str(self.paths.home), "NO_COLOR": "1"}
        done = subprocess.run(
            [
                *(sys.executable, "-m", "insitu", "start", *options, "images/train", str(self.folder)),
                *("train.py", str(out), str(backup), json.dumps(kill_at), kind),
            ],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{done.returncode}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        job_id = done.stderr.splitlines()[0].strip()
        described = subprocess.run(
            [sys.executable, "-m", "insitu", "describe", job_id, "--ledger", "--json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        results = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
        self.injected = out / "injected"
        return json.loads(described.stdout), results


def assert_every_row_once(job: dict[str, Any], epochs: int) -> None:
    assert [e["epoch"] for e in job["ledger"]] == list(range(epochs))
    for epoch in job["ledger"]:
        assert epoch["complete"]
        assert epoch["clean"]
        assert epoch["counted"] == epoch["expected"]
        assert epoch["lost"] == epoch["repeated"] == 0
