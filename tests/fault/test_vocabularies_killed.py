"""Vocabularies that the tasks of a job find together are the same, whichever of them is killed when."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from job_runs import insitu_at

from insitu.grid import bring_up
from insitu.service import import_data

SCRIPT = """
import os, signal, sys
from pathlib import Path
import keras
import numpy as np
import insitu

me = insitu.context()
moment, victim = os.environ["KILL"].split("-")
steps = 0

def strike(at):
    killed = Path(os.environ["OUT"]) / "killed"
    if moment == at and me.index == int(victim) and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)

def count(x, label):
    global steps
    steps += 1
    if steps == 3:
        strike("counting")
    return x, label

def train_on(epoch, step):
    if (epoch, step) == (1, 2):
        strike("training")

train = insitu.dataset("people").map(count).tokenize("text", length=4, max_tokens=9).lookup("city")
strike("between")
test = insitu.dataset("people").lookup("city", vocabulary=train.vocabulary("city"))
test = test.tokenize("text", length=4, vocabulary=train.vocabulary("text"))
keras.utils.set_random_seed(1)
with insitu.MultiWorkerMirroredStrategy().scope():
    text, city = keras.Input((4,), dtype="int64", name="text"), keras.Input((), dtype="int64", name="city")
    words = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(9, 3)(text))
    where = keras.layers.Embedding(7, 3)(city)
    out = keras.layers.Dense(1)(keras.layers.Concatenate()([words, where]))
    model = keras.Model({"text": text, "city": city}, out)
    model.compile("adam", "mse")

class Train(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        train_on(self.epoch, batch)

model.fit(train.shuffle(1).batch(24), validation_data=test.batch(24), epochs=3, verbose=0,
          callbacks=[Train(), insitu.BackupAndRestore("state")])
found = {f"w{n}": w for n, w in enumerate(model.get_weights())}
found |= {name: np.array(train.vocabulary(name), str) for name in ("text", "city")}
np.savez(Path(os.environ["OUT"]) / f"found-{me.index}.npz", **found)
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return train(tmp_path_factory.mktemp("undisturbed"), "never-0")


def train(root: Path, kill: str) -> dict[str, bytes]:
    """Return what both workers have found, which is the same: weights and vocabularies."""
    rng = np.random.default_rng(5)
    words = np.array(["the", "cat", "sat", "on", "a", "mat", "dog", "ran", "far", "off"])
    texts = [" ".join(rng.choice(words, n)) for n in rng.integers(0, 7, 240)]
    rows = {
        "text": texts,
        "city": rng.choice(["Rome", "Oslo", "Bonn"], 240),
        "label": rng.integers(0, 2, 240),
    }
    with insitu_at(root) as insitu, pytest.MonkeyPatch.context() as patch:
        bring_up(insitu.paths, 2)
        patch.setenv("INSITU_HOME", str(insitu.paths.home))
        import_data("people", rows, partitions=4)
        insitu.environment |= {"OUT": str(root), "KILL": kill, "KERAS_BACKEND": "jax"}
        insitu.script(SCRIPT)
        insitu.run("start", "--workers", "2", "--threads", "1", "people", str(insitu.folder), "train.py")
    assert (root / "killed").exists() is (not kill.startswith("never"))
    found = []
    for task in (0, 1):
        with np.load(root / f"found-{task}.npz") as held:
            found.append({name: held[name].tobytes() for name in held.files})
    assert found[0] == found[1]
    return found[0]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kill",
    [
        "counting-1",
        "training-0",
        pytest.param("counting-0", marks=pytest.mark.slow),
        pytest.param("between-0", marks=pytest.mark.slow),
        pytest.param("between-1", marks=pytest.mark.slow),
        pytest.param("training-1", marks=pytest.mark.slow),
    ],
)
def test_a_killed_task_finds_the_vocabularies_of_before(
    tmp_path: Path, kill: str, undisturbed: dict[str, bytes]
) -> None:
    assert train(tmp_path, kill) == undisturbed
