"""What bfloat16 on the wire does to accuracy: the same training with and without compression.

    python benchmarks/compression.py [--data FOLDER] [--seeds N] [--epochs N] [--quick] [--json FILE]

Two workers, one core each, train a small convolutional network with `MultiWorkerMirroredStrategy` over TCP,
alternately with `compression=None` and `compression="bfloat16"` (with error feedback), from the same seeds.
The figures are accuracy and loss on a fifth of the rows, which is held out. FOLDER holds one uint8[n, 784]
file per class (Quick, Draw! bitmaps, by default in the folder that the environment variable DATA names).
Without it, the data is scikit-learn's digits. The difference between seeds is shown as well: compression
is harmless as long as it changes the figures less than the seed does.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import common

RANK = Path(__file__).parent / "training_peers" / "compression_rank.py"
WAYS = ("float32", "bfloat16")
PATIENCE = 400.0


def train(data: Path | None, seed: int, epochs: int, way: str) -> tuple[float, float]:
    """(accuracy, loss) on the rows held out."""
    workers = common.addresses(2)
    started = []
    for index in range(2):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environment = {
            **os.environ,
            "KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "jax"),
            "OMP_NUM_THREADS": "1",
            "TF_CONFIG": json.dumps(task),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        command = [sys.executable, str(RANK), str(data or ""), str(seed), str(epochs), way]
        started.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.communicate()
    found = re.search(r"RESULT ([\d.]+) ([\d.e+-]+)", outputs[0])
    if found is None:
        raise SystemExit(f"training with {way} failed:\n{outputs[0][-3000:]}")
    return float(found[1]), float(found[2])


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument(
        "--data", type=Path, default=common.DRAWINGS, metavar="FOLDER", help="one .npy file a class"
    )
    options.add_argument("--epochs", type=int, default=None)
    options.add_argument("--seeds", type=int, default=None, help="how many")
    chosen = options.parse_args()
    data = chosen.data if chosen.data.is_dir() and not chosen.quick else None
    epochs = chosen.epochs or (2 if chosen.quick else 4)
    seeds = chosen.seeds or chosen.rounds or (1 if chosen.quick else 3)
    machine = common.machine()
    rows, accuracies = [], {way: [] for way in WAYS}
    for seed in range(seeds):
        cells = [str(seed)]
        for way in WAYS:
            common.say(f"  seed {seed}: {way}")
            accuracy, loss = train(data, seed, epochs, way)
            accuracies[way].append(accuracy)
            cells += [f"{accuracy:.4f}", f"{loss:.4f}"]
        rows.append(cells)
    differences = [b - a for a, b in zip(*accuracies.values(), strict=True)]
    header = ["seed", *(f"{way}: {what}" for way in WAYS for what in ("accuracy", "loss"))]
    print(common.machine_line(machine))
    print(f"\n{'Quick, Draw!' if data else 'digits of scikit-learn'}, {epochs} epochs\n")
    print(common.table(header, rows))
    spread = max(accuracies["float32"]) - min(accuracies["float32"])
    print(
        f"\nbfloat16 changes accuracy by {statistics.mean(differences):+.4f} on average "
        f"({min(differences):+.4f} to {max(differences):+.4f}); seeds differ by {spread:.4f}."
    )
    common.save_json(
        chosen.json,
        "compression",
        machine,
        data="quickdraw" if data else "digits",
        epochs=epochs,
        accuracies=accuracies,
        rows=rows,
    )


if __name__ == "__main__":
    main()
