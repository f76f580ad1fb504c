"""Users' input to start a job or an import, checked field by field."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from insitu.base.errors import InputError, InsituError
from insitu.base.spec import NO_CACHE
from insitu.options import Declared, ImportOptions, JobOptions, Option, list_given, options_at, show_value

_Form = TypeVar("_Form", bound=BaseModel)
_Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]


def _with_options(declaration: type[Declared]) -> Callable[[type[_Form]], type[_Form]]:
    """Return what adds to a form the options that the REST interface takes."""
    fields: dict[str, Any] = {each.name: _make_field(each) for each in options_at(declaration, "rest")}
    return lambda form: create_model(form.__name__, __base__=form, __doc__=form.__doc__, **fields)


def _make_field(declared: Option) -> tuple[Any, Any]:
    """Return the type of a field, and its default with what describes it."""
    kind: Any = declared.kind
    if declared.choices:
        kind = Literal[declared.offered]
    elif kind in (int, float):
        low = {"gt" if declared.above else "ge": declared.least} if math.isfinite(declared.least) else {}
        high = {"le": declared.most} if math.isfinite(declared.most) else {}
        kind = Annotated[kind, Field(**low, **high, **({"allow_inf_nan": False} if kind is float else {}))]
    elif kind is not bool:
        kind = Annotated[_Text, Field(min_length=1)]
    if declared.words:
        kind |= Literal[tuple(declared.words)]
    if declared.many:
        kind = Annotated[list[kind], Field(max_length=1000)]
    default = declared.write(declared.default)
    text = f" By default: {declared.default_text}." if declared.default_text else ""
    return kind if default is not None else kind | None, Field(default, description=declared.help + text)


def _read_options(form: BaseModel, declaration: type[Declared]) -> dict[str, Any]:
    """Return the values of the options. Raises InputError."""
    return {each.name: each.read(getattr(form, each.name)) for each in options_at(declaration, "rest")}


@_with_options(JobOptions)
class StartForm(BaseModel):
    """A job to start: the options of `insitu start`."""

    model_config = ConfigDict(extra="forbid")

    cache: _Text = Field(NO_CACHE, description="The cache to train on; - for none.")
    job_dir: Annotated[_Text, Field(min_length=1)] | None = Field(
        None, description="Folder or .zip with the script, on the server's machine."
    )
    upload: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = Field(
        None, description="A .zip that was sent to /api/v1/uploads, in place of job_dir."
    )
    command: Annotated[list[_Text], Field(min_length=1, max_length=1000)] = Field(
        description="JOB_CMD and its arguments.", examples=[["train.py", "--epochs", "3"]]
    )

    def to_options(self, job_dir: Path) -> JobOptions:
        """Return what `insitu start` would be given. Raises InputError."""
        return JobOptions(self.cache, job_dir, tuple(self.command), **_read_options(self, JobOptions))


@_with_options(ImportOptions)
class ImportForm(BaseModel):
    """A cache to import: the options of `insitu import`."""

    model_config = ConfigDict(extra="forbid")

    cache: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^-\x00][^\x00]*$")]
    sources: Annotated[list[_Text], Field(max_length=1000)] = Field(
        default_factory=list, description="Files, folders or globs on the server's machine."
    )
    upload: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = Field(
        None, description="A file that was sent to /api/v1/uploads, in place of sources."
    )

    def to_options(self) -> ImportOptions:
        """Return what `insitu import` would be given, without the sources. Raises InputError."""
        return ImportOptions(self.cache, (), **_read_options(self, ImportOptions))


class ScaleForm(BaseModel):
    """A number of workers."""

    model_config = ConfigDict(extra="forbid")

    workers: Annotated[int, Field(ge=1, le=100_000)]


class ResumeForm(BaseModel):
    """Variables that a resumed job takes from its caller's shell."""

    model_config = ConfigDict(extra="forbid")

    env: dict[_Text, _Text | None] = Field(
        default_factory=dict,
        max_length=100,
        description="Secrets that the job was started with, by name; null: it continues without.",
    )


class LinkForm(BaseModel):
    """A link to make."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["view", "operate"] = "view"


def read_fields(declaration: type[Declared], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an HTML form has sent as one of the forms above takes it: empty fields are left out."""
    declared = {each.name: each for each in options_at(declaration, "form")}
    values: dict[str, Any] = {}
    for name, text in fields.items():
        if not isinstance(text, str) or not text.strip():
            continue
        of, _, key = name.partition(".")
        if key and of in declared and key in declared[of].keys:
            values.setdefault(of, []).extend(f"{key}={word}" for word in split_command(text))
        elif name == "command":
            values[name] = split_command(text)
        elif name == "sources":
            values[name] = [line.strip() for line in text.splitlines() if line.strip()]
        elif name not in declared:
            values[name] = text.strip()
        else:
            values[name] = _read_field(declared[name], text.strip())
    return values


def _read_field(declared: Option, text: str) -> Any:
    if declared.many:
        return split_command(text.replace(",", " ") if declared.name == "nodes" else text)
    return text == "on" if declared.default is False else text


def split_command(text: str) -> list[str]:
    """Return words as a shell splits them. Raises InputError for a quote without its end."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"A quote has no end. Received: {text}") from error


def _make_form(declaration: type[Declared]) -> type[BaseModel]:
    fields: dict[str, Any] = {each.name: _make_field(each) for each in options_at(declaration, "form")}
    return create_model(declaration.__name__, __config__=ConfigDict(extra="forbid"), **fields)


def make_request(declaration: type[Declared], fields: Mapping[str, Any]) -> Declared:
    """Return the options that an HTML form has sent. Raises InputError, ValidationError."""
    form = _make_form(declaration).model_validate(read_fields(declaration, fields))
    options = options_at(declaration, "form")
    return declaration(**{each.name: each.read(getattr(form, each.name)) for each in options})


def place_problems(error: InsituError | ValidationError, options: Sequence[Option]) -> dict[str, str]:
    """Return what is wrong with each field: that of the flag that an error names first; "" if it names
    none."""
    if isinstance(error, ValidationError):
        return {str(each["loc"][0]): each["msg"] for each in error.errors()}
    found = {each.name: re.search(rf"{each.flag}(?![-\w])", error.message) for each in options}
    first = min(((at.start(), name) for name, at in found.items() if at), default=(0, ""))
    return {first[1]: error.message}


def write_fields(given: Declared) -> dict[str, str]:
    """Return what fields of a form hold for options; those that have their default stay empty."""
    written = dict[str, str]()
    for each, value in list_given(given, "form"):
        for key in each.keys:
            words = [text.partition("=")[2] for text in value if text.partition("=")[0] == key]
            written |= {f"{each.name}.{key}": shlex.join(words)} if words else {}
        if not each.keys:
            written[each.name] = _write_field(each, value)
    return written


def _write_field(declared: Option, value: Any) -> str:
    written = declared.write(value)
    if isinstance(written, bool):
        return "on" if written else "off"
    return shlex.join(written) if declared.many else show_value(written)
