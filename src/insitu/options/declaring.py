"""Declare options once, for each interface that takes them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from insitu.base.errors import InputError
from insitu.base.plugins import list_plugins

Door = Literal["rest", "form"]
"""Interfaces that take options, beside the command line, which takes all of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Option:
    """An option as its dataclass declares it. Doors take its value, or what `words` or `parse` say."""

    #: Its effect, for users.
    help: str
    #: The value if it isn't given.
    default: Any
    #: Text for the default in help and forms; None: the value.
    default_text: str | None = None
    #: The names on the command line; empty: made from the field's name.
    flags: tuple[str, ...] = ()
    #: Placeholder of the value in help; None: the choices, or the type.
    metavar: str | None = None
    #: The least number.
    least: float = -math.inf
    #: The greatest number.
    most: float = math.inf
    #: Whether the least number is itself too low.
    above: bool = False
    #: Words that may be given in place of a number, with the values for which they stand.
    words: Mapping[str, int | None] = field(default_factory=dict)
    #: Makes a value of the text that stands for it at doors. None: they are the same.
    parse: Callable[[str], Any] | None = None
    #: Makes that text of a value.
    show: Callable[[Any], str] = str
    #: The label in a form; empty in a declaration: the help.
    label: str = ""
    #: Whether a form shows it at once, not only among further options.
    common: bool = False
    #: The doors that don't take it, and why.
    not_at: Mapping[Door, str] = field(default_factory=dict)
    #: The name of the field, and of what is given in JSON and in forms.
    name: str = ""
    #: The type of a value at doors: bool, int, float, str or Path.
    kind: type = str
    #: Whether it may be given several times.
    many: bool = False
    #: The texts that it may be; empty: all.
    choices: tuple[str, ...] = ()
    #: What it may say, if it is KEY=VALUE: the keys, with their labels in a form.
    keys: Mapping[str, str] = field(default_factory=dict)
    #: The kind of plug-ins whose names it may be too, such as SOURCES; empty: none.
    plugins: str = ""

    def read(self, given: Any) -> Any:
        """Return the value for what a door was given. Raises InputError."""
        if self.many:
            return tuple(given or ())
        if isinstance(given, str) and self.words:
            return self._read_word(given)
        return given if self.parse is None or given is None else self.parse(given)

    def _read_word(self, given: str) -> int | None:
        if given in self.words:
            return self.words[given]
        if given.isascii() and given.isdigit() and self.least <= int(given):  # `check` looks at the most
            return int(given)
        raise InputError(
            f"{self.flag} must be {', '.join(self.words)}, or a number, at least {self.least:g}. "
            f"Received: {given}"
        )

    def write(self, value: Any) -> Any:
        """Return what a door would be given for a value."""
        if self.many:
            return list(value)
        if self.parse is not None and value is not None:
            return self.show(value)
        return next((word for word, stands_for in self.words.items() if value == stands_for), value)

    def format(self, value: Any) -> list[str]:
        """Return the arguments of the command line that give a value."""
        if isinstance(value, bool):
            return [self.flag if value else f"--no-{self.flag[2:]}"]
        parts = list[str]()
        for each in self.write(value) if self.many else [self.write(value)]:
            text = show_value(each)
            parts += [f"{self.flag}={text}"] if text.startswith("-") else [self.flag, text]
        return parts

    def check(self, value: Any, error: type[InputError]) -> None:
        """Raise `error` for a value that the option can't have."""
        if value is None or value == self.default or value in self.words.values():
            return
        rule = ""
        if self.choices and value not in self.choices and value not in self.offered:
            *others, last = filter(None, self.offered)
            rule = f"{', '.join(others)} or {last}"
        elif isinstance(value, int | float):
            rule = self._find_broken_bound(value)
        if rule:
            raise error(f"{self.flag} must be {rule}. Received: {value}")

    def _find_broken_bound(self, value: float) -> str:
        if not math.isfinite(value) or (self.above and value <= self.least):
            return "positive and finite" if self.above else "finite"
        if value < self.least:
            return f"at least {self.least:.15g}"
        return f"at most {self.most:.15g}" if value > self.most else ""

    @property
    def offered(self) -> tuple[str, ...]:
        """The texts that a form offers: choices, and names of plug-ins."""
        return (*self.choices, *(list_plugins(self.plugins) if self.plugins else ()))

    @property
    def flag(self) -> str:
        """The name on the command line by which errors call it."""
        return self.flags[0] if self.flags else f"--{self.name.replace('_', '-')}"

    @property
    def hint(self) -> str:
        """Text for the default in forms."""
        default = "" if self.default in (None, (), "") else show_value(self.write(self.default))
        return self.default_text or default


def option(default: Any, help: str, **declared: Any) -> Any:
    """Return the field of a dataclass that declares an option. `declared`: fields of `Option`."""
    return field(default=default, metadata={"option": Option(default=default, help=help, **declared)})


def command_line_only(why: str) -> dict[Door, str]:
    """Return that no other door takes an option, and why."""
    return dict.fromkeys(get_args(Door), why)


class Declared:
    """The base of a dataclass that declares options. A value that an option can't have is refused.

    Types of fields are read as they are, so its module doesn't import `annotations` from `__future__`.
    """

    __slots__ = ()
    error: ClassVar[type[InputError]] = InputError

    def __post_init__(self) -> None:
        for each in options_of(type(self)):
            each.check(getattr(self, each.name), self.error)


_found: dict[type[Declared], tuple[Option, ...]] = {}


def options_of(declaration: type[Declared]) -> tuple[Option, ...]:
    """Return the options that a dataclass declares, in the order of the help."""
    if declaration not in _found:
        declared = [f for f in fields(declaration) if "option" in f.metadata]  # type: ignore[arg-type]
        _found[declaration] = tuple(_complete(f.metadata["option"], f.name, f.type) for f in declared)
    return _found[declaration]


def _complete(declared: Option, name: str, hint: Any) -> Option:
    """Return the option with what the name and the type of its field say."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    (kind,) = (part for part in parts if part is not NoneType)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    many = get_origin(kind) is tuple and declared.parse is None
    if get_origin(kind) is not None:
        kind = str
    parse = Path if kind is Path else declared.parse
    label = declared.label or declared.help.rstrip(".")
    return replace(declared, name=name, kind=kind, many=many, choices=choices, parse=parse, label=label)


def options_at(declaration: type[Declared], door: Door) -> list[Option]:
    """Return the options that are given at a door."""
    return [each for each in options_of(declaration) if door not in each.not_at]


def show_value(value: object) -> str:
    """Return the text of a value at a door: whole numbers of seconds without `.0`."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def list_given(given: Declared, door: Door | None = None) -> list[tuple[Option, Any]]:
    """Return the options that differ from their defaults, with their values. `door`: those given there."""
    options = options_of(type(given)) if door is None else options_at(type(given), door)
    values = ((each, getattr(given, each.name)) for each in options)
    return [(each, value) for each, value in values if value != each.default]


def format_options(given: Declared) -> list[str]:
    """Return the arguments of the command line that give the same; what has its default is left out."""
    return [part for each, value in list_given(given) for part in each.format(value)]
