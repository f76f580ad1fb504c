"""The wheel holds what users get: modules, the page, and the examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_examples_and_the_page_come_with_the_wheel(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    build += ["--disable-pip-version-check", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=100, stdin=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("insitu-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "site")
    # Nothing of the checkout: as a user who has installed it.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "INSITU_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-P", "-m", "insitu", "examples", "--json"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=100
    )
    found = json.loads(done.stdout)
    assert len(found) == 4
    for example in found:
        folder = Path(example["job_dir"])
        assert folder.is_relative_to(tmp_path / "site") and (folder / example["command"][0]).is_file()
    package = tmp_path / "site" / "insitu" / "ui"
    assert (package / "templates" / "start.html").is_file() and (package / "static" / "htmx.min.js").is_file()
