"""The commands of `insitu k8s`, as users see them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from command_line import CliRunner
from k8s_fake import FakeApi

from insitu.base.errors import ClusterError, InputError
from insitu.extensions.kubernetes import commands
from insitu.extensions.kubernetes.client import Client
from insitu.extensions.kubernetes.objects import make_objects
from insitu.extensions.kubernetes.options import ClusterOptions


@pytest.fixture(autouse=True)
def opened(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "open_client", lambda context, namespace: Client(api, namespace))


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().run(["k8s", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def test_objects_are_rendered_with_the_options() -> None:
    code, out, _ = run("render", "--nodes", "3", "--gpus", "1", "--namespace", "a")
    assert code == 0
    assert list(yaml.safe_load_all(out)) == make_objects(ClusterOptions(nodes=3, gpus=1, namespace="a"))


def test_a_chart_is_made_in_the_place_of_yaml(tmp_path: Path) -> None:
    code, out, errors = run("render", "--nodes", "3", "--helm", str(tmp_path / "chart"))
    assert (code, out) == (0, "") and "values.yaml has the options" in errors
    assert yaml.safe_load((tmp_path / "chart" / "values.yaml").read_text())["nodes"] == 3


def test_a_cluster_comes_up_says_what_it_waits_for_and_how_to_go_there(api: FakeApi) -> None:
    api.after = lambda method, path: api.make_pods() if path.endswith("store") else None
    code, out, errors = run("up", "--nodes", "2")
    assert code == 0 and out == ""
    assert "2 stores and the head are applied to team." in errors and "store-1: ready" in errors
    assert "kubectl --namespace team exec head-0 -c head -- insitu nodes" in errors
    assert "insitu-token" not in errors


def test_a_dry_run_says_what_would_change_and_changes_nothing(api: FakeApi) -> None:
    code, out, _ = run("up", "--nodes", "2", "--dry-run")
    assert code == 0 and "StatefulSet store: new\n" in out and not api.changes
    assert run("up", "--no-wait")[0] == 0
    before = [*api.changes]
    code, out, _ = run("up", "--nodes", "3", "--dry-run")
    assert code == 0 and "StatefulSet store: spec.replicas: 1 -> 3\n" in out and api.changes == before


def test_scaling_needs_a_number(api: FakeApi) -> None:
    with pytest.raises(InputError, match=r"Received: no --nodes\. Give it, such as --nodes 3"):
        run("scale")
    assert not api.changes


def test_it_need_not_be_waited_for(api: FakeApi) -> None:
    assert run("up", "--no-wait")[0] == 0 and api.names("StatefulSet") == ["head", "store"]
    with pytest.raises(ClusterError, match=r"within 0\.1 s"):
        run("up", "--timeout", "0.1s")
    with pytest.raises(InputError, match="--timeout is a time such as 90s"):
        run("up", "--timeout", "soon")


def test_the_status_is_a_table_or_json_and_an_exit_code(api: FakeApi) -> None:
    run("up", "--no-wait")
    api.make_pods(ready=False)
    code, out, errors = run("status")
    assert code == 1 and out.splitlines()[0].split() == ["POD", "STATE", "NODE", "DISK", "ON"]
    assert "head-0 waits for its node to start it" in errors
    api.make_pods()
    code, out, errors = run("status", "--json")
    assert (code, errors) == (0, "")
    assert json.loads(out)[1] == {"name": "store-0", "state": "ready", "node": "n1", "disk": "", "waits": ""}


def test_the_number_of_stores_is_changed(api: FakeApi) -> None:
    run("up", "--no-wait")
    api.make_pods()
    api.after = lambda method, path: api.make_pods()
    code, _, errors = run("scale", "--nodes", "2")
    assert code == 0 and "The cluster has 2 stores." in errors


def test_disks_are_not_deleted_without_a_yes(api: FakeApi) -> None:
    run("up", "--no-wait")
    api.make_pods()
    with pytest.raises(InputError, match=r"data-head-0 \(20Gi\), data-store-0 \(50Gi\)\. Give --yes"):
        run("down", "--claims")
    api.objects = {path: each for path, each in api.objects.items() if each["kind"] != "Pod"}
    code, _, errors = run("down")
    assert code == 0 and "Disks that stay: data-head-0, data-store-0." in errors
    code, out, _ = run("down", "--claims", "--yes", "--json")
    deleted = {"PersistentVolumeClaim": ["data-head-0", "data-store-0"]}
    assert json.loads(out) == {"namespace": "team", "deleted": deleted, "kept": []}
    assert "Namespace team has no cluster." in run("down")[2]
