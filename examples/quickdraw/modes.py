"""Runs train.py with two workers and two parameter servers: in each mode, on TensorFlow and JAX.

    python examples/quickdraw/modes.py FOLDER [--modes ...] [--backends ...] [--epochs N] [--json FILE]

FOLDER holds Quick, Draw! bitmaps, one `.npy` file per class. They are imported into a temporary INSITU_HOME,
and a tenth of the rows is held out. The script prints the accuracy on the held-out rows, and exits with 1 if
one is below `--least`.
"""

import argparse
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
INSITU = [sys.executable, "-m", "insitu"]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=Path)
parser.add_argument("--modes", nargs="*", default=["sync", "bounded", "async"])
parser.add_argument("--backends", nargs="*", default=["tensorflow", "jax"])
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--least", type=float, default=0.88)
parser.add_argument("--json", type=Path, metavar="FILE")
chosen = parser.parse_args()


def train(home: str, backend: str, mode: str) -> tuple[float, float]:
    """Run one job. Return its accuracy on held-out rows and its duration in seconds."""
    environment = {**os.environ, "INSITU_HOME": home, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = ["start", "--workers", "2", "--ps", "2", "--threads", "1", "--seed", "7", "quickdraw/train"]
    command += [str(HERE), "train.py", "--mode", mode, "--epochs", str(chosen.epochs)]
    started = time.monotonic()
    done = subprocess.run([*INSITU, *command], env=environment, capture_output=True, text=True)
    found = re.search(r"held-out accuracy ([\d.]+)", done.stdout)
    if done.returncode or not found:
        raise SystemExit(f"{backend}, {mode} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return float(found[1]), time.monotonic() - started


figures: dict[str, dict[str, float]] = {}
with tempfile.TemporaryDirectory() as home:
    files = sorted(glob.glob(str(chosen.folder / "*.npy")))
    split = ["--label-from-filename", "--split", "train=0.9,test=0.1"]
    subprocess.run(
        [*INSITU, "import", *split, "quickdraw", *files], env={**os.environ, "INSITU_HOME": home}, check=True
    )
    for backend in chosen.backends:
        for mode in chosen.modes:
            accuracy, seconds = train(home, backend, mode)
            figures.setdefault(backend, {})[mode] = accuracy
            print(f"{backend:<10}  {mode:<8}  {accuracy:.3f}  in {seconds:.0f} s", flush=True)
if chosen.json:
    chosen.json.write_text(json.dumps(figures, indent=2) + "\n")
sys.exit(any(accuracy < chosen.least for own in figures.values() for accuracy in own.values()))
