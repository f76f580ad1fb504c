"""A package that a user installs registers a source, a connector, an engine, an exporter and a page, and
commands use them."""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import keras
import numpy as np
import pytest
from job_runs import JOB_PATIENCE, insitu_at, wait_for
from published_models import publish_models

from insitu.base.paths import Paths

MODULE = '''
import numpy as np

from insitu.base.spec import Column
from insitu.cluster.engines import LocalEngine
from insitu.grid.sources import Block, Connector


class NumbersSource:
    """A file of one whole number a line."""

    format = "numbers"
    suffixes = (".numbers",)

    def __init__(self, path, options):
        self.path = path
        self._values = np.array([int(line) for line in path.read_text().split()], np.int64)
        self.columns = (Column("x", "int64"),)
        self.expected_rows = len(self._values)

    def blocks(self, block_bytes, start=0):
        rows = max(1, block_bytes // 8)
        for first in range(start, len(self._values), rows):
            values = self._values[first : first + rows]
            yield Block({"x": values}, len(values), 8 * first, first + len(values))


class Sequence:
    """The whole numbers below the one that an address names."""

    format, suffixes = "sequence", ()

    def __init__(self, address):
        self.path, self.columns, self.origin = address, (Column("x", "int64"),), None
        self.expected_rows = int(address.rpartition("/")[2])
        self.expected_bytes = 8 * self.expected_rows

    def blocks(self, block_bytes, start=0):
        yield Block({"x": np.arange(self.expected_rows)}, self.expected_rows, self.expected_bytes, 1)
        self.origin = {"kind": "sequence", "address": self.path, "read": [0.0, 1.0], "digest": "abc"}
        self.origin |= {"rows": self.expected_rows, "options": {"ragged": []}}


class Sequences(Connector):
    scheme = "sequence"

    def open(self, address, columns, options, settings=None):
        return Sequence(address)


SEQUENCES = Sequences()


def open_engine(job, wake):
    (job.root / "mine").touch()
    return LocalEngine(job, wake, reap_orphans=True)
'''
MODELS = '''
import json

import numpy as np

from insitu.extensions.exports import ServedModel, Value


class _Matrix:
    """Models of one dense layer, as JSON."""

    def write(self, model, path):
        kernel, bias = model.get_weights()
        path.write_text(json.dumps([kernel.tolist(), bias.tolist()]))

    def load(self, path):
        kernel, bias = map(np.array, json.loads(path.read_text()))
        value = Value("x", "float32", (None, len(kernel)))
        return ServedModel((value,), (Value("y", "float32", None),), lambda given: [given[0] @ kernel + bias])


MATRIX = _Matrix()
'''
PAGE = """
from dataclasses import dataclass
from pathlib import Path

from insitu.options import Declared, format_options, option
from insitu.ui import Plan


@dataclass(frozen=True, slots=True)
class Refill(Declared):
    rows: int = option(1000, "Rows to add.", least=1, common=True)


class Mine:
    title, source, query, forms = "Mine", "The mine", (), {"refill": Refill}
    templates = Path(__file__).parent / "templates"

    def is_here(self):
        return True

    def read(self, query):
        return {"gold": 79}

    def plan(self, form, request):
        return Plan(["version", *format_options(request)], [f"{request.rows} rows: new"])

    def concerns(self, job):
        return False


PAGE = Mine()
"""
TEMPLATE = """{% extends "base.html" %}
{% block content %}
{% if plan %}{% include "_plan.html" %}{% endif %}gold {{ look.found.gold }}{% endblock %}"""
ENTRY_POINTS = """
[insitu.sources]
numbers = mine:NumbersSource
broken = mine_broken:Source
[insitu.connectors]
sequence = mine:SEQUENCES
broken = mine_broken:CONNECTOR
[insitu.engines]
mine = mine:open_engine
broken = mine_broken:open_engine
[insitu.exporters]
matrix = mine_models:MATRIX
broken = mine_broken:EXPORTER
[insitu.pages]
mine = mine_page:PAGE
broken = mine_broken:PAGE
"""
BROKEN = (
    "mine-of-users 1.5, and ModuleNotFoundError: No module named 'library_that_is_not_there'. Install library"
)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder on the path of modules, where a package is as pip leaves it."""
    folder = tmp_path / "site"
    (folder / "mine_of_users-1.5.dist-info").mkdir(parents=True)
    (folder / "mine_of_users-1.5.dist-info" / "METADATA").write_text("Name: mine-of-users\nVersion: 1.5\n")
    (folder / "mine_of_users-1.5.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "mine.py").write_text(MODULE)
    (folder / "mine_models.py").write_text(MODELS)
    (folder / "mine_page.py").write_text(PAGE)
    (folder / "templates").mkdir()
    (folder / "templates" / "page.html").write_text(TEMPLATE)
    (folder / "mine_broken.py").write_text("import library_that_is_not_there\n")
    return folder


def run(site: Path, home: Path, *arguments: str, program: str = "") -> subprocess.CompletedProcess[str]:
    command = ["-c", program] if program else ["-m", "insitu"]
    environment = {**os.environ, "PYTHONPATH": str(site), "INSITU_HOME": str(home)}
    return subprocess.run(
        [sys.executable, *command, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=JOB_PATIENCE,
    )


def test_import_reads_files_by_a_plug_in_and_names_one_that_is_broken(
    installed: Path, tmp_path: Path, home: Path
) -> None:
    (tmp_path / "a.numbers").write_text("\n".join(map(str, range(1000))))
    (tmp_path / "a.broken").touch()
    done = run(installed, home, "import", "a", str(tmp_path / "a.numbers"))
    assert done.returncode == 0, done.stderr
    rows = "import insitu; print(insitu.dataset('a').rows)"
    assert run(installed, home, program=rows).stdout == "1000\n"
    by_name = ("import", "b", str(tmp_path / "a.broken"), "--format", "numbers")
    assert "is empty" in run(installed, home, *by_name).stderr
    (tmp_path / "a.broken").write_text("1")
    assert run(installed, home, *by_name).returncode == 0
    refused = run(installed, home, "import", "c", str(tmp_path / "a.broken"))
    assert refused.returncode == 2
    assert "'broken' of insitu.sources, mine_broken:Source of " + BROKEN in " ".join(refused.stderr.split())
    unknown = run(installed, home, "import", "c", str(tmp_path / "a.numbers"), "--format", "nothing")
    assert "text, broken or numbers. Received: nothing" in " ".join(unknown.stderr.split())


def test_tables_of_another_system_are_read_by_a_plug_in(installed: Path, home: Path) -> None:
    done = run(installed, home, "import", "a", "sequence://here/30")
    assert done.returncode == 0, done.stderr
    assert "read from  sequence://here/30, read" in run(installed, home, "describe", "a").stdout
    rows = "import insitu; print(insitu.dataset('sequence://here/20').rows)"
    assert run(installed, home, program=rows).stdout == "20\n"
    for arguments, why in (
        (("export", "a", "sequence://here/1"), "can only be read"),
        (("describe", "sequence://here/1"), "can't be described"),
        (("import", "b", "sequence://here/1", "--append"), "imported as a whole"),
        (
            ("import", "b", "broken://here/1"),
            "'broken' of insitu.connectors, mine_broken:CONNECTOR of " + BROKEN,
        ),
    ):
        refused = run(installed, home, *arguments)
        assert refused.returncode == 2 and why in " ".join(refused.stderr.split()), refused.stderr


def test_a_job_trains_on_a_table_that_a_plug_in_reads(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(installed))
    with insitu_at(tmp_path) as insitu:
        insitu.script("import insitu; print(insitu.dataset().rows)")
        done = insitu.run(
            "start", "--workers", "1", "--no-prefix", "sequence://here/40", str(insitu.folder), "train.py"
        )
        assert done.stdout == "40\n"


def test_start_runs_tasks_by_the_engine_of_a_plug_in(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(installed))
    with insitu_at(tmp_path) as insitu:
        insitu.script("print('hello')")
        done = insitu.start("--workers", "1", "--no-prefix", "--engine", "mine")
        assert done.out == "hello\n"
        assert (insitu.paths.job(done.job_id).root / "mine").exists()
        refused = insitu.run("start", "--engine", "broken", "-", str(insitu.folder), "train.py", code=None)
        assert BROKEN in " ".join(refused.stderr.split())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_export_converts_a_model_by_a_plug_in(installed: Path, tmp_path: Path, home: Path) -> None:
    job = publish_models(home)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.save(job.exports / "final" / "00000300.keras")
    target = tmp_path / "model.matrix"
    done = run(installed, home, "export", "people", str(target))
    assert done.returncode == 0, done.stderr
    assert np.allclose(np.array(json.loads(target.read_text())[0]), model.get_weights()[0])
    refused = run(installed, home, "export", "people", str(tmp_path), "--format", "broken")
    assert "'broken' of insitu.exporters, mine_broken:EXPORTER of " + BROKEN in " ".join(
        refused.stderr.split()
    )
    # The rest works beside it.
    done = run(installed, home, "export", "people", str(tmp_path / "copy.keras"))
    assert done.returncode == 0, done.stderr
    assert Paths(home).job(job.root.name).exports.is_dir()


def test_the_page_shows_that_of_a_plug_in_and_names_one_that_is_broken(installed: Path, home: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed), "INSITU_HOME": str(home)}
    command = [sys.executable, "-m", "insitu", "ui", "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    try:
        record = home / f"ui-{os.geteuid()}.json"
        wait_for("the page", record.exists)
        found = json.loads(record.read_text())

        def ask(path: str, data: bytes | None = None) -> str:
            given = {"Authorization": f"Bearer {found['operate']}"}
            try:
                request = urllib.request.Request(found["url"] + path, data, given)
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return str(answer.read().decode())
            except urllib.error.HTTPError as error:
                return html.unescape(error.read().decode())

        shown = ask("/pages/mine")
        assert "gold 79" in shown and '<a href="/pages/mine" aria-current="page">Mine</a>' in shown
        shown = ask("/pages/mine/refill", b"rows=7")
        assert "7 rows: new" in shown and "insitu version --rows 7" in shown
        assert "'broken' of insitu.pages, mine_broken:PAGE of " + BROKEN in ask("/pages/broken")
        assert '<a href="/pages/broken"' in ask("/nodes")
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("arguments", [("ps",), ("import", "--help"), ("start", "--help")])
def test_commands_that_need_no_plug_in_look_for_none(
    installed: Path, home: Path, arguments: tuple[str, ...]
) -> None:
    program = (
        "import importlib.metadata, sys\n"
        "importlib.metadata.entry_points = lambda **given: sys.exit('looked for plug-ins')\n"
        "import insitu\n"
        "from insitu.cli import main\n"
        "main()"
    )
    done = run(installed, home, *arguments, program=program)
    assert done.returncode == 0, done.stderr
