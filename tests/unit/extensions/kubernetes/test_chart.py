"""The Helm chart: filled in as Helm does, it is what `insitu k8s render` prints."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from insitu.base._version import __version__
from insitu.base.errors import InputError
from insitu.extensions.kubernetes.chart import make_chart, write_chart
from insitu.extensions.kubernetes.objects import make_objects
from insitu.extensions.kubernetes.options import ClusterOptions

OPTIONS = {
    "nodes": "nodes",
    "gpus": "gpus",
    "cpu": "cpu",
    "memory": "memory",
    "storage": "storage",
    "headStorage": "head_storage",
    "storageClass": "storage_class",
    "image": "image",
    "queue": "queue",
    "monitor": "monitor",
}
NAMESPACE = "team"
OPTIONAL: dict[str, tuple[Any, Any]] = {
    "gpus": (0, 2),
    "storage_class": ("", "fast"),
    "queue": ("", "research"),
    "monitor": (False, True),
}


def fill(template: str, values: dict[str, Any]) -> str:
    """Fill a template in: the part of Helm's language that charts of insitu need. The rest is refused."""
    lines, shown = [], True
    for line in template.splitlines():
        if found := re.fullmatch(r"\{\{- if \.Values\.(\w+) \}\}", line):
            assert shown is True
            shown = bool(values[found[1]])
        elif line == "{{- end }}":
            shown = True
        elif shown:
            lines.append(re.sub(r"\{\{ (.*?) \}\}", lambda found: evaluate(found[1], values), line))
    return "\n".join(lines) + "\n"


def evaluate(expression: str, values: dict[str, Any]) -> str:
    if expression == '"{{"':
        return "{{"
    name, *pipe = expression.split(" | ")
    value = NAMESPACE if name == ".Release.Namespace" else values[name.removeprefix(".Values.")]
    assert pipe in ([], ["quote"])
    return json.dumps(str(value)) if pipe else str(value)


def install(chart: dict[str, str], **changed: Any) -> dict[tuple[str, str], Any]:
    """Return the objects of a chart with some values, by kind and name."""
    values = yaml.safe_load(chart["values.yaml"]) | changed
    made = [
        yaml.safe_load(fill(text, values))
        for path, text in chart.items()
        if path.startswith("templates/") and path.endswith(".yaml")
    ]
    return {(each["kind"], each["metadata"]["name"]): each for each in made if each is not None}


def render(options: ClusterOptions) -> dict[tuple[str, str], Any]:
    made = make_objects(dataclasses.replace(options, namespace=NAMESPACE))
    return {(each["kind"], each["metadata"]["name"]): each for each in made}


@pytest.fixture(scope="module")
def chart() -> dict[str, str]:
    """The chart without options."""
    return make_chart(ClusterOptions())


@pytest.mark.parametrize("chosen", [*itertools.product((0, 1), repeat=len(OPTIONAL))], ids=str)
def test_with_any_values_it_is_what_render_prints(chosen: tuple[int, ...], chart: dict[str, str]) -> None:
    optional = {name: pair[k] for (name, pair), k in zip(OPTIONAL.items(), chosen, strict=True)}
    options = ClusterOptions(
        nodes=5, cpu="500m", memory="3Gi", storage="7Gi", head_storage="1Gi", image="a/b:1", **optional
    )
    values = {value: getattr(options, name) for value, name in OPTIONS.items()}
    assert install(chart, **values) == render(options)


def test_options_are_its_values_or_fixed_in_it() -> None:
    options = ClusterOptions(nodes=3, queue="q", monitor=True, page_url="https://insitu.example.com")
    assert install(make_chart(options)) == render(options)


def test_values_have_a_schema_that_takes_what_options_take(chart: dict[str, str]) -> None:
    schema, values = json.loads(chart["values.schema.json"]), yaml.safe_load(chart["values.yaml"])
    assert values.keys() == OPTIONS.keys() == schema["properties"].keys() - {"global"}
    assert schema["properties"]["nodes"] == {"type": "integer", "minimum": 1, "maximum": 1000}
    pattern = schema["properties"]["memory"]["pattern"]
    assert re.search(pattern, "1.5Gi") and not re.search(pattern, "much") and not re.search(pattern, "1Gi ")
    assert schema["additionalProperties"] is False


def test_it_says_what_it_is_and_how_its_secret_is_made(chart: dict[str, str]) -> None:
    assert yaml.safe_load(chart["Chart.yaml"])["version"] == __version__
    command = "kubectl --namespace {{ .Release.Namespace }} create secret generic insitu-token"
    assert command in chart["templates/NOTES.txt"]
    assert not any("kind: Secret" in text for text in chart.values())
    assert not any("INSITU-" in text for text in chart.values())


@pytest.mark.parametrize("given", [{"namespace": "team"}, {"create_namespace": True}])
def test_a_chart_has_no_namespace(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="--namespace NS --create-namespace` names it"):
        make_chart(ClusterOptions(**given))


def test_a_folder_is_made_whole_or_not_at_all(tmp_path: Path, chart: dict[str, str]) -> None:
    write_chart(tmp_path / "chart", chart)
    written = {
        str(each.relative_to(tmp_path / "chart")): each.read_text()
        for each in (tmp_path / "chart").rglob("*")
        if each.is_file()
    }
    assert written == chart
    with pytest.raises(InputError, match="Remove it, or choose another"):
        write_chart(tmp_path / "chart", chart)
    with pytest.raises(InputError, match="No such file"):
        write_chart(tmp_path / "none" / "chart", chart)
    with pytest.raises(InputError, match="a folder that can be made"):
        write_chart(tmp_path / "half", {"a": "", "a/b": ""})
    assert [each.name for each in tmp_path.iterdir()] == ["chart"]
