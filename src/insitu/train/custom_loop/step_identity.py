"""Tells whether a step is the one that was compiled: the same code over the same objects and plain values.

A compiled step keeps what it has read of Python while it was traced. Without compilation, as TensorFlow runs
a step outside of `tf.function`, each call reads it again. So what a step's code names is a part of its
identity: globals, enclosed variables, defaults and attributes, also those of functions that it names, but for
those of libraries.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_MAX_ITEMS = 64
"""Larger containers count as objects."""
_MAX_DEPTH = 8
"""Functions that call each other so deeply."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", f"{sysconfig.get_path('stdlib')}/", "/insitu/train/")
_ROOTS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FAST"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_STORES = frozenset({"STORE_GLOBAL", "STORE_NAME", "STORE_DEREF"})
_MISSING = object()


def identify_step(fn: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a key of what a call of `fn` runs, and the objects in it, which must live as long as the key."""
    objects: list[Any] = []
    return _identify(fn, objects, 0), tuple(objects)


def identify_constant(value: Any) -> Any:
    """Return a key for an argument: its value if that can't change, otherwise the identity of the object."""
    if isinstance(value, str | bytes | bool | int | None):
        return value
    return type(value), id(value)


def _identify(fn: Any, objects: list[Any], depth: int) -> Any:
    objects.append(fn)
    owner = _MISSING
    if isinstance(fn, types.MethodType):
        fn, owner = fn.__func__, fn.__self__
    elif isinstance(method := vars(type(fn)).get("__call__"), types.FunctionType):
        fn, owner = method, fn
    if not isinstance(fn, types.FunctionType):
        return id(fn)
    try:
        enclosed = {
            name: cell.cell_contents
            for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        }
    except ValueError:  # a name that has no value yet
        return id(fn)
    given = [*enclosed.values(), *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    key = [_identify_value(value, objects, depth) for value in given]
    if owner is not _MISSING:
        key.append(id(owner))
        objects.append(owner)
    for root, name, attributes, whole in _find_names(fn.__code__):
        value = _MISSING
        if root == "LOAD_FAST":
            value = owner if name == fn.__code__.co_varnames[0] else _MISSING
        elif name in enclosed:
            value = enclosed[name]
        elif root != "LOAD_DEREF":
            value = fn.__globals__.get(name, _MISSING)
        key.append(name)
        for attribute in (*attributes, ""):
            if value is _MISSING:
                break
            key.append(_identify_value(value, objects, depth, whole=whole and not attributes))
            value = _read_attribute(value, attribute) if attribute else _MISSING
    return fn.__code__, id(fn.__globals__), tuple(key)


def _identify_value(value: Any, objects: list[Any], depth: int, *, whole: bool = False) -> Any:
    """Return a key for a value that a step reads; if it is used as a `whole`, of what a container has."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, types.FunctionType | types.MethodType) and depth < _MAX_DEPTH:
        code = value.__code__
        is_known = any(value is known for known in objects)
        if not is_known and not any(folder in code.co_filename for folder in _LIBRARIES):
            return _identify(value, objects, depth + 1)
    if whole and isinstance(value, dict | list | tuple) and len(value) <= _MAX_ITEMS:
        items = list(value.items()) if isinstance(value, dict) else list(value)
        return type(value), tuple(_identify_value(item, objects, depth, whole=True) for item in items)
    objects.append(value)
    return id(value)


def _read_attribute(owner: Any, name: str) -> Any:
    """Return an attribute, without running code of its owner's; _MISSING if that isn't possible."""
    own = getattr(owner, "__dict__", None)
    if isinstance(own, dict) and name in own:
        return own[name]
    for base in (owner if isinstance(owner, type) else type(owner)).__mro__:
        if name in vars(base):
            found = vars(base)[name]
            if isinstance(found, types.MemberDescriptorType):  # of __slots__
                return getattr(owner, name, _MISSING)
            return found if isinstance(found, _PLAIN) else _MISSING
    return _MISSING


@functools.lru_cache(maxsize=1024)
def _find_names(code: types.CodeType) -> tuple[tuple[str, str, tuple[str, ...], bool], ...]:
    """Return what a function reads of the world outside: (how, name, attributes behind it, whether its items
    count). Names that it also writes are left out: they change with each trace."""
    reads: dict[tuple[str, str, tuple[str, ...], bool], None] = {}
    stored: set[str] = set()
    stored_attributes: set[str] = set()
    for each in _all_codes(code):
        instructions = list(dis.get_instructions(each))
        stored |= {str(i.argval) for i in instructions if i.opname in _STORES}
        stored_attributes |= {str(i.argval) for i in instructions if i.opname == "STORE_ATTR"}
        writes_items = any(i.opname == "STORE_SUBSCR" for i in instructions)
        for index, instruction in enumerate(instructions):
            is_own = each is code or instruction.opname != "LOAD_FAST"
            if instruction.opname not in _ROOTS or not is_own:
                continue
            attributes: list[str] = []
            for following in instructions[index + 1 :]:
                if following.opname not in _ATTRIBUTES:
                    break
                attributes.append(str(following.argval))
            reads[instruction.opname, str(instruction.argval), tuple(attributes), not writes_items] = None
    return tuple(
        (
            root,
            name,
            tuple(itertools.takewhile(lambda each: each not in stored_attributes, attributes)),
            whole,
        )
        for root, name, attributes, whole in reads
        if name not in stored
    )


def _all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of those that are made in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _all_codes(constant)
