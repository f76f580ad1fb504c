"""`insitu init`: its script trains as it is, by the command that it prints, and learns."""

from __future__ import annotations

import csv
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from job_runs import Insitu, insitu_at


def run_printed(insitu: Insitu, *arguments: str) -> tuple[str, Path]:
    """Runs `insitu init my_job ARGUMENTS` and the command that it prints. Returns the job's output and the
    folder of its files."""
    insitu.environment["KERAS_BACKEND"] = "jax"
    done = insitu.run("init", "my_job", *arguments, cwd=insitu.folder)
    command = shlex.split(done.stdout)
    assert command[0] == "insitu"
    run = insitu.run(*command[1:], cwd=insitu.folder)
    (job,) = insitu.json("ps", "--all")
    return run.stdout, insitu.job(job["job_id"]).code


def read_score(output: str, name: str) -> float:
    found = re.search(rf"held-out rows:.*\b{name} ([\d.]+)", output)
    assert found, output
    return float(found[1])


@pytest.mark.long
def test_a_table_of_numbers_names_and_texts_is_learned(tmp_path: Path) -> None:
    rng = random.Random(0)
    words = ("good", "fine", "plain", "movie", "plot", "actor", "scene", "music")
    with insitu_at(tmp_path) as insitu:
        with (insitu.folder / "people.csv").open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["age", "hours", "job", "review", "income"])
            for _ in range(2000):
                age, hours, job = rng.randint(17, 80), rng.randint(1, 80), rng.choice(("cook", "miner"))
                review = " ".join(rng.choices(words, k=rng.randint(5, 9)))
                score = age / 20 + hours / 20 + 2 * (job == "miner") + 2 * ("good" in review)
                out.writerow([age, hours, job, review, ">50K" if score > 6.5 else "<=50K"])
        insitu.run("import", "--split", "train=0.9,test=0.1", "people", "people.csv", cwd=insitu.folder)
        output, folder = run_printed(insitu, "--cache", "people", "--label", "income")
        # Without one of the four columns about four of five rows are right.
        assert read_score(output, "accuracy") > 0.93
        assert {"best.keras", "model.keras", "train.py"} <= {each.name for each in folder.iterdir()}
        load = (
            "import keras, insitu.feature_column; print(len(keras.saving.load_model('model.keras').layers))"
        )
        assert insitu_python(insitu, load, folder) > 5


@pytest.mark.long
def test_images_are_learned(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 900)
    images = rng.integers(0, 60, (900, 12, 16, 3)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:, :, label] += 100
    with insitu_at(tmp_path) as insitu:
        np.savez(insitu.folder / "lights.npz", x=images, label=labels)
        insitu.run("import", "--split", "train=0.8,test=0.2", "lights", "lights.npz", cwd=insitu.folder)
        output, folder = run_printed(insitu, "--cache", "lights")
        assert read_score(output, "accuracy") > 0.98
        assert (folder / "model.keras").is_file()


def insitu_python(insitu: Insitu, program: str, folder: Path) -> int:
    """The number that a program prints last, run in a folder without a job."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=insitu.environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])
