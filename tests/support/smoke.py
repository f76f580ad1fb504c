"""Takes the whole way once on this Python: import, train, lose a worker, stop, resume, open the page.

    python tests/support/smoke.py

`make smoke` runs it on the newest Python of this machine. It takes about a minute.
"""

from __future__ import annotations

import http.cookiejar
import os
import platform
import signal
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
from job_runs import Insitu, insitu_at, wait_for
from page_browser import served

from insitu.cluster import list_job_ids

os.environ.setdefault("KERAS_BACKEND", "jax")
TRAIN = """
import sys, time, keras, insitu
from pathlib import Path

class Held(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, "is done", flush=True)
        while epoch == 1 and not Path(sys.argv[1]).exists():
            time.sleep(0.05)

with insitu.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
data = insitu.dataset("points").shuffle().batch(16).map(lambda row: (row["x"], row["y"]))
model.fit(data, epochs=4, verbose=0, callbacks=[insitu.BackupAndRestore(), Held()])
print("weights", *(f"{float(abs(w).sum()):.6f}" for w in model.get_weights()), flush=True)
"""


def import_points(insitu: Insitu) -> None:
    """Import an .npz of two arrays on two nodes."""
    rng = np.random.default_rng(0)
    x = rng.random((512, 2), np.float32)
    np.savez(insitu.folder / "points.npz", x=x, y=x.sum(1))
    insitu.run("up", "--nodes", "2")
    insitu.run("import", "points", str(insitu.folder / "points.npz"))
    (insitu.folder / "points.npz").unlink()


def train(insitu: Insitu, *, disturbed: bool) -> str:
    """Return the line with the weights of a job, one of whose workers is killed, and which is resumed, if
    `disturbed`."""
    go_on = insitu.folder.parent / f"go-on-{disturbed}"
    command = ("start", "--detach", "--workers", "2", "--seed", "1", "points", str(insitu.folder))
    job_id = insitu.run(*command, "train.py", str(go_on)).stdout.strip()
    if disturbed:
        wait_for("the second epoch", lambda: "epoch 1 is done" in insitu.output(job_id))
        tasks = {task["task"]: task for task in insitu.json("describe", job_id)["task_list"]}
        os.kill(tasks["worker:1"]["pid"], signal.SIGKILL)
        wait_for("a recovery", lambda: insitu.json("describe", job_id)["recoveries"])
        insitu.run("stop", job_id)
        go_on.touch()
        insitu.run("resume", job_id)
    go_on.touch()
    wait_for("the end", lambda: insitu.state(job_id) == "finished")
    return insitu.output(job_id).rpartition("] weights ")[2].splitlines()[0]


def sign_in(link: str) -> str:
    """Return the page behind the link that `insitu ui` prints."""
    place, _, token = link.partition("/login?token=")
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    form = urllib.parse.urlencode({"token": token}).encode()
    request = urllib.request.Request(f"{place}/login", form, {"Origin": place})
    return str(opener.open(request).read().decode())


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, insitu_at(Path(folder)) as insitu:
        insitu.script(TRAIN)
        import_points(insitu)
        weights = {disturbed: train(insitu, disturbed=disturbed) for disturbed in (False, True)}
        assert weights[True] == weights[False], f"a kill and a resume have changed the weights: {weights}"
        with served(insitu) as link:
            page = sign_in(link)
        assert all(job_id in page for job_id in list_job_ids(insitu.paths)), page[:500]
    print(f"Python {platform.python_version()}: all done in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
