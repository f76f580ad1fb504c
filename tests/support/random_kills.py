"""Kills tasks at random moments of the script of `disturbed_jobs.py`, and compares what jobs leave behind.

python tests/support/random_kills.py --kills 2000 --seed 1 --backend tensorflow
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from disturbed_jobs import bring_up, find_differences, make_cache, run

PER_JOB = 8
"""Kills in one job, at most."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="how many tasks to kill")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments")
    parser.add_argument("--backend", default="tensorflow", help="tensorflow, jax or torch")
    parser.add_argument("--seconds", type=float, default=12.0, help="that a task lives, on average")
    parser.add_argument("--options", default="--workers 2", help="of insitu start")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="kills-"))
    variables = {"KERAS_BACKEND": options.backend}
    place = bring_up(root / "home")
    make_cache(place, root)
    expected, _ = run(place, root / "undisturbed", options.options.split(), variables=variables)
    jobs = killed = failures = 0
    while killed < options.kills:
        folder = root / f"job-{jobs}"
        kills = f"{options.seed + jobs},{min(PER_JOB, options.kills - killed)},{options.seconds}"
        try:
            found, printed = run(place, folder, options.options.split(), variables=variables, kills=kills)
            differences = find_differences(found, expected)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            printed, differences = str(error), ["the job failed, or stood still"]
        jobs += 1
        killed += len(list((folder / "fired").iterdir()))
        sys.stdout.write(f"{jobs} jobs, {killed} of {options.kills} kills, {failures} failures\n")
        if differences:
            failures += 1
            sys.stdout.write("\n".join([f"seed {kills}", *differences, printed[-6000:], ""]))
        else:
            shutil.rmtree(folder)
    left = [name for name in _processes() if str(root) in name]
    sys.stdout.write(
        f"{killed} kills in {jobs} jobs: {failures} jobs differ, {len(left)} processes are left\n"
    )
    if not failures:
        shutil.rmtree(root, ignore_errors=True)
    return 1 if failures or left else 0


def _processes() -> list[str]:
    """Return the command lines and homes of all other processes that can be read."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                found.append((entry / "environ").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return found


if __name__ == "__main__":
    sys.exit(main())
