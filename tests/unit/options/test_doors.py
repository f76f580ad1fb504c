"""Each option that is declared arrives, whichever door it is given at."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from command_line import CliRunner
from job_runs import Insitu

pytest.importorskip("pydantic")

from insitu.base.errors import InsituError
from insitu.cli import data, jobs
from insitu.cli.remote import Head, send_job
from insitu.cluster import read_spec, submit
from insitu.cluster.client import submission
from insitu.cluster.job_files import read_environment
from insitu.options import (
    Declared,
    Door,
    ImportOptions,
    JobOptions,
    Option,
    format_options,
    options_at,
    options_of,
)
from insitu.ui.forms import ImportForm, StartForm, read_fields, write_fields

JOB = JobOptions("digits", Path("job"), ("train.py",))
IMPORT = ImportOptions("digits", ("a.npy",))
TEXTS = {
    "virtual_devices": "cpu:2",
    "env": "A_TOKEN",
    "nodes": "node-7",
    "split": "a=0.5,b=0.5",
    "images": "8x6x3",
}
"""Texts of options that take no other."""


def choose_value(option: Option) -> Any:
    """Return a value that isn't the default."""
    if option.name in TEXTS:
        text = TEXTS[option.name]
        return option.read([text] if option.many else text)
    if option.words:
        return next(value for value in option.words.values() if value != option.default)
    if option.choices:
        return option.choices[-1] if option.choices[-1] != option.default else option.choices[0]
    if option.kind is bool:
        return not option.default
    if option.kind in (int, float):
        return option.kind(min(7, option.most))
    if option.keys:
        return tuple(f"{key}=a" for key in option.keys)
    return ("a=1", "b=2") if option.many else option.kind("some")


def change(options: Any, option: Option) -> Any:
    """Return the options with another value of one of them."""
    return replace(options, **{option.name: choose_value(option)})


def by_name(options: tuple[Option, ...] | list[Option]) -> Any:
    return pytest.mark.parametrize("option", options, ids=lambda option: option.name)


@by_name(options_of(JobOptions))
def test_the_command_line_gives_options_to_a_job(option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[JobOptions] = []

    def start(options: JobOptions) -> JobOptions:
        given.append(options)
        raise InsituError("seen")

    monkeypatch.setattr(jobs, "read_live_cache", start)
    monkeypatch.setattr(jobs, "require_detach", lambda detach, as_json: None)
    expected = change(JOB, option)
    CliRunner().run(["start", *format_options(expected), "digits", "job", "train.py"])
    assert given == [expected]


@by_name([each for each in options_of(JobOptions) if each.name not in ("config", "as_json")])
def test_a_caller_elsewhere_gives_options_to_a_job(
    option: Option, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[JobOptions] = []
    sent: list[list[str]] = []

    def send(head: Head, options: JobOptions) -> int:
        given.append(options)
        return send_job(head, options)

    monkeypatch.setattr(Head, "run", lambda head, arguments, files: sent.append(arguments) or 0)
    monkeypatch.setattr(jobs, "send_job", send)
    expected = change(replace(JOB, job_dir=tmp_path), option)
    arguments = ["start", *format_options(expected), "digits", str(tmp_path), "train.py"]
    CliRunner().run(["--cluster", "h:1", *arguments])
    CliRunner().run(["--cluster", "h:1", *sent[0]])  # the head's side reads what is sent as well
    assert given == [expected, replace(expected, job_dir=Path(f"{tmp_path.stem}.zip"))]


@by_name(options_at(JobOptions, "rest"))
def test_a_request_gives_options_to_a_job(option: Option) -> None:
    expected = change(JOB, option)
    sent = {"cache": "digits", "command": ["train.py"], option.name: option.write(choose_value(option))}
    assert StartForm.model_validate_json(json.dumps(sent)).to_options(Path("job")) == expected


@by_name(options_at(JobOptions, "form"))
def test_the_form_gives_options_to_a_job(option: Option) -> None:
    expected = change(JOB, option)
    sent = {"cache": "digits", "command": "train.py"} | write_fields(expected)
    assert option.name in {name.partition(".")[0] for name in sent}
    assert StartForm.model_validate(read_fields(JobOptions, sent)).to_options(Path("job")) == expected


@by_name(options_at(JobOptions, "rest"))
def test_an_option_makes_another_job(option: Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Insitu(tmp_path)
    started.script("print('greeting')")
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    monkeypatch.setenv("A_TOKEN", "1")

    def start(options: JobOptions) -> Any:
        try:
            job = started.job(submit(started.paths, options))
        except InsituError as error:  # of this machine, or of other options
            return error.message
        spec = asdict(read_spec(job)) | {"job_id": "", "created": 0.0}
        return spec, read_environment(job)

    plain = replace(JOB, cache="data/train", job_dir=started.folder)
    assert start(change(plain, option)) != start(plain) == start(plain)


@by_name([each for each in options_of(ImportOptions) if each.name != "dry_run"])  # which imports nothing
def test_the_command_line_gives_options_to_an_import(option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[ImportOptions] = []
    monkeypatch.setattr(data, "find_address", lambda source, config: source)
    monkeypatch.setattr(
        "insitu.grid.run_import", lambda paths, options, **_: given.append(options) or [], raising=False
    )
    expected = change(IMPORT, option)
    done = CliRunner().run(["import", *format_options(expected), "digits", "a.npy"])
    assert done.exit_code == 0, (done.stdout, done.exception)
    assert given == [expected]


@by_name(options_at(ImportOptions, "rest"))
def test_a_request_gives_options_to_an_import(option: Option) -> None:
    sent = {"cache": "digits", "sources": ["a.npy"], option.name: option.write(choose_value(option))}
    given = ImportForm.model_validate_json(json.dumps(sent)).to_options()
    assert replace(given, sources=("a.npy",)) == change(IMPORT, option)


@by_name(options_at(ImportOptions, "form"))
def test_the_form_gives_options_to_an_import(option: Option) -> None:
    expected = change(IMPORT, option)
    sent = {"cache": "digits", "sources": "a.npy"} | write_fields(expected)
    given = ImportForm.model_validate(read_fields(ImportOptions, sent)).to_options()
    assert replace(given, sources=("a.npy",)) == expected


@pytest.mark.parametrize("declaration", [JobOptions, ImportOptions])
def test_a_door_that_lacks_an_option_says_why(declaration: type[Declared]) -> None:
    for option in options_of(declaration):
        assert option.help and all(why.endswith(".") for why in option.not_at.values())
        assert set(option.not_at) <= set(get_args(Door))
