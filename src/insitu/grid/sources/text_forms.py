"""Reads text as the dtype that `--dtype` gives: numbers with thousands, bools in words, times. Pure.

Arrow takes none of `1.234,50`, `yes` and `31.12.2020` for more than text.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from insitu.grid.sources.column_options import DTYPES

_BOOLS = (("yes", "no"), ("y", "n"), ("t", "f"), ("true", "false"), ("1", "0"))
_TRUE, _FALSE = (pa.array(words, pa.large_utf8()) for words in zip(*_BOOLS, strict=True))
_DAYS = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y.%m.%d", "%Y%m%d")
_SHORT_DAYS = ("%d.%m.%y", "%d/%m/%y", "%m/%d/%y")
_FORMS = tuple(day + time for time in ("", " %H:%M", " %H:%M:%S") for day in (*_DAYS, *_SHORT_DAYS))
"""Forms of times that are advised."""
_DIGITS = {"%Y": r"\d{4}", ".": r"\.", **{f"%{each}": r"\d{1,2}" for each in "dmHMS"}, "%y": r"\d{2}"}
_FEW_ROWS = 1000
_LONGEST = 40
"""Characters of a text that may be a number or a time."""
_WHOLE, _LEADING_ZERO = r"^[-+]?\d+$", r"^[-+]?0\d"


def type_of_dtype(dtype: str) -> Any:
    """Return Arrow's type to read text as for a dtype; text for the form of times."""
    if "%" in dtype:
        return pa.large_utf8()
    if dtype in ("timestamp", "date"):
        return pa.timestamp("us") if dtype == "timestamp" else pa.date32()
    if dtype in ("bool", "uint64"):
        return pa.from_numpy_dtype(np.dtype(dtype))
    return pa.float64() if dtype.startswith("float") else pa.int64()


def trim(texts: Any, null_values: list[str]) -> Any:
    """Return texts without space around them, and null for those that stand for no value."""
    trimmed = pc.utf8_trim_whitespace(texts)
    is_null = pc.is_in(trimmed, value_set=pa.array(null_values, trimmed.type))
    return pc.if_else(is_null, pa.scalar(None, trimmed.type), trimmed)


def read_texts(texts: Any, dtype: str, decimal: str) -> Any:
    """Return trimmed texts as values of `type_of_dtype`. `decimal`: the sign before decimals; the other one
    of `.` and `,` may group thousands. Raises ArrowInvalid if one doesn't fit."""
    kind = type_of_dtype(dtype)
    if "%" in dtype:
        return parse_times(texts, dtype, "us")
    if pa.types.is_temporal(kind):
        return texts.cast(kind)
    if dtype == "bool":
        words = pc.utf8_lower(texts)
        is_true = pc.is_in(words, value_set=_TRUE)
        _require(pc.or_(is_true, pc.is_in(words, value_set=_FALSE)), texts)
        return pc.if_else(pc.is_valid(texts), is_true, pa.scalar(None, pa.bool_()))
    group = "," if decimal == "." else "."
    is_float = pa.types.is_floating(kind)
    decimals, exponent = (r"\d*", r"([eE][-+]?\d+)?") if is_float else ("0*", "")
    whole = rf"(\d+|[1-9]\d{{0,2}}([{group}]\d{{3}})+)"
    alone = rf"|[{decimal}]\d+" if is_float else ""
    pattern = rf"^[-+]?({whole}([{decimal}]{decimals})?{alone}){exponent}$"
    _require(pc.match_substring_regex(texts, pattern), texts)
    plain = pc.replace_substring(pc.replace_substring_regex(texts, r"^\+", ""), group, "")
    plain = pc.replace_substring(plain, decimal, ".")
    return (plain if is_float else pc.replace_substring_regex(plain, r"\.0*$", "")).cast(kind)


def parse_times(texts: Any, form: str, unit: str) -> Any:
    """Return texts as times by a form of `strptime`. Raises ArrowInvalid if one doesn't fit.

    Arrow takes 31.02.2020 for 2 March, and 21 for the year 21. So times on the first three days of a month,
    and in such years, are written by the form again, and must have the numbers of their texts.
    """
    times = pc.strptime(texts, format=form, unit=unit, error_is_null=False)
    local, bare = times, form.removesuffix("%z")
    if bare != form:
        texts = pc.replace_substring_regex(texts, r"\s*([-+]\d\d:?\d\d|Z)$", "")
        local = pc.strptime(texts, format=bare, unit=unit, error_is_null=False)
    if not re.search("%[Zsz]", bare):  # Arrow can't write these
        is_doubtful = pc.or_(pc.less_equal(pc.day(local), 3), pc.less(pc.year(local), 1000))
        texts, local = texts.filter(is_doubtful), local.filter(is_doubtful)
        written = pc.strftime(local.cast(pa.timestamp("s")), format=bare)
        _require(pc.equal(_numbers_in(written), _numbers_in(texts)), texts)
    return times


def _numbers_in(texts: Any) -> Any:
    """Return the numbers in texts, those of two digits without a leading zero."""
    spaced = pc.utf8_trim(pc.replace_substring_regex(texts, r"\D+", " "), " ")
    return pc.replace_substring_regex(spaced.cast(pa.large_utf8()), r"\b0(\d)\b", r"\1")


def _require(fitting: Any, texts: Any) -> None:
    wrong = pc.index(pc.or_(fitting.fill_null(True), pc.is_null(texts)), False).as_py()
    if wrong >= 0:
        raise pa.ArrowInvalid(f"{texts[wrong].as_py()[:80]!r} doesn't fit")


def fits(texts: Any, dtype: str, decimal: str) -> bool:
    """Return whether all texts are values of a dtype."""
    try:
        require_fit(read_texts(texts, dtype, decimal), dtype)
    except pa.ArrowException:
        return False
    return True


def require_fit(values: Any, dtype: str) -> None:
    """Raise ArrowInvalid if values of `type_of_dtype` aren't all of the dtype."""
    if "%" in dtype and not pa.types.is_temporal(values.type):
        parse_times(values, dtype, "us")
    elif dtype in DTYPES and not pa.types.is_floating(values.type):
        values.cast(pa.from_numpy_dtype(np.dtype(dtype)))


def first_unfit(texts: Any, dtype: str, decimal: str) -> int | None:
    """Return the place of the first text that no value of a dtype is; None: all are."""
    if fits(texts, dtype, decimal):
        return None
    few, many = 0, len(texts)
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if fits(texts[:middle], dtype, decimal) else (few, middle)
    return few


def find_decimals(texts: Any, dtype: str, usual: str | None) -> list[str]:
    """Return the sign before decimals by which all texts are of a dtype, none if they aren't, both if they
    differ in meaning. `usual`: the sign that decides then, if it is known."""
    fitting = [sign for sign in ".," if fits(texts, dtype, sign)]
    if len(fitting) > 1 and usual:
        return [usual]
    if len(fitting) > 1 and read_texts(texts, dtype, ".").equals(read_texts(texts, dtype, ",")):
        return ["."]
    return fitting


def ask_decimal(texts: Any, dtype: str) -> str:
    """Return what is wrong with numbers whose sign may be before decimals or group thousands."""
    value = next(each for each in texts.drop_null().to_pylist() if "," in each or "." in each)
    signs = ".," if "," in value else ",."
    return (
        f"is given as {dtype}, and {value} may group thousands (--decimal {signs[0]}) or have decimals "
        f"(--decimal {signs[1]})"
    )


def describe_hint(name: str, texts: Any, null_values: list[str], usual: str | None) -> str:
    """Return the note on text that looks like other values; empty: it doesn't."""
    # The first rows of most texts are just text already.
    if not suggest_dtypes(trim(texts[:_FEW_ROWS], null_values), usual):
        return ""
    texts = trim(texts, null_values)
    fitting = suggest_dtypes(texts, usual)
    if not fitting:
        return ""
    options = " or ".join(f"--dtype {shlex.quote(f'{name}={dtype}')}" for dtype in fitting)
    made = {"bool": "bools"}.get(fitting[0], "times" if "%" in fitting[0] else "numbers")
    return f"{name}: text such as {texts.drop_null()[0]}; {options} makes {made} of it"


def suggest_dtypes(texts: Any, usual: str | None) -> list[str]:
    """Return the dtypes that make values of all texts: one, several forms of times if day and month may be
    either, or none if they are just text."""
    values = pc.unique(texts).drop_null()
    first = values[0].as_py() if len(values) else ""
    if len(first) > _LONGEST or not (re.search(r"\d", first) or len(values) <= len(_BOOLS)):
        return []
    if {*pc.utf8_lower(values).to_pylist()} in map(set, _BOOLS):
        return ["bool"]
    if not pc.any(pc.match_substring_regex(values, _LEADING_ZERO)).as_py():
        is_whole = pc.all(pc.match_substring_regex(values, _WHOLE)).as_py()
        for dtype in ("int64", "uint64", *(() if is_whole else ("float64",))):
            if len(values) and len(find_decimals(values, dtype, usual)) == 1:
                return [dtype]
    return suggest_times(values)


def suggest_times(texts: Any) -> list[str]:
    """Return the dtypes or forms of times by which all texts are times."""
    values = texts.drop_null()
    first = values[0].as_py() if len(values) else ""
    if first and fits(values, "timestamp", "."):
        return ["timestamp"]
    return [
        form
        for form in _FORMS
        if re.fullmatch(_pattern(form), first)
        and pc.all(pc.match_substring_regex(values, f"^{_pattern(form)}$")).as_py()
        and fits(values, form, ".")
    ]


def _pattern(form: str) -> str:
    return re.sub(r"%[a-zA-Z]|\.", lambda found: _DIGITS[found[0]], form)
