"""The laws of the structure, read off the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import insitu

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "insitu"
MODULES = sorted(SOURCE.rglob("*.py"))

GROUND = {
    "_version",
    "errors",
    "durable",
    "spec",
    "paths",
    "context",
    "progress",
    "roster",
    "config",
    "warmth",
    "loading",
    "ports",
    "tether",
}
BELOW = {
    "grid": GROUND,
    "exchange": GROUND,
    # Of the exchange it takes the proof of the secret, shared memory, and the order of summation.
    "parameters": GROUND | {"exchange"},
    "cluster": GROUND | {"grid", "exchange", "parameters"},
    "train": GROUND | {"grid", "exchange", "parameters"},
    "cli": GROUND | {"grid", "exchange", "parameters", "cluster", "train"},
    "__main__": {"cli"},
}
"""What each room may import, beside itself. The ground floor imports only itself."""

PURE = [
    "spec.py",
    "paths.py",
    "grid/affinity.py",
    "grid/order.py",
    "cluster/placement.py",
    "cluster/job.py",
    "cluster/job_state.py",
    "cluster/layout.py",
    "cluster/recovery.py",
    "cluster/stall.py",
    "cluster/watching.py",
    "exchange/arithmetic.py",
    "parameters/consistent_cut.py",
    "parameters/hashing.py",
    "parameters/push_stats.py",
    "parameters/sharding_plan.py",
    "parameters/modes.py",
    "parameters/updaters.py",
    "parameters/wire.py",
    "train/flat.py",
    "train/mesh/rows.py",
]
IMPURE = {"asyncio", "socket", "threading", "subprocess", "time"}
BACKENDS = {"keras", "tensorflow", "jax", "torch"}


def imports(path: Path) -> Iterator[str]:
    """Absolute names of all that a module imports, wherever in it. Relative imports are a lint error."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def identity(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", [m for m in MODULES if room_of(m) != "__init__"], ids=identity)
def test_imports_point_downward(path: Path):
    room = room_of(path)
    allowed = BELOW.get(room, GROUND) | {room}
    above = {
        name for name in imports(path) if name.startswith("insitu.") and name.split(".")[1] not in allowed
    }
    # `from insitu import errors` and the like name a part of the package itself.
    above -= {name for name in above if name.split(".")[1] in insitu.__all__}
    assert not above


@pytest.mark.parametrize("path", MODULES, ids=identity)
def test_only_train_knows_keras(path: Path):
    known = {name.split(".")[0] for name in imports(path)} & BACKENDS
    assert not known or room_of(path) == "train"


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_touch_no_clock_thread_or_socket(name: str):
    path = SOURCE / name
    assert not {imported.split(".")[0] for imported in imports(path)} & IMPURE


def test_ray_would_be_imported_in_one_file():
    users = [identity(p) for p in MODULES if any(n.split(".")[0] == "ray" for n in imports(p))]
    assert len(users) <= 1


def lines_of_body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of what a function does: its docstring and its parameters, which for a command of the command
    line are a page of help, left out."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", MODULES, ids=identity)
def test_modules_and_functions_stay_small(path: Path):
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    long = [
        f"{node.name}: {lines_of_body(node)} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of_body(node) > 50
    ]
    assert not long


def test_the_public_names_are_there():
    assert insitu.__all__ == [
        "BackupAndRestore",
        "CentralStorageStrategy",
        "Context",
        "Dataset",
        "HybridStrategy",
        "MirroredStrategy",
        "ModelParallelStrategy",
        "MultiWorkerMirroredStrategy",
        "OneDeviceStrategy",
        "ParameterServer",
        "ParameterServerStrategy",
        "TPUStrategy",
        "__version__",
        "config",
        "context",
        "dataset",
        "errors",
        "exchange",
        "layers",
        "parameters",
    ]
    for name in insitu.__all__:
        assert getattr(insitu, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = insitu.nothing_of_the_kind


def test_links_in_the_documents_lead_somewhere():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    assert documents
    broken = []
    for document in documents:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text()):
            if "://" not in target and not (document.parent / target).exists():
                broken.append(f"{document.name}: {target}")
    assert not broken


def test_the_architecture_names_every_module():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    missing = [identity(p) for p in MODULES if p.name != "__init__.py" and f"`{p.name}`" not in text]
    assert not missing
