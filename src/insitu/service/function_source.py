"""Writes a function, and what it uses, as a script that other processes run.

Functions and classes travel as their source, names of installed libraries as imports, and plain values as
data. So nothing is unpickled, the script can be read, and TensorFlow finds the source that it traces.
Whatever can't travel is refused, as is source that isn't what this process has loaded.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import copy
import inspect
import json
import linecache
import os
import subprocess
import symtable
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from insitu.base.errors import InputError
from insitu.base.serialization import NotSerializable, encode, to_bytes

SCRIPT = "run.py"
VALUES = "values.bin"
_HEAD = '''"""Written by insitu.run: {name} and what it uses."""

{future}'''
# The code of a job that imports insitu is treated as such (`find_insitu_import`): the user's code decides.
_TASK = '_insitu_run = __import__("insitu.service", fromlist=["FunctionTask"]).FunctionTask(__file__)\n'
_FUTURE = __future__.annotations.compiler_flag
_FIND_MODULES = """
import importlib.util, json, sys
found = {}
for name in json.load(sys.stdin):
    try:
        spec = importlib.util.find_spec(name)
    except Exception:
        spec = None
    if spec is not None:
        found[name] = [spec.origin, list(spec.submodule_search_locations or ())]
print(json.dumps(found))
"""
_OF_MODULES = {*vars(types.ModuleType("")), "__builtins__", "__file__"}
"""Names that each script has for itself."""
_Definition = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class FunctionScript:
    """A function as a script."""

    #: The source of the script.
    text: str
    #: The plain values that it reads by their names.
    values: dict[str, Any]


def write_script(function: Any, arguments: tuple[Any, ...]) -> FunctionScript:
    """Return the script that calls `function` with `arguments`. Raises InputError for what can't travel."""
    if not inspect.isroutine(inspect.unwrap(function)) or inspect.ismethod(function):
        raise InputError(
            f"insitu.run takes a function. Received: {_describe(function)}. Write a function by `def` that "
            f"calls it"
        )
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise InputError(
            f"insitu.run takes a function that returns its result. Received: {_name_of(function)}, a "
            f"coroutine or generator. Call it in a function, and return a list of what it yields"
        )
    writer = _Writer()
    name = _name_of(function)
    writer.place(name, function, "insitu.run")
    inputs = [f"_argument_{number}" for number in range(len(arguments))]
    for number, (each, value) in enumerate(zip(inputs, arguments, strict=True), 1):
        writer.place(each, value, f"argument {number} of insitu.run")
    text = writer.finish(name, inputs)
    return FunctionScript(text, writer.values)


class _Writer:
    """Collects the statements of a script. What a definition needs comes before it."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._placed: dict[str, Any] = {}
        self._imports: list[str] = []
        self._body: list[str] = []
        self._future = False
        self._installed = _find_installed()

    def finish(self, name: str, inputs: list[str]) -> str:
        """Return the script that calls the function `name`. Raises InputError if it isn't one."""
        future = "from __future__ import annotations\n\n" if self._future else ""
        call = f'\nif __name__ == "__main__":\n    _insitu_run({", ".join([name, *inputs])})\n'
        head = _HEAD.format(name=name, future=future)
        parts = [head, *(f"{each}\n" for each in self._imports), "\n", _TASK, *self._body, call]
        text = "".join(parts)
        try:
            compile(text, SCRIPT, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise InputError(
                f"The source of {name} and of what it uses must stand alone. Received: {error.msg}, in "
                f"{(error.text or '').strip()!r}. Pass such values as arguments"
            ) from error
        return text

    def place(self, name: str, value: Any, user: str) -> None:
        """Have the script bind `name` to `value`, which `user` uses. Raises InputError if it can't."""
        if name in self._placed:
            if not _is_same(self._placed[name], value):
                raise InputError(
                    f"A name means one thing in all that a function uses. Received: {name}, which {user} "
                    f"uses for {_describe(value)}, and another function for {_describe(self._placed[name])}. "
                    f"Rename one"
                )
            return
        self._placed[name] = value
        if isinstance(value, types.ModuleType):
            self._import_module(name, value, user)
        elif (module := self._find_module(value)) is not None:
            own = _name_of(value)
            self._imports.append(f"from {module} import {own}" + (f" as {name}" if own != name else ""))
        elif isinstance(inspect.unwrap(value), types.FunctionType) or isinstance(value, type):
            self._define(name, value)
        else:
            self._keep(name, value, user)

    def _keep(self, name: str, value: Any, user: str) -> None:
        try:
            encode(value)
        except NotSerializable as error:
            raise InputError(
                f"A function travels with functions, classes, modules, and plain values: numbers, texts, "
                f"bytes, NumPy arrays, and lists, tuples, sets and dicts of them. Received: {name}, "
                f"{_describe(value)}, used by {user} ({error}). Make it inside the function, or pass what it "
                f"is made of; rows belong into a cache (insitu.import_data)"
            ) from error
        self.values[name] = value
        self._body.append(f"{name} = _insitu_run.values[{name!r}]\n")

    def _import_module(self, name: str, module: types.ModuleType, user: str) -> None:
        whole = module.__name__
        if not self._is_installed(whole):
            raise InputError(
                f"Modules that a function uses must be importable in the job's tasks. Received: {whole}, "
                f"used by {user}, from {getattr(module, '__file__', None) or 'memory'}. Import functions and "
                f"classes of it by their names (from {whole} import ...), which then travel as source, or "
                f"put its folder into PYTHONPATH before this process starts"
            )
        self._imports.append(f"import {whole}" + (f" as {name}" if whole != name else ""))

    def _find_module(self, value: Any) -> str | None:
        """Return the installed module that gives `value` by its name; None: there is none."""
        name, module = _name_of(value), getattr(value, "__module__", None)
        if not isinstance(module, str) or not name.isidentifier() or not self._is_installed(module):
            return None
        return module if getattr(sys.modules.get(module), name, None) is value else None

    def _is_installed(self, module: str) -> bool:
        """Return whether tasks import the same module by this name."""
        top = module.partition(".")[0]
        spec = getattr(sys.modules.get(top), "__spec__", None)
        if top == "__main__" or spec is None or module not in sys.modules:
            return False
        return self._installed.get(top) == [spec.origin, list(spec.submodule_search_locations or ())]

    def _define(self, name: str, value: Any) -> None:
        found = _find_source(value)
        node, raw, user = found.node, found.raw, found.node.name
        bare = raw is value and isinstance(value, types.FunctionType)
        if bare and node.decorator_list and found.names.get(node.name) is not value:
            raise InputError(
                f"A decorated function travels if its decorator keeps it by functools.wraps. Received: "
                f"{node.name}, decorated by {ast.unparse(node.decorator_list[0])}. Add "
                f"@functools.wraps(function) to what the decorator defines"
            )
        if node.name != name:
            self.place(node.name, value, user)
            self._body.append(f"{name} = {node.name}\n")
            return
        self._future = self._future or found.future
        text = self._pin_values(found)
        for needed in _find_names(text, found.future):
            if needed in found.names:
                self.place(needed, found.names[needed], user)
                self._import_parts(needed, found.names[needed], node)
            elif not (needed in self._placed or hasattr(builtins, needed) or needed in _list_globals(node)):
                raise InputError(
                    f"All names that a function uses must be defined. Received: {user}, which uses {needed}. "
                    f"Define it first, or import it inside the function"
                )
        self._body.append(f"\n\n{text}\n\n")

    def _import_parts(self, name: str, module: Any, node: ast.AST) -> None:
        """Import the submodules that `node` reaches by attributes: other code may have loaded them."""
        if not isinstance(module, types.ModuleType):
            return
        for chain in filter(None, map(_read_chain, ast.walk(node))):
            for count in range(2, len(chain) + 1):
                part = ".".join([module.__name__, *chain[1:count]])
                reached = chain[0] == name and isinstance(sys.modules.get(part), types.ModuleType)
                if reached and (line := f"import {part} as _insitu_part") not in self._imports:
                    self._imports.append(line)

    def _pin_values(self, found: _Source) -> str:
        """Return the text of a definition in which defaults and attributes have the values that they have
        here: the names in their expressions may mean something else by now."""
        node, before = copy.deepcopy(found.node), len(self._placed)
        if isinstance(node, ast.FunctionDef):
            self._pin_defaults(node, found.raw, f"_{node.name}")
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            own = f"_{node.name}_{getattr(each, 'name', '')}"
            if isinstance(each, ast.FunctionDef):
                method = inspect.unwrap(vars(found.raw).get(each.name))
                if isinstance(method, types.FunctionType):
                    self._pin_defaults(each, method, own)
            # A call says more than its value, such as dataclasses.field(...).
            elif isinstance(each, ast.Assign | ast.AnnAssign) and not isinstance(
                each.value, ast.Constant | ast.Call | None
            ):
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                name = targets[0].id if isinstance(targets[0], ast.Name) else ""
                if name in vars(found.raw) and _is_plain(value := vars(found.raw)[name]):
                    self.place(f"{own}{name}", value, node.name)
                    each.value = ast.Name(f"{own}{name}", ast.Load())
        return found.text if len(self._placed) == before else ast.unparse(ast.fix_missing_locations(node))

    def _pin_defaults(self, node: ast.FunctionDef, raw: types.FunctionType, own: str) -> None:
        given: list[list[Any]] = [[*node.args.defaults], [*node.args.kw_defaults]]
        named = raw.__kwdefaults__ or {}
        values = [list(raw.__defaults__ or ()), [named.get(each.arg) for each in node.args.kwonlyargs]]
        for expressions, held in zip(given, values, strict=True):
            for number, (expression, value) in enumerate(zip(expressions, held, strict=True)):
                if not isinstance(expression, ast.Constant | None):
                    name = f"{own}_default_{len(self._placed)}"
                    self.place(name, value, f"{node.name} as a default")
                    expressions[number] = ast.Name(name, ast.Load())
        node.args.defaults, node.args.kw_defaults = given


@dataclass(frozen=True, slots=True)
class _Source:
    """The definition of a function or class."""

    #: The function below its decorators, or the class.
    raw: Any
    #: Its definition, as a tree.
    node: _Definition
    #: Its definition, from the first column.
    text: str
    #: What its global names and those of functions around it mean.
    names: Mapping[str, Any]
    #: Annotations in it aren't evaluated.
    future: bool


def _find_source(value: Any) -> _Source:
    """Return the definition of a function or class of the user. Raises InputError if there is none that can
    be read, or another one than this process has loaded."""
    raw = inspect.unwrap(value)
    functions = [raw] if isinstance(raw, types.FunctionType) else _list_methods(raw)
    codes = [function.__code__ for function in functions]
    file = codes[0].co_filename if codes else _find_file(raw)
    lines = linecache.getlines(file)
    name = _name_of(raw)
    advice = "Define it by `def` or `class` in a file or in a cell of a notebook"
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        tree = ast.Module([], [])
    line = codes[0].co_firstlineno if codes else 0
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef if isinstance(raw, type) else ast.FunctionDef)
        and node.name == name
        and (_first_line(node) == line if not isinstance(raw, type) else _holds(node, line))
    ]
    if not nodes:
        what = "a lambda" if name == "<lambda>" else f"{name}, whose source isn't in {file or 'a file'}"
        raise InputError(f"Functions and classes travel as their source. Received: {what}. {advice}")
    node = nodes[-1]
    cells = {each: held for function in functions for each, held in _read_cells(function).items()}
    future = any(code.co_flags & _FUTURE for code in codes)
    if not _is_loaded(codes, tree, node, future):
        raise InputError(
            f"Functions and classes travel as their source. Received: {name}, whose source in {file} has "
            f"changed since this process has loaded it. Run its cell or import it again"
        )
    text = "".join(lines[_first_line(node) - 1 : node.end_lineno]).rstrip()
    known = vars(sys.modules[raw.__module__]) if isinstance(raw, type) else raw.__globals__
    return _Source(raw, node, ast.unparse(node) if node.col_offset else text, {**known, **cells}, future)


def _list_methods(kind: type) -> list[types.FunctionType]:
    """Return the methods that stand in the source of a class."""
    found = []
    for name, value in vars(kind).items():
        value = value.fget if isinstance(value, property) else value
        method: Any = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        method = inspect.unwrap(method) if callable(method) else method
        if isinstance(method, types.FunctionType) and method.__qualname__ == f"{kind.__qualname__}.{name}":
            # Those that a decorator such as dataclass has made have no file.
            found += [method] if linecache.getlines(method.__code__.co_filename) else []
    return found


def _find_file(kind: type) -> str:
    try:
        return inspect.getsourcefile(kind) or ""
    except TypeError:
        return ""


def _first_line(node: _Definition) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def _holds(node: _Definition, line: int) -> bool:
    return not line or node.lineno <= line <= (node.end_lineno or 0)


def _read_cells(function: types.FunctionType) -> dict[str, Any]:
    """Return what a function uses of the functions around it."""
    try:
        pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        return {each: cell.cell_contents for each, cell in pairs if each != "__class__"}
    except ValueError as error:
        raise InputError(
            f"All names that a function uses must be defined. Received: {function.__name__}, which uses a "
            f"name that the function around it hasn't defined yet. Define it first"
        ) from error


def _is_loaded(codes: list[types.CodeType], tree: ast.Module, node: _Definition, future: bool) -> bool:
    """Return whether the file `tree` compiles to these codes, which are of `node`."""
    # A notebook compiles each statement of a cell alone, and imports around it change what is made.
    alone = [each for each in tree.body if each.lineno <= node.lineno <= (each.end_lineno or 0)]
    for module in (tree, ast.Module(alone, [])):
        made = compile(module, "", "exec", flags=_FUTURE if future else 0, dont_inherit=True)
        found = {(each.co_name, each.co_firstlineno): each for each in _walk_code(made)}
        others = [found.get((code.co_name, code.co_firstlineno)) for code in codes]
        if all(b is not None and _is_same_code(a, b) for a, b in zip(codes, others, strict=True)):
            return True
    return False


def _walk_code(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _walk_code(each)


def _is_same_code(one: types.CodeType, other: types.CodeType) -> bool:
    if any(name.startswith("@py") for name in one.co_names + one.co_varnames):
        return True  # pytest has rewritten its assertions
    if (one.co_code, one.co_names, one.co_varnames) != (other.co_code, other.co_names, other.co_varnames):
        return False
    return len(one.co_consts) == len(other.co_consts) and all(
        map(_is_same_constant, one.co_consts, other.co_consts)
    )


def _is_same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, types.CodeType) and isinstance(other, types.CodeType):
        return _is_same_code(one, other)
    if isinstance(one, frozenset) and isinstance(other, frozenset):  # whose order differs
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return type(one) is type(other) and repr(one) == repr(other)


def _find_names(text: str, future: bool) -> list[str]:
    """Return the names that a definition takes from outside, in the order of the alphabet."""
    head = "from __future__ import annotations\n" if future else ""
    found: set[str] = set()

    def collect(table: symtable.SymbolTable) -> None:
        for symbol in table.get_symbols():
            inner = table.get_type() != "module"
            outer = symbol.is_global() if inner else not symbol.is_assigned()
            if symbol.is_referenced() and outer:
                found.add(symbol.get_name())
        for child in table.get_children():
            collect(child)

    collect(symtable.symtable(head + text, SCRIPT, "exec"))
    return sorted(found - _OF_MODULES)


def _list_globals(node: ast.AST) -> set[str]:
    """Return the names that a definition declares as global: it defines them itself."""
    return {name for each in ast.walk(node) if isinstance(each, ast.Global) for name in each.names}


def _read_chain(node: ast.AST) -> list[str]:
    """Return ["a", "b", "c"] for the expression a.b.c; [] for another one."""
    chain: list[str] = []
    while isinstance(node, ast.Attribute):
        chain.insert(0, node.attr)
        node = node.value
    return [node.id, *chain] if isinstance(node, ast.Name) and chain else []


def _find_installed() -> dict[str, list[Any]]:
    """Return the loaded top-level modules that a fresh interpreter finds, too, with their places."""
    names = sorted({name.partition(".")[0] for name in sys.modules})
    done = subprocess.run(
        [sys.executable, "-P", "-c", _FIND_MODULES],
        input=json.dumps(names),
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, list[Any]] = json.loads(done.stdout)
    return found


def _name_of(value: Any) -> str:
    return str(getattr(value, "__name__", type(value).__name__))


def _describe(value: Any) -> str:
    text = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{_name_of(value)} ({text})" if hasattr(value, "__name__") else f"a value of type {text}"


def _is_plain(value: Any) -> bool:
    try:
        encode(value)
    except NotSerializable:
        return False
    return True


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values are one, or equal plain ones."""
    if one is other:
        return True
    return _is_plain(one) and _is_plain(other) and to_bytes(one) == to_bytes(other)
