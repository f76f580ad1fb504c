"""Tells whether a step is the one that was compiled: the same code over the same objects and plain values.

A compiled step keeps what it has read of Python while it was traced. Without compilation, as TensorFlow runs
a step outside of `tf.function`, each call reads it again. So what a step's code names is a part of its
identity: globals, enclosed variables, defaults, attributes, items and arrays, also those of functions,
methods, properties and callable objects that it names, but for the code of libraries.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sysconfig
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

PLAIN = (int, float, complex, bool, str, bytes, type(None))
_MAX_ITEMS = 64
"""Larger containers count as objects."""
_MAX_BYTES = 1 << 20
"""Larger arrays count as objects."""
_MAX_DEPTH = 8
"""Functions that call each other so deeply."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", f"{sysconfig.get_path('stdlib')}/", "/insitu/train/")
_ROOTS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"})
_FAST = ("LOAD_FAST", "STORE_FAST_LOAD_FAST")
"""How names of instructions begin that load a local variable. Some load two."""
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_STORES = frozenset({"STORE_GLOBAL", "STORE_NAME", "STORE_DEREF"})
_READS_OF_A_DICT = frozenset({"get", "items", "keys", "values"})
MISSING = object()
"""Stands for an argument that has arrays, and for what has no value."""


class _Identity:
    """The identity of a step, as it is found."""

    def __init__(self) -> None:
        #: what the key names by its id, which must live as long as the key
        self.objects: list[Any] = []
        #: ids of the functions, with those of their owners, whose code was read
        self.read: set[tuple[int, int]] = set()


def identify_step(
    fn: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> tuple[Any, tuple[Any, ...]]:
    """Return a key of what a call of `fn` runs, and the objects in it, which must live as long as the key. Of
    the arguments those count that are no arrays: MISSING stands for one that is."""
    found = _Identity()
    return _identify(fn, found, 0, args, kwargs or {}), tuple(found.objects)


def identify_constant(value: Any) -> Any:
    """Return a key for an argument: its value if that can't change, otherwise the identity of the object."""
    if isinstance(value, str | bytes | bool | int | None):
        return value
    return type(value), id(value)


def name_changes(one: Any, other: Any) -> list[str]:
    """Return the names of what differs between two keys of one step."""
    if _is_read(one) and _is_read(other) and one[:2] == other[:2]:
        values = dict(other[2])
        changed = [(name, value, values.get(name)) for name, value in one[2] if value != values.get(name)]
        return [found for name, *pair in changed for found in name_changes(*pair) or [name]]
    if all(isinstance(key, tuple) and key[:1] == ("partial",) for key in (one, other)):
        return [found for pair in zip(one, other, strict=False) for found in name_changes(*pair)]
    return []


def _is_read(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 3 and isinstance(key[0], types.CodeType)


def _identify(
    fn: Any, found: _Identity, depth: int, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Return a key of a function: its code, and (name, value) of all that it reads."""
    found.objects.append(fn)
    if isinstance(fn, functools.partial):
        args, kwargs = (*fn.args, *args), {**fn.keywords, **(kwargs or {})}
        bound = [*fn.args, *fn.keywords.values()]
        inner = _identify(fn.func, found, depth, args, kwargs)
        return "partial", inner, *(_identify_value(value, found, depth) for value in bound)
    method = _bind_call(fn)
    owner = method.__self__ if isinstance(method, types.MethodType) else None
    code_of = getattr(method, "__func__", method)
    if not isinstance(code_of, types.FunctionType):
        return id(fn)
    found.read.add((id(code_of), id(owner)))
    code = code_of.__code__
    try:
        cells = zip(code.co_freevars, code_of.__closure__ or (), strict=True)
        known = {name: cell.cell_contents for name, cell in cells}
    except ValueError:  # a name that has no value yet
        return id(fn)
    defaults = [*(code_of.__defaults__ or ()), *(code_of.__kwdefaults__ or {}).values()]
    key = [(f"default {i}", _identify_value(value, found, depth)) for i, value in enumerate(defaults)]
    key += [(name, _identify_value(value, found, depth)) for name, value in known.items()]
    names = code.co_varnames[: code.co_argcount]
    known.update(zip(names, args if owner is None else (owner, *args), strict=False))
    known.update(kwargs or {})
    for is_global, name, path, whole in _find_names(code):
        value = known.get(name, code_of.__globals__.get(name, MISSING) if is_global else MISSING)
        key += _identify_path(value, name, path, whole, found, depth)
    return code, id(code_of.__globals__), tuple(key)


def _identify_path(
    value: Any, name: str, path: tuple[tuple[str, Any], ...], whole: bool, found: _Identity, depth: int
) -> Iterator[tuple[str, Any]]:
    """Yield (name, key) of a value that has a name, and of those that attributes and items of `path` lead to;
    `whole` if the items of the last one count."""
    for kind, part in path:
        if value is MISSING:
            return
        if kind == "attribute" and isinstance(value, dict) and part in _READS_OF_A_DICT:
            break
        yield name, _identify_value(value, found, depth)
        name = f"{name}.{part}" if kind == "attribute" else f"{name}[{part!r}]"
        value = _read_attribute(value, part) if kind == "attribute" else _read_item(value, part)
    if value is not MISSING:
        yield name, _identify_value(value, found, depth, whole=whole)


def _identify_value(value: Any, found: _Identity, depth: int, *, whole: bool = False) -> Any:
    """Return a key for a value that a step reads; if it is used as a `whole`, of what a container has."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object and value.nbytes <= _MAX_BYTES:
        content = np.ascontiguousarray(value).tobytes()
        return str(value.dtype), value.shape, xxhash.xxh3_128_digest(content)
    if depth < _MAX_DEPTH and _is_own_code(value, found):
        return _identify(value, found, depth + 1)
    if whole and isinstance(value, dict | list | tuple | set | frozenset) and len(value) <= _MAX_ITEMS:
        items = list(value.items()) if isinstance(value, dict) else list(value)
        return type(value), tuple(_identify_value(item, found, depth, whole=True) for item in items)
    found.objects.append(value)
    if isinstance(value, types.MethodType):  # each access makes another
        return id(value.__func__), id(value.__self__)
    return id(value)


def _is_own_code(value: Any, found: _Identity) -> bool:
    """Return whether a value is a function of no library, or calls one, that wasn't read yet."""
    if isinstance(value, functools.partial):
        return True
    value = _bind_call(value)
    owner = getattr(value, "__self__", None) if isinstance(value, types.MethodType) else None
    code_of = getattr(value, "__func__", value)
    if not isinstance(code_of, types.FunctionType) or (id(code_of), id(owner)) in found.read:
        return False
    return not is_of_library(code_of)


def _bind_call(value: Any) -> Any:
    """Return the method that a callable object runs: its own `__call__`, or `call`, as classes of Keras name
    it."""
    if isinstance(value, (types.FunctionType, types.MethodType, type)):
        return value
    kind: Any = type(value)
    base, name = _find_call(kind)
    method = base.__dict__.get(name)
    return types.MethodType(method, value) if isinstance(method, types.FunctionType) else value


@functools.lru_cache(maxsize=4096)
def _find_call(kind: type) -> tuple[type, str]:
    """Return the class of the function that objects of a class run when they are called, and its name. Each
    step of a loop asks for those of all layers."""
    places = [(base, name) for name in ("__call__", "call") for base in kind.__mro__]
    found = [(b, n) for b, n in places if isinstance(b.__dict__.get(n), types.FunctionType)]
    own = next((place for place in found if not is_of_library(place[0].__dict__[place[1]])), None)
    return own or (found[0] if found else (kind, "__call__"))


def is_of_library(function: types.FunctionType) -> bool:
    """Return whether a function is one of Python's, of an installed package's or of insitu's."""
    return _is_library_file(function.__code__.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_library_file(path: str) -> bool:
    return any(folder in path for folder in _LIBRARIES)


def _read_item(owner: Any, part: Any) -> Any:
    """Return an item of a container of Python, without running code of its owner's."""
    if isinstance(owner, dict):
        return dict.get(owner, part, MISSING)
    if isinstance(owner, list | tuple) and isinstance(part, int) and -len(owner) <= part < len(owner):
        return owner[part]
    return MISSING


def _read_attribute(owner: Any, name: str) -> Any:
    """Return an attribute without running code of its owner's: of a method or property the bound function;
    MISSING if that isn't possible."""
    own = getattr(owner, "__dict__", None)
    if isinstance(own, dict) and name in own:
        return own[name]
    for base in (owner if isinstance(owner, type) else type(owner)).__mro__:
        if name in vars(base):
            return _read_of_class(owner, name, vars(base)[name])
    return MISSING


def _read_of_class(owner: Any, name: str, found: Any) -> Any:
    if isinstance(found, types.MemberDescriptorType):  # of __slots__
        return getattr(owner, name, MISSING)
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(found, classmethod):
        return types.MethodType(found.__func__, owner if isinstance(owner, type) else type(owner))
    code_of = found.fget if isinstance(found, property) else found
    code_of = found.func if isinstance(found, functools.cached_property) else code_of
    if isinstance(code_of, types.FunctionType) and not isinstance(owner, type):
        return types.MethodType(code_of, owner)
    return MISSING if hasattr(type(found), "__get__") else found


def find_own_attributes(code: types.CodeType) -> list[str]:
    """Return the attributes of its own object that a method reads."""
    own = code.co_varnames[:1]
    return [path[0][1] for _, name, path, _ in _find_names(code) if (name,) == own and path]


@functools.lru_cache(maxsize=1024)
def _find_names(code: types.CodeType) -> tuple[tuple[bool, str, tuple[tuple[str, Any], ...], bool], ...]:
    """Return what a function reads of the world outside: (whether it may be a global, name, attributes and
    items behind it, whether the items of the last one count). Names, attributes and items that it also writes
    are left out: they change with each trace."""
    reads: dict[tuple[bool, str, tuple[tuple[str, Any], ...], bool], None] = {}
    # A local variable that is written is another value than the argument of this name.
    stored = {str(i.argval) for i in dis.get_instructions(code) if i.opname.startswith("STORE_FAST")}
    stored_attributes: set[tuple[str, Any]] = set()
    for each in _all_codes(code):
        instructions = list(dis.get_instructions(each))
        stored |= {str(i.argval) for i in instructions if i.opname in _STORES}
        stored_attributes |= {("attribute", i.argval) for i in instructions if i.opname == "STORE_ATTR"}
        writes_items = any(i.opname == "STORE_SUBSCR" for i in instructions)
        for index, instruction in enumerate(instructions):
            is_local = instruction.opname.startswith(_FAST)
            if each is not code if is_local else instruction.opname not in _ROOTS:
                continue
            is_pair = isinstance(instruction.argval, tuple)
            name = instruction.argval[-1] if is_pair else instruction.argval
            path = _find_path(instructions[index + 1 :], writes_items)
            reads[instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"), name, path, not writes_items] = None
    found = []
    for is_global, name, path, whole in reads:
        kept = tuple(itertools.takewhile(lambda part: part not in stored_attributes, path))
        if name not in stored:
            found.append((is_global, name, kept, whole and kept == path))
    return tuple(found)


def _find_path(following: list[dis.Instruction], writes_items: bool) -> tuple[tuple[str, Any], ...]:
    """Return the attributes and constant items that instructions read of the value before them."""
    path: list[tuple[str, Any]] = []
    place = 0
    while place < len(following):
        if following[place].opname in _ATTRIBUTES:
            path.append(("attribute", str(following[place].argval)))
            place += 1
        elif not writes_items and _is_item(following[place : place + 2]):
            path.append(("item", following[place].argval))
            place += 2
        else:
            break
    return tuple(path)


def _is_item(two: list[dis.Instruction]) -> bool:
    if len(two) < 2 or two[0].opname not in ("LOAD_CONST", "LOAD_SMALL_INT"):
        return False
    return two[1].opname == "BINARY_SUBSCR" or (two[1].opname == "BINARY_OP" and two[1].argrepr == "[]")


def _all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of those that are made in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _all_codes(constant)
