"""Runs answers.py by fit, by a custom loop and by global steps, under each strategy, and writes the table of
README.md:

    python examples/quickdraw/compare.py FOLDER [--how ...] [--strategies ...] [--epochs N] [--write]

FOLDER holds Quick, Draw! bitmaps, one `.npy` file per class. They are imported into a temporary INSITU_HOME,
and a tenth of the rows is held out. Rows that aren't run keep what the table has.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from strategies import CHOICES

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
INSITU = [sys.executable, "-m", "insitu"]
WAYS = ("fit", "loop", "steps")
HEADER = "| strategy | " + " | ".join(f"{way}: MAP@3 | rows/s" for way in WAYS) + " |"
BEGIN, END = "<!-- written by compare.py -->", "<!-- end -->"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=Path)
parser.add_argument("--how", nargs="*", choices=WAYS, default=WAYS)
parser.add_argument("--strategies", nargs="*", choices=CHOICES, default=list(CHOICES))
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--write", action="store_true", help="write the table to README.md")
chosen = parser.parse_args()


def run(home, how, name):
    """Run one job. Return its MAP@3 and its rows a second, as text."""
    command = ["start", *CHOICES[name][2], "--threads", "1", "--seed", "7", "quickdraw/train", str(HERE)]
    command += ["answers.py", "--how", how, "--strategy", name, "--epochs", str(chosen.epochs)]
    command += ["--out", os.path.join(home, "answers.csv")]
    done = subprocess.run(
        [*INSITU, *command], env={**os.environ, "INSITU_HOME": home}, capture_output=True, text=True
    )
    score = re.search(r"MAP@3 ([\d.]+)", done.stdout)
    speed = re.search(r"trained ([\d,]+) rows/s", done.stdout)
    if done.returncode or not score or not speed:
        raise SystemExit(f"{how} under {name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return score[1], speed[1]


def read_table():
    """Return what README.md has: a list of cells by strategy."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")
    ]
    return {row[0].strip("`"): row[1:] for row in cells}


def write_table(table):
    """Return README.md with the table."""
    lines = [HEADER, "|---" * (1 + 2 * len(WAYS)) + "|"]
    lines += [f"| `{name}` | {' | '.join(cells)} |" for name, cells in table.items()]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.partition(END)[2]}"


table = {name: ["", ""] * len(WAYS) for name in CHOICES} | read_table()
with tempfile.TemporaryDirectory() as home:
    split = ["--label-from-filename", "--split", "train=0.9,test=0.1"]
    subprocess.run(
        [*INSITU, "import", *split, "quickdraw", str(chosen.folder)],
        env={**os.environ, "INSITU_HOME": home},
        check=True,
    )
    for name in chosen.strategies:
        for how in chosen.how:
            cells = run(home, how, name)
            print(f"{name:<24} {how:<6} MAP@3 {cells[0]}, {cells[1]} rows/s", flush=True)
            place = 2 * WAYS.index(how)
            table[name][place : place + 2] = cells
            if chosen.write:
                PAGE.write_text(write_table(table))
