"""Makes a Helm chart of a cluster. Pure, but for `write_chart`.

The templates are the cluster's objects, made from options that are marks. A mark becomes a value of the
chart, and lines that only an option adds become conditional.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.base._version import __version__
from insitu.base.errors import InputError
from insitu.extensions.kubernetes.objects import make_objects
from insitu.extensions.kubernetes.options import QUANTITY, ClusterOptions
from insitu.extensions.kubernetes.rendering import TOKEN_COMMAND, format_object
from insitu.options import options_of

_VALUES = {
    **{name: name for name in ("nodes", "gpus", "cpu", "memory", "storage", "image", "queue", "monitor")},
    "head_storage": "headStorage",
    "storage_class": "storageClass",
}
"""Options that are values of the chart, and their names there. The others are fixed in the templates."""
_OPTIONAL = ("gpus", "storage_class", "queue", "monitor")
"""Values that are objects or lines of their own, which are there unless the value is 0, "" or false."""
_QUANTITIES = ("cpu", "memory", "storage", "head_storage")
_NAMESPACE = "namespace"
_NOTES = f"""\
The secret with the cluster's token isn't in the chart. Unless it is there, make it:

  {TOKEN_COMMAND.format(namespace="{{ .Release.Namespace }}")}

Lower `nodes` only after this, which drains stores:

  insitu k8s scale --namespace {{{{ .Release.Namespace }}}} --nodes N
"""


def make_chart(options: ClusterOptions) -> dict[str, str]:
    """Return the texts of a chart's files, by path. `options` become the values. Raises InputError."""
    if options.namespace or options.create_namespace:
        flag = "--create-namespace" if options.create_namespace else f"--namespace {options.namespace}"
        raise InputError(
            f"A chart has no namespace: `helm install --namespace NS --create-namespace` names it. Received: "
            f"{flag} with --helm. Leave it out"
        )
    chart = {
        "apiVersion": "v2",
        "name": "insitu",
        "description": "A cluster of insitu: distributed Keras training beside the data's partitions",
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
        "kubeVersion": ">=1.33.0-0",
    }
    return {
        "Chart.yaml": format_object(chart),
        "values.yaml": _make_values(options),
        "values.schema.json": json.dumps(_make_schema(), indent=2) + "\n",
        "templates/NOTES.txt": _NOTES,
        **{f"templates/{name}": text for name, text in _make_templates(options).items()},
    }


def write_chart(folder: Path, files: Mapping[str, str]) -> None:
    """Write a chart into a new folder, whole or not at all. Raises InputError."""
    if folder.exists():
        raise InputError(
            f"--helm is a folder that isn't there yet. Received: {folder}. Remove it, or choose another"
        )
    try:
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.absolute().parent))
        try:
            for name, text in files.items():
                (made / name).parent.mkdir(exist_ok=True)
                (made / name).write_text(text)
            made.chmod(0o755)
            os.rename(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise InputError(
            f"--helm is a folder that can be made. Received: {folder}: {error.strerror}. Choose another"
        ) from None


def _make_values(options: ClusterOptions) -> str:
    helps = {each.name: each.help for each in options_of(ClusterOptions)}
    return "".join(
        f"# {helps[name]}\n{value}: {json.dumps(getattr(options, name))}\n" for name, value in _VALUES.items()
    )


def _make_schema() -> dict[str, Any]:
    """Return the schema by which Helm refuses values."""
    declared = {each.name: each for each in options_of(ClusterOptions)}
    properties: dict[str, Any] = {"global": {"type": "object"}}
    for name, value in _VALUES.items():
        kind = declared[name].kind
        if kind is bool:
            properties[value] = {"type": "boolean"}
        elif kind is int:
            least, most = declared[name].least, declared[name].most
            properties[value] = {"type": "integer", "minimum": least, "maximum": most}
        else:
            properties[value] = {"type": "string"}
        if name in _QUANTITIES:
            properties[value]["pattern"] = f"^{QUANTITY}$"
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _make_templates(options: ClusterOptions) -> dict[str, str]:
    """Return the templates of all objects, by the names of their files."""
    whole = _dump_marked(options, "")
    conditions = {name: [""] * len(lines) for name, lines in whole.items()}
    for option in _OPTIONAL:
        without = _dump_marked(options, option)
        for name, lines in whole.items():
            rest = iter(without.get(name, ()))
            line_of_both = next(rest, None)
            for number, line in enumerate(lines):
                if line == line_of_both:
                    line_of_both = next(rest, None)
                else:
                    conditions[name][number] = option
    return {name: _join(lines, conditions[name]) for name, lines in whole.items()}


def _dump_marked(options: ClusterOptions, without: str) -> dict[str, list[str]]:
    """Return the lines of all objects, by the names of their files, with marks in the place of values."""
    marked = copy.copy(options)
    for name in (*_VALUES, _NAMESPACE):
        # Marks aren't values that options accept.
        object.__setattr__(marked, name, "" if name == without else _mark(name))
    return {
        f"{each['kind'].lower()}-{each['metadata']['name']}.yaml": format_object(each).splitlines()
        for each in make_objects(marked)
    }


def _mark(name: str) -> str:
    return f"INSITU-{name}-MARK"


def _join(lines: Sequence[str], conditions: Sequence[str]) -> str:
    text = []
    for option, group in itertools.groupby(zip(conditions, lines, strict=True), key=lambda pair: pair[0]):
        filled = [_fill(line) for _, line in group]
        text += [f"{{{{- if .Values.{_VALUES[option]} }}}}", *filled, "{{- end }}"] if option else filled
    return "\n".join(text) + "\n"


def _fill(line: str) -> str:
    """Return a line of a template, with values in the place of marks."""
    line = line.replace("{{", '{{ "{{" }}')  # what Grafana fills in
    for name, value in _VALUES.items():
        shown = f".Values.{value}" if name == "nodes" else f".Values.{value} | quote"
        line = line.replace(_mark(name), f"{{{{ {shown} }}}}")
    return line.replace(_mark(_NAMESPACE), "{{ .Release.Namespace | quote }}")
