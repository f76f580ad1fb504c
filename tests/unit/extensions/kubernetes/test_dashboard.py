"""The dashboard of Grafana: it shows numbers that insitu serves, by labels that these have."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from prometheus_client import core

from insitu.cli.metrics import JobCollector
from insitu.extensions.kubernetes.objects import DASHBOARD, make_objects
from insitu.extensions.kubernetes.options import ClusterOptions

MADE: dict[str, Any] = json.loads(DASHBOARD.read_text())
TARGETS = [(panel["title"], target) for panel in MADE["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def served() -> dict[str, set[str]]:
    """The labels of all metrics, by name, as insitu serves them."""
    return {
        f"{family.name}_total" if isinstance(family, core.CounterMetricFamily) else family.name: {
            *family._labelnames
        }
        for family in JobCollector(list).collect()
    }


@pytest.mark.parametrize("title, target", TARGETS, ids=[title for title, _ in TARGETS])
def test_panels_show_metrics_and_labels_that_are_served(
    title: str, target: dict[str, str], served: dict[str, set[str]]
) -> None:
    expression = target["expr"]
    names = re.findall(r"\binsitu_\w+", expression)
    assert names and {*names} <= served.keys()
    labels = set.intersection(*(served[name] for name in names))
    assert {*re.findall(r"(\w+)=~", expression)} <= labels
    kept = re.findall(r"\bby \(([^)]*)\)", expression)
    shown = {label.strip() for each in kept for label in each.split(",")} if kept else labels
    assert shown <= labels
    assert {*re.findall(r"{{(\w+)}}", target["legendFormat"])} <= shown
    for name in names:  # a counter begins again with each process, so its rate alone means something
        assert name.endswith("_total") is bool(re.search(rf"rate\({name}\b", expression))


def test_each_metric_is_shown(served: dict[str, set[str]]) -> None:
    shown = {name for _, target in TARGETS for name in re.findall(r"\binsitu_\w+", target["expr"])}
    assert shown == served.keys()


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = MADE["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len({*taken}) == len(taken) and max(x for x, _ in taken) < 24


def test_variables_are_defined_and_their_metrics_served(served: dict[str, set[str]]) -> None:
    variables = {each["name"]: each for each in MADE["templating"]["list"]}
    used = {*re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())} - {"__rate_interval"}
    assert used == variables.keys()
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables["job"]["query"]["query"])
    assert found is not None and found[2] in served[found[1]]


def test_a_monitored_cluster_has_it_and_keeps_the_label_job() -> None:
    made = {each["kind"]: each for each in make_objects(ClusterOptions(monitor=True))}
    assert made["ConfigMap"]["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(made["ConfigMap"]["data"]["dashboard.json"]) == MADE
    (endpoint,) = made["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["honorLabels"] is True
    assert "ConfigMap" not in {each["kind"] for each in make_objects(ClusterOptions())}
