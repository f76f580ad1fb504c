"""Scripts that know nothing but TensorFlow and TF_CONFIG run unchanged, and their ps tasks end."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_runs import Insitu, insitu_at

pytest.importorskip("tensorflow", reason="these scripts need TensorFlow: pip install tensorflow")
pytestmark = pytest.mark.timeout(400)

EXAMPLES = Path(__file__).parents[2] / "examples" / "tensorflow"


@pytest.fixture
def insitu(tmp_path: Path) -> Iterator[Insitu]:
    with insitu_at(tmp_path) as insitu:
        yield insitu


def run(insitu: Insitu, script: str, *options: str) -> tuple[str, dict[str, int]]:
    """(output, task -> exit code) of a job that must end well."""
    done = subprocess.run(
        insitu.command("start", "--max-restarts", "1", *options, "data/train", str(EXAMPLES), script),
        env=insitu.environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    described = insitu.json("describe", done.stderr.split("\n", 1)[0])
    assert described["state"] == "finished"
    return done.stdout, {task["task"]: task["code"] for task in described["task_list"]}


def test_a_custom_loop_under_multi_worker_mirrored_strategy(insitu: Insitu) -> None:
    output, codes = run(insitu, "multi_worker.py", "--workers", "2")
    learned = re.findall(r"\[(worker:\d)\] 2 replicas learned \[ 2. -3.\] \[1.\]", output)
    assert sorted(learned) == ["worker:0", "worker:1"]
    assert codes == {"worker:0": 0, "worker:1": 0}


@pytest.mark.long
def test_a_parameter_server_strategy_with_a_coordinator(insitu: Insitu) -> None:
    output, codes = run(insitu, "parameter_server.py", "--workers", "2", "--ps", "1", "--chief")
    assert re.search(r"\[chief:0\] 100 updates, .*\[ 2. -3.\]", output)
    # The others serve until they are stopped.
    assert codes == {"chief:0": 0, "worker:0": -15, "worker:1": -15, "ps:0": -15}


def test_between_graph_replication_as_in_tensorflow_1(insitu: Insitu) -> None:
    output, codes = run(insitu, "between_graph.py", "--workers", "2", "--ps", "1")
    assert sorted(re.findall(r"worker (\d) learned \[ 2. -3.\]", output)) == ["0", "1"]
    assert codes == {"worker:0": 0, "worker:1": 0, "ps:0": -15}


@pytest.mark.slow
def test_in_graph_replication_as_in_tensorflow_1(insitu: Insitu) -> None:
    output, codes = run(insitu, "in_graph.py", "--workers", "1")
    assert re.findall(r"step (\d+), loss = \S+, [\d,]+ examples/s", output) == ["50", "100", "150", "200"]
    (loss,) = re.findall(r"4 towers learned it: loss ([\d.]+)", output)
    assert float(loss) < 0.02
    assert codes == {"worker:0": 0}
