"""The wheel holds what users get: modules, compiled code, the page, and the examples."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_compiled_code_examples_and_the_page_come_with_the_wheel(tmp_path: Path) -> None:
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
    load = "from insitu.exchange import native as e; from insitu.parameters import native as p; "
    load += "print(p.kernels() and e.load_kernels.__wrapped__() and e.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", load],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "site")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the build of the compiled code reads."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "hatch_build.py", tmp_path)
    return tmp_path


def _compile(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    # Without site-packages: an isolated build has none of what insitu needs to run.
    return subprocess.run(
        [sys.executable, "-S", str(checkout / "hatch_build.py")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_code_is_compiled_once(checkout: Path) -> None:
    assert _compile(checkout).returncode == 0
    libraries = {path: path.stat().st_mtime_ns for path in checkout.glob("src/insitu/*/*.so")}
    assert {path.parent.name for path in libraries} == {"exchange", "parameters"}
    assert _compile(checkout).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in checkout.glob("src/insitu/*/*.so")} == libraries


@pytest.mark.parametrize("environment", [{"PATH": "/nowhere", "CC": ""}, {"CC": "/bin/false"}])
def test_a_build_without_a_compiler_says_what_is_needed(checkout: Path, environment: dict[str, str]) -> None:
    done = _compile(checkout, **environment)
    assert done.returncode == 1 and "gcc" in done.stderr and "Traceback" not in done.stderr
    assert not list(checkout.glob("src/insitu/*/*.so"))
