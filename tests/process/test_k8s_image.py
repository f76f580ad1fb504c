"""The image of `docker/Dockerfile`: its steps run, and what they make trains. No image is built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import dockerfile
import pytest

ROOT = Path(__file__).parents[2]
PYTHON = Path(sys.base_prefix)
DOCKERFILE = ROOT / "docker" / "Dockerfile"
pytestmark = pytest.mark.k8s


def test_the_linter_finds_nothing() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint isn't installed: make ready-k8s")
    done = subprocess.run([str(linter), str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("apt-get") is None or not (PYTHON / "bin" / "python").exists(),
    reason="needs root on Debian, and a Python in a folder of its own",
)
@pytest.mark.timeout(1800)
def test_its_steps_make_an_insitu_that_runs_without_rights(tmp_path: Path) -> None:
    with dockerfile.Build(tmp_path, ROOT, PYTHON, {}) as build:
        image = build.run(DOCKERFILE)
        assert image.user == "10001:10001" and image.image.endswith("-slim-bookworm")
        data = image.root / "tmp" / "data"
        data.mkdir()
        os.chown(data, 10001, 10001)
        done = build.run_in(image, image.command)
        assert done.returncode == 0 and "Usage: insitu" in done.stdout, done.stderr
        # Nothing of the build but /opt/insitu comes along, and its user can't change that.
        assert not (image.root / "src").exists()
        done = build.run_in(image, ["touch", "/opt/insitu/bin/insitu"])
        assert done.returncode != 0 and "Permission denied" in done.stderr
        script = (
            "insitu up && python -c 'for n in range(64): print(n, n % 7, sep=chr(44))' > rows.csv && "
            "insitu import rows --no-header rows.csv && insitu init job --cache rows --label column_2 && "
            "insitu start --workers 2 rows job train.py && insitu down --force"
        )
        place = {"INSITU_HOME": "/tmp/data/home", "HOME": "/tmp/data"}
        done = build.run_in(image, ["sh", "-ec", f"cd /tmp/data && {script}"], **place)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        for module in ("kubernetes", "fastapi", "prometheus_client"):
            done = build.run_in(image, ["python", "-c", f"import {module}"])
            assert done.returncode == 0, done.stderr
