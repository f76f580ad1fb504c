"""Runs the steps of a Dockerfile without a container engine, as far as that goes.

Each stage is a root of its own: an overlay over this machine's, in which what isn't of a distribution is
hidden, and a Python lies in /usr/local, as in the images `python:VERSION-slim`. Needs root, and Debian.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_HIDDEN = ("farm", "home", "mnt", "opt", "root", "srv", "tmp", "var/tmp", "work")
"""Folders that no image of a distribution has content in."""
_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Stage:
    """Where steps run that follow a FROM."""

    #: What it is named by COPY --from.
    name: str
    #: Its image.
    image: str
    #: Where its root is mounted.
    root: Path
    #: Variables of ARG and ENV.
    variables: dict[str, str]
    folder: str = "/"
    user: str = "0:0"
    command: list[str] = field(default_factory=list)


def parse(text: str) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of a Dockerfile."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n", "", "\n".join(lines))
    steps = [line.split(maxsplit=1) for line in whole.splitlines()]
    return [(name, arguments) for name, arguments in steps]


class Build:
    """The stages of a Dockerfile; a context manager that leaves nothing mounted."""

    def __init__(self, folder: Path, context: Path, python: Path, arguments: Mapping[str, str]) -> None:
        """`context`: a checkout, which is copied as git knows it. `python`: the Python of the images.
        `arguments`: values of ARG."""
        self._folder, self._context, self._python, self._arguments = folder, context, python, arguments
        self._stages: list[Stage] = []
        self._global: dict[str, str] = {}

    def __enter__(self) -> Build:
        return self

    def __exit__(self, *error: object) -> None:
        for stage in self._stages:
            subprocess.run(["umount", "--recursive", "--lazy", str(stage.root)], check=False)

    def run(self, dockerfile: Path) -> Stage:
        """Run all steps, and return the last stage."""
        for instruction, arguments in parse(dockerfile.read_text()):
            self._do(instruction, arguments)
        return self._stages[-1]

    def run_in(
        self, stage: Stage, command: Sequence[str], **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a stage, as its user."""
        user, group = stage.user.split(":")
        # A builder of images knows the machine's certificates and its index of packages.
        passed = {name: value for name, value in os.environ.items() if name in ("PIP_CERT", "PIP_INDEX_URL")}
        environment = {"PATH": _PATH, "LD_LIBRARY_PATH": "/usr/local/lib", "HOME": "/root", **passed}
        environment |= {**stage.variables, **variables}
        settings = [f"{name}={value}" for name, value in environment.items()]
        script = f"cd {shlex.quote(stage.folder)} && exec {shlex.join(command)}"
        inside = ["env", "-i", *settings, "sh", "-c", script]
        chroot = ["chroot", f"--userspec={user}:{group}", "--groups=", str(stage.root), *inside]
        return subprocess.run(
            chroot, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1200, check=False
        )

    def _do(self, instruction: str, arguments: str) -> None:
        stage = self._stages[-1] if self._stages else None
        if instruction == "ARG":
            name, _, default = arguments.partition("=")
            value = self._arguments.get(name, default or self._global.get(name, ""))
            (stage.variables if stage else self._global)[name] = value
        elif instruction == "FROM":
            image, *named = re.sub(r"\$\{(\w+)\}", lambda m: self._global[m[1]], arguments).split()
            self._begin(named[-1] if named else "", image)
        elif stage is None:
            raise AssertionError(f"{instruction} before FROM")
        elif instruction == "RUN":
            done = self.run_in(stage, ["sh", "-c", arguments])
            assert done.returncode == 0, f"RUN {arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        elif instruction == "WORKDIR":
            stage.folder = arguments
            self._in(stage, arguments).mkdir(parents=True, exist_ok=True)
        elif instruction == "COPY":
            self._copy(stage, shlex.split(arguments))
        elif instruction == "ENV":
            for each in shlex.split(arguments):
                name, _, value = each.partition("=")
                stage.variables[name] = value.replace("$PATH", stage.variables.get("PATH", _PATH))
        elif instruction == "USER":
            stage.user = arguments
        elif instruction == "CMD":
            stage.command = json.loads(arguments)
        else:
            raise AssertionError(f"{instruction} isn't known here")

    def _begin(self, name: str, image: str) -> None:
        place = self._folder / f"stage-{len(self._stages)}"
        root, upper, work = (place / each for each in ("root", "upper", "work"))
        for each in (root, upper, work):
            each.mkdir(parents=True)
        options = f"lowerdir=/,upperdir={upper},workdir={work}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(root)], check=True)
        stage = Stage(name, image, root, {})
        self._stages.append(stage)
        for each in _HIDDEN:
            if (root / each).is_dir():
                hidden = place / "hidden" / each
                hidden.mkdir(parents=True)
                hidden.chmod(0o1777)
                subprocess.run(["mount", "--bind", str(hidden), str(root / each)], check=True)
        subprocess.run(["mount", "--bind", str(self._python), str(root / "usr/local")], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(root / "usr/local")], check=True)
        subprocess.run(["mount", "-t", "proc", "proc", str(root / "proc")], check=True)
        subprocess.run(["mount", "--rbind", "/dev", str(root / "dev")], check=True)

    def _copy(self, stage: Stage, arguments: list[str]) -> None:
        *sources, target = [each for each in arguments if not each.startswith("--")]
        origin = next((each.removeprefix("--from=") for each in arguments if each.startswith("--from=")), "")
        place = self._in(stage, target)
        if origin:
            root = next(each.root for each in self._stages if each.name == origin)
            for source in sources:
                shutil.copytree(root / source.lstrip("/"), place, symlinks=True)
            return
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *sources]
        done = subprocess.run(listed, cwd=self._context, capture_output=True, text=True, check=True)
        for name in filter(None, done.stdout.split("\0")):
            if (self._context / name).is_file() and not (self._context / name).is_symlink():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self._context / name, place / name)

    def _in(self, stage: Stage, path: str) -> Path:
        return stage.root / os.path.normpath(os.path.join(stage.folder, path)).lstrip("/")
