"""The examples run as their READMEs say, on data small enough for a test."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = ("bar", "pole", "slope")
ROWS = 120


def draw(word: str, rng: np.random.Generator) -> list[list[list[int]]]:
    """Return the strokes of one drawing, which lines of another direction make for each word."""
    a, b = (int(v) for v in rng.integers(0, 60, 2))
    ends = {
        "bar": ([a, 255 - b], [128, 128]),
        "pole": ([128, 128], [a, 255 - b]),
        "slope": ([a, 255 - b],) * 2,
    }
    x, y = ends[word]
    return [[x, y]]


def write_bitmaps(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    for word in WORDS:
        images = np.zeros((ROWS, 28, 28), np.uint8)
        for image in images:
            ((xs, ys),) = draw(word, rng)
            along = np.linspace(0, 1, 200)
            x, y = (np.interp(along, [0, 1], ends) / 256 * 28 for ends in (xs, ys))
            image[y.astype(int), x.astype(int)] = 255
        np.save(folder / f"{word}.npy", images.reshape(ROWS, 784))
    return [str(folder)]


def write_strokes(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    for number, word in enumerate(WORDS):
        lines = (
            {"word": word, "key_id": str(9_000_000 + 1000 * number + row), "drawing": draw(word, rng)}
            for row in range(ROWS)
        )
        (folder / f"{word}.ndjson").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [*map(str, sorted(folder.iterdir())), "--render", "28"]


def run(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "insitu", *arguments],
        env={**os.environ, "INSITU_HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done


@pytest.mark.parametrize(
    ("write", "how"), [(write_bitmaps, "fit"), pytest.param(write_strokes, "steps", marks=pytest.mark.slow)]
)
def test_drawings_become_an_answer_file(tmp_path: Path, write: Callable[[Path], list[str]], how: str) -> None:
    folder, home, answers = tmp_path / "drawings", tmp_path / "home", tmp_path / "answers.csv"
    folder.mkdir()
    sources = write(folder)
    run(home, "import", "--label-from-filename", "--split", "train=0.75,test=0.25", "quickdraw", *sources)
    done = run(
        home,
        *("start", "--workers", "2", "--threads", "1", "quickdraw/train", str(EXAMPLES / "quickdraw")),
        *("answers.py", "--how", how, "--epochs", "4", "--batch", "16", "--out", str(answers)),
    )
    assert re.search(
        r"step 50, loss = \S+, accuracy = \S+, top3 = 1, [\d,]+ examples/s, \S+ ms/batch", done.stdout
    )
    score, rows = re.search(r"MAP@3 ([\d.]+) of (\d+) drawings", done.stdout).groups()  # type: ignore[union-attr]
    assert float(score) > 0.8
    header, *lines = csv.reader(answers.read_text().splitlines())
    assert header == ["key_id", "word"] and len(lines) == int(rows)
    assert len({key for key, _ in lines}) == len(lines)
    assert all(sorted(guesses.split()) == sorted(WORDS) for _, guesses in lines)
    if write is write_strokes:
        assert all(int(key) >= 9_000_000 for key, _ in lines)


@pytest.mark.slow
def test_drawings_are_learned_by_steps_on_parameter_servers(tmp_path: Path) -> None:
    """The chief evaluates in turn on the held-out rows of both shards."""
    folder, home = tmp_path / "drawings", tmp_path / "home"
    folder.mkdir()
    sources = write_bitmaps(folder)
    run(home, "import", "--label-from-filename", "--split", "train=0.75,test=0.25", "quickdraw", *sources)
    done = run(
        home,
        *("start", "--workers", "2", "--ps", "1", "--threads", "1", "quickdraw/train"),
        *(str(EXAMPLES / "quickdraw"), "answers.py", "--how", "steps", "--strategy"),
        *("ParameterServer-sync", "--epochs", "4", "--batch", "16", "--out", str(tmp_path / "answers.csv")),
    )
    assert float(re.findall(r"MAP@3 ([\d.]+) of \d+ drawings", done.stdout)[0]) > 0.8
    (scored,) = re.findall(r"evaluation of step \d+.*: accuracy = ([\d.]+)", done.stdout)
    assert float(scored) > 0.7


@pytest.mark.slow
def test_digits_are_learned_over_four_devices(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    home, folder = tmp_path / "home", EXAMPLES / "devices"
    subprocess.run(
        [sys.executable, str(folder / "make_data.py"), str(tmp_path / "data")], check=True, timeout=150
    )
    for name in ("train", "test"):
        features = "image:uint8[28,28]=image_raw,label:int64"
        run(
            home,
            "import",
            f"digits/{name}",
            str(tmp_path / "data" / f"{name}.tfrecord"),
            "--features",
            features,
        )
    done = run(
        home,
        *("start", "--workers", "1", "--threads", "1", "digits/train", str(folder)),
        *("train.py", "--epochs", "4", "--log-every", "20"),
        INSITU_VIRTUAL_DEVICES="cpu:4",
    )
    assert re.search(r"step 20, loss = \S+, accuracy = \S+, [\d,]+ examples/s, \S+ ms/batch", done.stdout)
    accuracy, devices = re.search(r"held-out accuracy ([\d.]+) on (\d) devices", done.stdout).groups()  # type: ignore[union-attr]
    assert float(accuracy) > 0.9 and devices == "4"
    (job,) = (home / "jobs").iterdir()
    assert list((job / "summaries" / "worker-0").glob("events.out.tfevents.*"))
    assert list((job / "checkpoints").iterdir())


def import_people(folder: Path, home: Path, form: str, rows: int) -> None:
    people = str(folder / f"people.{form}")
    subprocess.run(
        [sys.executable, str(EXAMPLES / "census" / "make_people.py"), people, str(rows)],
        check=True,
        timeout=150,
    )
    run(home, "import", "people", people, "--split", "train=0.9,test=0.1")


def learn_people(home: Path, *script: str, tasks: tuple[str, ...]) -> tuple[dict[str, float], str]:
    """Return the scores that a script of the census prints, and its output."""
    started = run(home, "start", *tasks, "--threads", "1", "people/train", str(EXAMPLES / "census"), *script)
    (scores,) = re.findall(r"held-out (accuracy .*)", started.stdout)
    return {name: float(value) for name, value in (pair.split() for pair in scores.split(", "))}, (
        started.stdout
    )


@pytest.mark.long
def test_incomes_are_learned_wide_and_deep_beside_an_evaluator(tmp_path: Path) -> None:
    home = tmp_path / "home"
    import_people(tmp_path, home, "csv", 3000)
    scores, output = learn_people(
        home, "train.py", "--steps", "40", "--batch", "128", tasks=("--workers", "1", "--evaluator")
    )
    assert scores["accuracy"] > scores["accuracy_baseline"]
    assert "[evaluator:0] both: held-out" in output
    assert Path(re.findall(r"the last export: (\S+)", output)[0]).name == "00000040.keras"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_wide_part_helps_the_deep_one(tmp_path: Path) -> None:
    home = tmp_path / "home"
    import_people(tmp_path, home, "ndjson", 30_000)
    losses = {}
    for parts in ("wide", "deep", "both"):
        scores, output = learn_people(
            home, "train.py", "--parts", parts, tasks=("--workers", "2", "--evaluator")
        )
        losses[parts] = scores["loss"]
    assert losses["both"] < min(losses["wide"], losses["deep"])
    (exported,) = re.findall(r"the last export: (\S+)", output)
    asked = subprocess.run(
        [sys.executable, str(EXAMPLES / "census" / "ask.py"), exported],
        check=True,
        capture_output=True,
        text=True,
        timeout=150,
    )
    (right,) = re.findall(r"right for ([\d.]+)% of 1000 people", asked.stdout)
    assert float(right) > 75


@pytest.mark.slow
def test_incomes_are_learned_on_parameter_servers_beside_an_evaluator(tmp_path: Path) -> None:
    home = tmp_path / "home"
    import_people(tmp_path, home, "csv", 30_000)
    scores, output = learn_people(home, "servers.py", tasks=("--workers", "2", "--ps", "1", "--evaluator"))
    assert scores["auc"] > 0.85
    # The weights of the last file are those of the servers.
    last = re.findall(r"\[evaluator:0\] .*evaluation of 008.keras of \d+: .*auc = ([\d.]+)", output)
    assert [float(auc) for auc in last] == [pytest.approx(scores["auc"], abs=0.02)]


@pytest.mark.slow
def test_clicks_are_learned_by_tables_on_parameter_servers(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", EXAMPLES / "recommender"
    make = [sys.executable, str(folder / "make_clicks.py"), str(tmp_path / "clicks.npz")]
    subprocess.run(make, check=True, timeout=150)
    run(home, "import", "--split", "train=0.9,test=0.1", "clicks", str(tmp_path / "clicks.npz"))
    trained = run(home, "start", "--workers", "2", "--ps", "2", "clicks/train", str(folder), "train.py")
    assert float(re.findall(r"held-out AUC ([\d.]+)", trained.stdout)[0]) > 0.7
    (job,) = (home / "jobs").iterdir()
    served = subprocess.run(
        [sys.executable, str(folder / "serve.py"), str(job / "code")],
        check=True,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert float(re.findall(r"AUC ([\d.]+)", served.stdout)[0]) > 0.7
    assert "the exported model agrees: True" in served.stdout
