"""The laws of the structure, read off the source."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import insitu

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "insitu"
MODULES = sorted(SOURCE.rglob("*.py"))

GROUND = {"base"}
BELOW = {
    "options": GROUND,
    "grid": GROUND | {"options", "metadata"},
    "exchange": GROUND,
    # Of the exchange it takes the proof of the secret, shared memory, and the order of summation.
    "parameters": GROUND | {"exchange"},
    # Of the exchange it takes the look-up of names.
    "metadata": GROUND | {"exchange"},
    "cluster": GROUND | {"options", "grid", "exchange", "parameters", "metadata"},
    "train": GROUND | {"grid", "exchange", "parameters"},
    # Nothing imports it, so what brings commands may use all that commands do.
    "extensions": GROUND
    | {"options", "grid", "exchange", "parameters", "cluster", "train", "service", "ui", "cli"},
    "service": GROUND | {"options", "grid", "cluster"},
    "ui": GROUND | {"options", "grid", "cluster", "service"},
    "cli": GROUND | {"options", "grid", "exchange", "parameters", "cluster", "train", "service", "ui"},
    "__main__": {"cli"},
}
"""What each room may import, beside itself. `base` imports only itself."""

FOLDERS = {f"backends/{path.parent.name}" for path in (SOURCE / "train" / "backends").glob("*/__init__.py")}
"""The folders of Keras' backends. They are loaded by their names: all else asks the interface below them."""

INNER = {
    "grid": [
        {"layout"},
        {"stores"},
        {"partitions"},
        {"sources"},
        {"ray_data"},
        {"intake"},
        {"catalog"},
        {"shared_files"},
        {"transfer"},
        {"replicas"},
        {"reading"},
        {"importing"},
        {"maintenance"},
        {"caches"},
        {"serving"},
    ],
    "cluster": [
        {"decide"},
        {"job_files"},
        {"task"},
        {"engines"},
        {"files"},
        {"wire"},
        {"leases"},
        {"job_backup"},
        {"job_hosts"},
        {"ray"},
        {"hosts_engine"},
        {"failover"},
        {"nodes"},
        {"control"},
        {"client"},
        {"chaos"},
    ],
    "train": [
        {"backends"},
        {"devices", "files"},
        {"collectives"},
        {"replica"},
        {"elastic"},
        {"fit"},
        {"checkpoint", "replicated", "placement"},
        {"custom_loop"},
        FOLDERS,
        {"parameter_server"},
        {"strategies"},
        {"evaluation"},
    ],
    "extensions": [
        {"features", "ignite", "kubernetes", "tracking"},
        {"exports"},
        {"estimator"},
    ],
}
"""The inner rooms, lowest first: each may import those before it. Rooms of one set don't know each other."""

PURE_FOLDERS = ["options", "grid/layout", "exchange/plan", "parameters/rules", "cluster/decide"]
"""Rooms of decisions and computations: they import no clock, thread, socket or process, and nothing else of
the room around them. So are two modules of `base`."""
PURE = [
    SOURCE / "base" / "spec.py",
    SOURCE / "base" / "paths.py",
    *(path for folder in PURE_FOLDERS for path in sorted((SOURCE / folder).glob("*.py"))),
]
IMPURE = {"asyncio", "socket", "threading", "subprocess", "time"}
BACKENDS = {"keras", "tensorflow", "jax", "torch"}
WEB_FRAMEWORKS = {"anyio", "fastapi", "jinja2", "markupsafe", "pydantic", "starlette", "uvicorn"}


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Return the absolute names of all that a module imports, wherever in it: also for type checkers alone,
    and by a string that names a module. Relative imports are a lint error."""
    tree = ast.parse(path.read_text())
    named = (str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return (*_find_imports(tree), *(name for name in named if re.fullmatch(r"insitu(\.\w+)+", name)))


def _find_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
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


@pytest.mark.parametrize("path", [m for m in MODULES if room_of(m) != "extensions"], ids=identity)
def test_the_core_reads_without_its_extensions(path: Path):
    """It finds them by entry points. The lazy names of `insitu` itself are what scripts import."""
    named = {name for name in imports(path) if name.split(".")[:2] == ["insitu", "extensions"]}
    assert not named or path == SOURCE / "__init__.py"


def test_the_core_names_no_system_in_its_code():
    """Connectors of other systems are extensions. Texts and docstrings, for users, may name them."""
    found = {
        (identity(path), name)
        for path in MODULES
        if room_of(path) != "extensions"
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (getattr(node, each, None) for each in ("id", "attr", "name", "arg"))
        if isinstance(name, str) and "ignite" in name.lower()
    }
    assert not found


def inner_room_of(name: str) -> tuple[str, str] | None:
    """The (room, inner room) that the absolute name of a module or of something in it is in."""
    parts = name.split(".")
    if len(parts) < 3 or parts[0] != "insitu":
        return None
    if "/".join(parts[2:4]) in FOLDERS:
        return parts[1], "/".join(parts[2:4])
    inner = any(parts[2] in level for level in INNER.get(parts[1], []))
    return (parts[1], parts[2]) if inner else None


def absolute_name(path: Path) -> str:
    parts = ("insitu", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("room", INNER)
def test_each_folder_is_an_inner_room_with_a_described_door(room: str):
    # A folder that another revision left behind holds compiled files alone.
    folders = {p.name for p in (SOURCE / room).iterdir() if any(p.glob("*.py"))}
    folders |= FOLDERS if room == "train" else set()
    assert folders == set().union(*INNER[room])
    assert [p.name for p in (SOURCE / room).glob("*.py")] == ["__init__.py"]
    for folder in folders:
        description = ast.get_docstring(ast.parse((SOURCE / room / folder / "__init__.py").read_text()))
        assert description and "Begin reading with" in description, folder


IN_INNER_ROOMS = [m for m in MODULES if inner_room_of(absolute_name(m)) is not None]


@pytest.mark.parametrize("path", IN_INNER_ROOMS, ids=identity)
def test_inner_rooms_import_only_those_below_them(path: Path):
    room, inner = inner_room_of(absolute_name(path)) or ("", "")
    level = next(i for i, rooms in enumerate(INNER[room]) if inner in rooms)
    below = set().union(*INNER[room][:level], {inner})
    above = set()
    for name in imports(path):
        other = inner_room_of(name)
        upward = other is not None and other[0] == room and other[1] not in below and name not in STARTED
        if upward or name == f"insitu.{room}":
            above.add(name)
    assert not above


@pytest.mark.parametrize("path", IN_INNER_ROOMS, ids=identity)
def test_only_the_interface_knows_a_backends_folder(path: Path):
    """A further backend is a further folder: nothing else names one."""
    own = inner_room_of(absolute_name(path))
    named = {room for room in map(inner_room_of, imports(path)) if room and room[1] in FOLDERS}
    assert named <= {own}


STARTED = {
    "insitu.cluster.control.supervisor",
    "insitu.cluster.failover.etcd_process",
    "insitu.cluster.hosts_engine.partition_fetch",
    "insitu.cluster.hosts_engine.refresh_reading",
    "insitu.cluster.job_hosts.host_server",
    "insitu.cluster.nodes.agent_process",
    "insitu.cluster.nodes.re_replication_process",
    "insitu.cluster.nodes.head_process",
    "insitu.cluster.ray.ray_reserving",
    "insitu.cluster.task.entry",
    "insitu.train.devices",
}
"""Modules whose names are passed to `python -m`: programs that are started, not modules that are imported."""


@functools.cache
def module_of(name: str) -> Path | None:
    """The file of the module that `name`, absolute, names or is in. None for a package."""
    parts = name.split(".")[1:]
    candidates = [SOURCE.joinpath(*parts[:count]).with_suffix(".py") for count in range(len(parts), 0, -1)]
    return next((path for path in candidates if path.exists()), None)


@functools.cache
def names_of_door(folder: Path) -> set[str]:
    """What a package imports from its own rooms, to give it to others, also while types are checked alone."""
    found = set()
    for node in ast.parse((folder / "__init__.py").read_text()).body:
        inner = node.body if isinstance(node, ast.If) else [node]
        for each in inner:
            if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("insitu"):
                found |= {alias.asname or alias.name for alias in each.names}
    return found


@pytest.mark.parametrize("path", [m for m in MODULES if m != SOURCE / "__init__.py"], ids=identity)
def test_rooms_are_entered_by_their_doors(path: Path):
    """A room is any package in insitu. Its own modules and those of rooms inside it import each other. Others
    import from the package, which may give a whole module too. Modules of `base` are imported one by one."""
    past = []
    for name in imports(path):
        module = module_of(name) if name.startswith("insitu.") and name not in STARTED else None
        if module is None or room_of(module) == "base" or module.parent in {SOURCE, *path.parents}:
            continue
        given_whole = name == absolute_name(module) and module.stem in names_of_door(module.parent)
        if not given_whole:
            past.append(name)
    assert not past


def test_the_module_of_a_name_and_the_names_of_a_door_are_found():
    assert module_of("insitu.exchange.pages.Pages") == SOURCE / "exchange" / "pages.py"
    assert module_of("insitu.exchange.Pages") is None
    assert {"Group", "join", "memory"} <= names_of_door(SOURCE / "exchange")
    assert "pages" not in names_of_door(SOURCE / "exchange")


@pytest.mark.parametrize("room", ["insitu.exchange", "insitu.grid", "insitu.metadata", "insitu.parameters"])
def test_doors_give_all_that_they_name(room: str):
    door = importlib.import_module(room)
    assert door.__file__ is not None
    assert set(dir(door)) == names_of_door(Path(door.__file__).parent) - {"export_lazily"}
    for name in dir(door):
        assert getattr(door, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = door.nothing_of_the_kind


def test_modules_import_each_other_in_no_circle():
    """Doors are passed through: who imports a name from one imports the module that defines it."""
    modules = {absolute_name(m): m for m in MODULES if m.name != "__init__.py"}
    given = {f"{absolute_name(d)}.{name}": module for d in MODULES for name, module in _given_by(d)}

    def find_module(name: str) -> str:
        seen = set[str]()
        while name not in modules and name in given and name not in seen:
            seen.add(name)
            name = given[name]
        return name

    graph = {
        name: {find_module(each) for each in _find_imports(ast.parse(path.read_text()))} - {name}
        for name, path in modules.items()
    }
    while leaves := {name for name, needed in graph.items() if not needed & graph.keys()}:
        graph = {name: needed for name, needed in graph.items() if name not in leaves}
    assert not {name: needed & graph.keys() for name, needed in graph.items()}


def _given_by(door: Path) -> Iterator[tuple[str, str]]:
    """Yield the names that a package gives, each with where it has it from."""
    if door.name != "__init__.py":
        return
    for node in ast.walk(ast.parse(door.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("insitu."):
            defines = module_of(f"{node.module}.")  # None for a door
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield alias.asname or alias.name, absolute_name(defines) if defines else whole


CORE = [path for path in MODULES if room_of(path) != "extensions"]
LINES, FILES = 129_674, 700
"""Of Python in the core, at most: what is added replaces something, or its commit says why not."""
ALL_LINES = 146_272
"""With the extensions."""


@pytest.mark.parametrize("path", MODULES, ids=identity)
def test_what_runs_as_a_program_is_whole_first(path: Path):
    body = ast.parse(path.read_text()).body
    guards = [
        n for n, node in enumerate(body) if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
    ]
    assert guards in ([], [len(body) - 1])


def test_the_house_keeps_its_size():
    assert sorted(m.name for m in SOURCE.glob("*.py")) == ["__init__.py", "__main__.py"]
    assert len(CORE) <= FILES
    lines = {path: len(path.read_text().splitlines()) for path in MODULES}
    assert sum(lines[path] for path in CORE) <= LINES
    assert sum(lines.values()) <= ALL_LINES


@pytest.mark.parametrize("path", MODULES, ids=identity)
def test_only_train_knows_keras(path: Path):
    known = {name.split(".")[0] for name in imports(path)} & BACKENDS
    assert not known or room_of(path) in ("train", "extensions")


@pytest.mark.parametrize("path", MODULES, ids=identity)
def test_only_the_page_knows_a_web_framework(path: Path):
    known = {name.split(".")[0] for name in imports(path)} & WEB_FRAMEWORKS
    assert not known or room_of(path) == "ui" or path == SOURCE / "extensions" / "exports" / "model_server.py"


@pytest.mark.parametrize("path", PURE, ids=identity)
def test_pure_modules_touch_no_clock_thread_or_socket(path: Path):
    assert not {imported.split(".")[0] for imported in imports(path)} & IMPURE


@pytest.mark.parametrize("folder", PURE_FOLDERS)
def test_a_pure_folder_imports_nothing_of_the_room_around_it(folder: str):
    own, around = f"insitu.{folder.replace('/', '.')}", f"insitu.{folder.split('/')[0]}"
    for path in (SOURCE / folder).glob("*.py"):
        names = {name for name in imports(path) if name == around or name.startswith(f"{around}.")}
        assert not {name for name in names if name != own and not name.startswith(f"{own}.")}


def lines_of_body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of what a function does: its docstring and its parameters, which for a command of the command
    line are a page of help, left out."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", MODULES, ids=identity)
def test_modules_and_functions_stay_small(path: Path):
    text = path.read_text()
    assert len(text.splitlines()) <= 800
    long = [
        f"{node.name}: {lines_of_body(node)} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of_body(node) > 50
    ]
    assert not long


def test_the_public_names_are_there():
    for name in insitu.__all__:
        assert getattr(insitu, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = insitu.nothing_of_the_kind


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_paths_in_the_documents_exist(document: str):
    """Paths in backticks, from the root or from src/insitu. A row of the table of rooms names files of its
    room too."""
    missing = []
    for line in (ROOT / document).read_text().splitlines():
        row = re.match(r"\| `(\w+)/` \|", line)
        places = [ROOT, SOURCE, SOURCE / row[1]] if row else [ROOT, SOURCE]
        found = re.findall(r"`([\w.-]+/[\w./-]*)`", line)
        found += re.findall(r"`(\w+\.py)`", line) if row else []
        missing += [path for path in found if not any((place / path).exists() for place in places)]
    assert not missing
