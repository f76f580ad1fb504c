"""What HTML forms send."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from insitu.base.errors import InputError
from insitu.options import ImportOptions, JobOptions, format_options
from insitu.ui.forms import ImportForm, StartForm, read_fields, split_command, write_fields


def test_an_empty_field_has_the_default_of_the_command_line() -> None:
    sent = {"cache": "a", "job_dir": " job ", "command": "train.py", "workers": "", "seed": " ", "ps": "auto"}
    request = StartForm.model_validate(read_fields(JobOptions, sent)).to_options(Path("job"))
    assert request == JobOptions("a", Path("job"), ("train.py",), ps=None)


def test_a_box_that_is_checked_is_true() -> None:
    form = StartForm.model_validate(read_fields(JobOptions, {"command": "a", "job_dir": "b", "chief": "on"}))
    assert form.chief and not form.evaluator


def test_gpus_and_memory_are_those_of_the_command_line() -> None:
    sent = {
        "command": "a",
        "job_dir": "b",
        "gpus_per_worker": "2",
        "memory_limit": "512",
        "memory_per_worker": "900",
        "nodes": "n-1, n-2",
    }
    request = StartForm.model_validate(read_fields(JobOptions, sent)).to_options(Path("b"))
    assert (request.gpus_per_worker, request.settings.memory_limit, request.memory_per_worker) == (
        2,
        512,
        900,
    )
    assert request.nodes == ("n-1", "n-2")


def test_each_key_of_pods_has_a_field() -> None:
    sent = {"pod.queue": "research", "pod.toleration": "gpu spot:NoSchedule", "pod.env": "'MODE=a b'"}
    form = StartForm.model_validate(read_fields(JobOptions, {"command": "a", "job_dir": "b", **sent}))
    assert form.pod == ["queue=research", "toleration=gpu", "toleration=spot:NoSchedule", "env=MODE=a b"]
    assert write_fields(form.to_options(Path("b"))) == sent
    with pytest.raises(ValueError, match=r"pod\.nothing"):
        StartForm.model_validate(
            read_fields(JobOptions, {"command": "a", "job_dir": "b", "pod.nothing": "x"})
        )


def test_engines_of_plug_ins_are_offered() -> None:
    assert StartForm.model_validate({"command": ["a"], "job_dir": "b", "engine": "k8s"}).engine == "k8s"


def test_a_quote_without_its_end_is_named() -> None:
    with pytest.raises(InputError, match="quote"):
        split_command("train.py 'a")


@pytest.mark.parametrize(
    "bad",
    [
        {"workers": 0},
        {"workers": "two"},
        {"stall_timeout": float("nan")},
        {"command": []},
        {"command": ["a\0b"]},
        {"on_loss": "explode"},
        {"job_dir": ""},
        {"nodes": [""]},
        {"surprise": 1},
        {"upload": "../../etc"},
        {"seed": 2**63},
    ],
)
def test_values_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        StartForm.model_validate({"command": ["a"], "job_dir": "b"} | bad)


def test_options_of_an_import_stay_with_their_names() -> None:
    form = ImportForm(cache="a", sources=["x", "y"], key="--overwrite", label_from_filename=True, backups=1)
    assert format_options(form.to_options()) == [
        *("--backups", "1", "--key=--overwrite", "--label-from-filename")
    ]
    lines = read_fields(ImportOptions, {"sources": "/a\n\n /b \n"})
    assert lines == {"sources": ["/a", "/b"]}
