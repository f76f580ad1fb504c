"""Conditions of `--where`, such as `age > 18 and city in ["Rome", "Oslo"]`, as expressions of Arrow.

The language is a part of Python's: names of columns, numbers, texts, `True`, `False`, `None`, comparisons,
`in`, `is None`, `and`, `or`, `not` and `+ - * /`. A column whose name isn't a word is `col("Kunde Nr.")`.
Nothing is evaluated by Python.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from insitu.base.errors import InputError

_EXAMPLE = """--where takes a condition of columns, such as 'age > 18 and city != "Rome"'"""
_COMPARISONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}
_SUMS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


class Condition:
    """A condition of rows. A row of which it isn't known, since a value is missing, doesn't fulfil it."""

    def __init__(self, text: str) -> None:
        """Raises InputError for what is no condition."""
        self._text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise InputError(f"{_EXAMPLE}. Received: {text!r} ({error})") from None
        #: The columns that it names.
        self.columns: frozenset[str] = frozenset(_list_columns(self._tree))
        if not self.columns:
            raise InputError(f"{_EXAMPLE}. Received: {text!r}, which names no column")
        self._expressions: dict[Any, Any] = {}

    def check(self, columns: Collection[str]) -> None:
        """Raise InputError if it names other columns than these."""
        unknown = sorted(self.columns - set(columns))
        if unknown:
            raise InputError(
                f"--where names columns of the sources: {', '.join(columns)}. Received: "
                f"{', '.join(unknown)}. "
                f'A name that isn\'t a word is written as col("{next(iter(columns), "a b")}")'
            )

    def filter(self, table: Any) -> Any:
        """Return the rows of a table that fulfil it. Raises InputError if types don't fit."""
        schema = table.schema
        try:
            if schema not in self._expressions:
                self._expressions = {schema: self._build(self._tree, schema)}
            return table.filter(self._expressions[schema])
        except (pa.ArrowException, TypeError) as error:
            raise InputError(
                f"--where compares values of one type. Received: {self._text!r} for "
                f"{', '.join(f'{each.name} {each.type}' for each in schema if each.name in self.columns)} "
                f"({str(error).splitlines()[0]:.200})"
            ) from None

    def _build(self, node: ast.AST, schema: Any) -> Any:
        build = functools.partial(self._build, schema=schema)
        if (name := _name_of(node)) is not None:
            is_encoded = pa.types.is_dictionary(schema.field(name).type)
            return pc.field(name).cast(_type_of(node, schema)) if is_encoded else pc.field(name)
        match node:
            case ast.Constant(value=float() as value):
                return _scalar(value)
            case ast.Constant(value=bool() | int() | str() | None):
                return pc.scalar(node.value)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return _scalar(-value) if isinstance(value, float) else pc.scalar(-value)
            case ast.UnaryOp(op=ast.Not()):
                return ~build(node.operand)
            case ast.BoolOp():
                parts = [build(value) for value in node.values]
                return functools.reduce(
                    (lambda a, b: a & b) if isinstance(node.op, ast.And) else (lambda a, b: a | b), parts
                )
            case ast.BinOp() if type(node.op) in _SUMS:
                wholes = [_whole_of(side) for side in (node.left, node.right)]
                sides = [
                    build(side) if whole is None else _scalar(whole)
                    for side, whole in zip((node.left, node.right), wholes, strict=True)
                ]
                return _SUMS[type(node.op)](*sides)
            case ast.Compare():
                sides = [node.left, *node.comparators]
                pairs = zip(sides, node.ops, sides[1:], strict=False)
                return functools.reduce(
                    lambda a, b: a & b, [self._compare(left, op, right, schema) for left, op, right in pairs]
                )
        raise InputError(f"{_EXAMPLE}. Received: {self._text!r}, with {ast.unparse(node)!r}")

    def _compare(self, left: ast.AST, op: ast.cmpop, right: ast.AST, schema: Any) -> Any:
        kind = _type_of(left, schema) or _type_of(right, schema)
        if isinstance(op, ast.Is | ast.IsNot):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise InputError(f"{_EXAMPLE}. Received: {self._text!r}; `is` is for None")
            missing = self._build(left, schema).is_null(nan_is_null=True)
            return missing if isinstance(op, ast.Is) else ~missing
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple | ast.Set):
                raise InputError(f"{_EXAMPLE}. Received: {self._text!r}; `in` takes a list, such as [1, 2]")
            values = pa.array([_value_of(each, self._text) for each in right.elts])
            among = (side := self._build(left, schema)).isin(values if kind is None else values.cast(kind))
            if not values.null_count:  # of a missing value it isn't known
                unknown: Any = pa.scalar(None, pa.bool_())
                among = pc.if_else(side.is_null(), unknown, among)
            return among if isinstance(op, ast.In) else ~among
        return _COMPARISONS[type(op)](self._side(left, kind, schema), self._side(right, kind, schema))

    def _side(self, node: ast.AST, kind: Any, schema: Any) -> Any:
        """Return a side of a comparison: a text beside a time is one, too, and a number beside uint64."""
        whole = _whole_of(node)
        if kind == pa.uint64() and whole is not None and whole >= 0:
            return pc.scalar(pa.scalar(whole, kind))  # of another type it would make int64 of the other
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and kind is not None and pa.types.is_temporal(kind):
            return pc.scalar(pa.scalar(node.value).cast(kind))  # type: ignore[attr-defined]
        return self._build(node, schema)


def _whole_of(node: ast.AST) -> int | None:
    """Return a whole number; None for what is none."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _scalar(value: Any) -> Any:
    """Return a number that is calculated with in 64 bits: Arrow takes the narrowest type for others."""
    return pc.scalar(value).cast(pa.float64() if isinstance(value, float) else pa.int64())


def _list_columns(node: ast.AST) -> Iterator[str]:
    name = _name_of(node)
    if name is not None:
        yield name
        return
    for inner in ast.iter_child_nodes(node):
        yield from _list_columns(inner)


def _name_of(node: ast.AST) -> str | None:
    """Return the column that a node names: age, user.age or col("Kunde Nr."); None if it names none."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            before = _name_of(node.value)
            return None if before is None else f"{before}.{node.attr}"
        case ast.Call(func=ast.Name(id="col"), args=[ast.Constant(value=str() as name)], keywords=[]):
            return name
    return None


def _type_of(node: ast.AST, schema: Any) -> Any:
    """Return the type of a column's values; None for what is no column."""
    name = _name_of(node)
    kind = None if name is None else schema.field(name).type
    return kind.value_type if kind is not None and pa.types.is_dictionary(kind) else kind


def _value_of(node: ast.AST, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        raise InputError(f"{_EXAMPLE}. Received: {text!r}; a list has numbers or texts") from None
