"""Installs the wheel that `make wheel` has built in an empty environment outside the checkout, and runs the
quick start of the README there.

    python tests/support/installed_wheel.py WHEEL
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ACTIVATION = "source .venv/bin/activate\n"
"""The line of the quick start that is about the checkout."""


def read_commands() -> str:
    """Return the commands of the README's quick start, as a script for bash."""
    section = (ROOT / "README.md").read_text().split("\n## Quick start\n")[1]
    block = section.split("```console\n")[1].split("```")[0]
    commands = re.sub(r"^\$ ", "", block, flags=re.MULTILINE)
    assert commands.startswith(ACTIVATION), commands
    return commands.removeprefix(ACTIVATION)


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a command, with its output shown, and return that. Raises CalledProcessError if it fails."""
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout, flush=True)
    done.check_returncode()
    return done.stdout


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(prefix="insitu-wheel-") as made:
        folder = Path(made)
        # Nothing of this environment or the checkout.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        path = f"{folder}/env/bin{os.pathsep}{kept['PATH']}"
        environment = {**kept, "PATH": path, "INSITU_HOME": f"{folder}/home", "KERAS_BACKEND": "jax"}
        run([sys.executable, "-m", "venv", f"{folder}/env"], folder, environment)
        install = ["python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*install, f"insitu[jax] @ {wheel.as_uri()}", "scikit-learn"], folder, environment)
        place = run(["python", "-c", "import insitu; print(insitu.__file__)"], folder, environment)
        assert Path(place.strip()).is_relative_to(folder / "env"), place
        try:
            output = run(["bash", "-ec", read_commands()], folder, environment)
        finally:
            subprocess.run(["insitu", "down", "--force"], cwd=folder, env=environment, capture_output=True)
        found = re.search(r"held-out rows: accuracy ([\d.]+)", output)
        assert found is not None and float(found[1]) > 0.9, output
        assert re.search(r"^digits-train-\w{6} +finished", output, re.MULTILINE), output
    print(f"{wheel.name}: the quick start trains, with accuracy {found[1]}")


if __name__ == "__main__":
    main()
