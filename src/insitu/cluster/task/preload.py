"""Runs a standby: loads what the script will import, then waits to become a task.

The code of the script and of other files in JOB_DIR isn't run, since it may read the environment of a task,
which isn't set yet. Their source is parsed instead. Their top-level imports of installed packages are
performed in order. So are assignments of constants to `os.environ` between them, since libraries read the
environment while they are loaded. A file is left at the first other statement that changes `os.environ`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from insitu.base.context import CONTRACT_ENVS
from insitu.base.net.ports import LISTENER_ENV, describe_listener
from insitu.base.process import preload_hooks
from insitu.cluster.task.lazy_imports import gc_paused

LOWEST_PRIORITY = 19
_LARGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Import:
    """An import of the script."""

    #: The module, by its absolute name.
    module: str
    #: The attribute of it that the script takes, or "".
    attribute: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable that the script sets in its environment."""

    #: Its name.
    name: str
    #: Its value.
    value: str
    #: It is set only if it isn't set yet.
    default: bool


PreloadAction = Import | Setting


def find_preload_actions(script: Path) -> Iterator[PreloadAction]:
    """Yield what of `script`'s first statements can safely be done ahead, in order."""
    yield from _find_actions(script, script.parent, set())


def _find_actions(file: Path, folder: Path, seen: set[Path]) -> Iterator[PreloadAction]:
    seen.add(file)
    try:
        tree = ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for statement in _walk_top_level(tree.body):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for found in _parse_imports(statement):
                local = _find_local_file(folder, found.module)
                if local is None:
                    yield found
                elif local not in seen:
                    yield from _find_actions(local, folder, seen)
        elif setting := _parse_setting(statement):
            yield setting
        elif _touches_environment(statement):
            return
    yield from _find_insitu_attributes(tree)


def _walk_top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.Try):
            yield from _walk_top_level(statement.body)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement


def _parse_imports(statement: ast.Import | ast.ImportFrom) -> Iterator[Import]:
    if isinstance(statement, ast.Import):
        yield from (Import(alias.name) for alias in statement.names)
    elif statement.module and not statement.level:
        yield from (Import(statement.module, alias.name) for alias in statement.names if alias.name != "*")


def _find_local_file(folder: Path, module: str) -> Path | None:
    """Return the file of JOB_DIR that `module` is, or None."""
    base = folder.joinpath(*module.split("."))
    if base.with_suffix(".py").is_file():
        return base.with_suffix(".py")
    if (base / "__init__.py").is_file():
        return base / "__init__.py"
    top = folder / module.partition(".")[0]
    return top if top.is_dir() else None


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _parse_setting(statement: ast.stmt) -> Setting | None:
    """Return what `os.environ["A"] = "b"` or `os.environ.setdefault("A", "b")` sets, None for other
    statements."""
    match statement:
        case ast.Assign(
            targets=[ast.Subscript(value=place, slice=ast.Constant(value=str(name)))],
            value=ast.Constant(value=str(value)),
        ) if _is_environ(place):
            return Setting(name, value, False)
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=place, attr="setdefault"),
                args=[ast.Constant(value=str(name)), ast.Constant(value=str(value))],
            )
        ) if _is_environ(place):
            return Setting(name, value, True)
    return None


def _touches_environment(statement: ast.stmt) -> bool:
    """Return whether the statement may write to the environment; reading it does no harm."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and _is_environ(node.value):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            writes = name in ("update", "pop", "setdefault", "clear", "popitem")
            if name in ("putenv", "unsetenv") or (writes and _is_environ(node.func.value)):
                return True
    return False


def _find_insitu_attributes(tree: ast.Module) -> Iterator[Import]:
    """Yield `insitu.X` wherever it stands: the package loads its parts when they are first named."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "insitu":
            yield Import("insitu", node.attr)


def preload_script(script: Path) -> None:
    """Do what `find_preload_actions` finds. The script fails at imports that fail here."""
    for action in find_preload_actions(script):
        with contextlib.suppress(Exception):
            if isinstance(action, Import):
                module = importlib.import_module(action.module)
                if action.attribute and action.module == "insitu":
                    getattr(module, action.attribute)
                elif action.attribute and not hasattr(module, action.attribute):
                    importlib.import_module(f"{action.module}.{action.attribute}")
            elif action.default:
                os.environ.setdefault(action.name, action.value)
            else:
                os.environ[action.name] = action.value
    preload_hooks.run_preloads()


def wait_as_standby(descriptor: int, script: Path | None) -> None:
    """Preload the script's imports, wait until this process becomes a task, and take the task's environment.

    Ends the process if it is never needed.
    """
    lowered = _lower_priority()
    with socket.socket(fileno=descriptor) as connection:
        connection.set_inheritable(False)
        if script is not None:
            with gc_paused():
                preload_script(script)
        text, listener = _receive_task(connection)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if not text:
        os._exit(0)
    environment: dict[str, str] = json.loads(text)["environment"]
    for name in CONTRACT_ENVS & os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    if listener is not None:
        os.environ[LISTENER_ENV] = describe_listener(listener)
        os.set_inheritable(listener.detach(), True)
    if lowered:
        _restore_priority()


def _receive_task(connection: socket.socket) -> tuple[bytes, socket.socket | None]:
    """Return what the engine sends until it closes its end, and the bound socket of the task, if there is
    one."""
    text, listener = b"", None
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, _LARGEST, 1)
        for descriptor in descriptors:
            listener = socket.socket(fileno=descriptor)
        if not data:
            return text, listener
        text += data


def _lower_priority() -> bool:
    """Lower this process's priority below that of tasks, if it may be raised again later."""
    import resource

    if os.getpriority(os.PRIO_PROCESS, 0) != 0:
        return False
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    if os.geteuid() != 0 and soft < 20:
        return False
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
    return True


def _restore_priority() -> None:
    """Restore the priority of every thread: those that imports have started inherited the low one."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(thread), 0)
