"""Typed values out of JSON that another process has sent, checked by msgspec.

It takes about 30 ms to load, so what `insitu ps`, `insitu start` and tasks load does without.
"""

from __future__ import annotations

import re
import reprlib
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeVar, overload

from msgspec import Meta, ValidationError
from msgspec import convert as _convert

from insitu.base.errors import InsituError

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Port = Annotated[int, Meta(ge=0, lt=1 << 16)]
Seconds = Annotated[float, Meta(gt=-1e15, lt=1e15)]
"""Neither NaN nor infinite."""
Text = Annotated[str, Meta(max_length=4096)]

T = TypeVar("T")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


@overload
def convert(name: str, value: Any, kind: type[T], error: type[InsituError]) -> T: ...
@overload
def convert(name: str, value: Any, kind: Any, error: type[InsituError]) -> Any: ...
def convert(name: str, value: Any, kind: Any, error: type[InsituError]) -> Any:
    """Return `value`, which `json.loads` has returned, as a `kind`: nothing is coerced but int to float.

    Raises `error`, which says the rule, the place below `name`, and what was received there. Fields that a
    dataclass doesn't have are ignored; a Struct may forbid them.
    """
    try:
        return _convert(value, kind)
    except (ValidationError, UnicodeEncodeError, RecursionError) as found:  # a surrogate, or too deep
        rule, _, place = str(found).rpartition(" - at `$")
        if not rule:
            rule, place = place, ""
        path = place.rstrip("`")
        received = reprlib.repr(_find(value, path))
        raise error(
            f"{name}{path:.100}: {rule[:1].lower()}{rule[1:200]}. Received: {received:.200}"
        ) from None


def convert_exactly(name: str, value: Any, kind: type[T], error: type[InsituError]) -> T:
    """Return a dataclass of which `value` has all fields and no others, as have the dataclasses in it.

    Raises as `convert`.
    """
    _check_fields(name, value, kind, error)
    found = convert(name, value, kind, error)
    _check_inner(name, value, found, error)
    return found


def _check_fields(name: str, value: Any, kind: Any, error: type[InsituError]) -> None:
    names = {field.name for field in fields(kind)}
    if not isinstance(value, dict) or value.keys() != names:
        received = repr(sorted(value)) if isinstance(value, dict) else reprlib.repr(value)
        raise error(f"{name} must have the fields {', '.join(sorted(names))}. Received: {received:.200}")


def _check_inner(name: str, value: Any, found: Any, error: type[InsituError]) -> None:
    for field in fields(found):
        given, made = value[field.name], getattr(found, field.name)
        for part, inner in zip(given, made, strict=True) if type(made) is tuple else [(given, made)]:
            if is_dataclass(inner):
                _check_fields(f"{name}.{field.name}", part, inner, error)
                _check_inner(f"{name}.{field.name}", part, inner, error)


def _find(value: Any, path: str) -> Any:
    """Return the part of `value` at a path of msgspec's, or a larger part around it."""
    try:
        for field, index in _STEP.findall(path.partition("[...]")[0]):
            value = value[field] if field else value[int(index)]
    except (LookupError, TypeError, ValueError):
        pass
    return value
