"""The programs of a Kubernetes control plane, built once from Go modules into `build/k8s`.

    python tests/support/k8s_binaries.py [NAME ...]

Run as a program, this builds what isn't there yet, with Go. INSITU_K8S_CACHE=FOLDER puts Go's caches
elsewhere than in /tmp/go-insitu.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "build" / "k8s"
CACHE = Path(os.environ.get("INSITU_K8S_CACHE", "/tmp/go-insitu"))
KUBERNETES = "1.36.3"


@dataclass(frozen=True)
class Program:
    """A program: the `package` to build, of a `module` in a `version`."""

    name: str
    package: str
    module: str
    version: str
    #: A folder of the module with the objects that an installation applies.
    manifests: str = ""

    @property
    def path(self) -> Path:
        return FOLDER / "bin" / f"{self.name}-{self.version}"

    @property
    def objects(self) -> Path:
        """Its manifests, as the module has them."""
        return FOLDER / "manifests" / f"{self.name}-{self.version}"


PROGRAMS = {
    program.name: program
    for program in (
        Program("etcd", "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3", "3.6.16"),
        *(
            Program(name, f"k8s.io/kubernetes/cmd/{name}", "k8s.io/kubernetes", KUBERNETES)
            for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
        ),
        Program("jobset", "sigs.k8s.io/jobset", "sigs.k8s.io/jobset", "0.11.1", "config/components"),
        Program("kueue", "sigs.k8s.io/kueue/cmd/kueue", "sigs.k8s.io/kueue", "0.17.0", "config/components"),
    )
}


def find_obstacle(*names: str) -> str:
    """Return which of the programs (all, if none is named) aren't built; "" if they are."""
    missing = [name for name in names or PROGRAMS if not PROGRAMS[name].path.exists()]
    return f"{', '.join(missing)} must be built: make ready-k8s (needs Go 1.26)" if missing else ""


def _go(folder: Path, *words: str) -> str:
    environment = {
        **os.environ,
        "GOMODCACHE": f"{CACHE}/modules",
        "GOCACHE": f"{CACHE}/compiled",
        "GOFLAGS": "-mod=mod -buildvcs=false -p=2",
        "CGO_ENABLED": "0",
    }
    done = subprocess.run(
        ["nice", "-n", "15", "go", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"go {' '.join(words)} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def _download(folder: Path, module: str, version: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(_go(folder, "mod", "download", "-json", f"{module}@v{version}"))
    return found


def build(program: Program) -> None:
    """Build a program in a module that has nothing but its requirements, and take its manifests."""
    work = FOLDER / "work" / program.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / "go.mod").write_text("module insitu.invalid/build\n\ngo 1.26.0\n")
    found = _download(work, program.module, program.version)
    lines = [f"require {program.module} v{program.version}"]
    text = Path(found["GoMod"]).read_text()
    if program.module == "k8s.io/kubernetes":
        # It is released with its libraries in folders, which stand in its requirements as v0.0.0.
        staged = sorted(set(re.findall(r"^\s+(k8s\.io/\S+) v0\.0\.0$", text, re.MULTILINE)))
        lines += [f"replace {name} => {name} v0.{program.version.split('.', 1)[1]}" for name in staged]
    else:
        lines += re.findall(r"^replace \S+ => [^.\s]\S* v\S+$", text, re.MULTILINE)
    (work / "go.mod").write_text("module insitu.invalid/build\n\ngo 1.26.0\n\n" + "\n".join(lines) + "\n")
    major, minor, _ = program.version.split(".")
    facts = {"gitVersion": f"v{program.version}", "gitMajor": major, "gitMinor": minor}
    flags = "-s -w"
    if program.module == "k8s.io/kubernetes":
        flags += "".join(f" -X k8s.io/component-base/version.{name}={fact}" for name, fact in facts.items())
    program.path.parent.mkdir(parents=True, exist_ok=True)
    _go(work, "build", "-ldflags", flags, "-o", f"{program.path}.partial", program.package)
    if program.manifests:
        shutil.copytree(Path(found["Dir"]) / program.manifests, program.objects, dirs_exist_ok=True)
    os.replace(f"{program.path}.partial", program.path)
    shutil.rmtree(work)


def main() -> None:
    """Build what is missing of the named programs, or of all."""
    wanted = [PROGRAMS[name] for name in sys.argv[1:] or PROGRAMS]
    if all(program.path.exists() for program in wanted):
        return
    if shutil.which("go") is None:
        sys.exit(f"{find_obstacle(*(program.name for program in wanted))}, and there is no `go` here")
    for program in wanted:
        if not program.path.exists():
            began = time.monotonic()
            build(program)
            sys.stdout.write(f"{program.name} {program.version}: {time.monotonic() - began:.0f} s\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
