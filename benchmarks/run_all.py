"""Runs every benchmark in turn and writes RESULTS.md, and one JSON file each into results/."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

import common

HERE = Path(__file__).parent
BENCHMARKS = {
    "exchange": "Exchange",
    "compression": "Compression",
    "training": "Training",
    "strategies": "Strategies",
    "communication": "Ring beside XLA",
    "read_speed": "Reading",
    "import_speed": "Import",
    "image_import": "Import of images",
    "large_data": "Data larger than memory",
    "compressed_caches": "Compressed caches",
    "shuffle_quality": "Quality of shuffles",
    "adapt": "Preprocessing layers",
    "transfer": "Partitions between nodes",
    "host_import": "Import onto hosts",
    "rebalancing": "Rebalancing beside a job",
    "ignite": "Apache Ignite",
    "loads": "Strangers at a job's ports",
    "start_speed": "Start",
    "start_on_hosts": "Start on hosts",
    "start_in_pods": "Start in pods of Kubernetes",
    "recovery": "Recovery",
    "host_loss": "Loss of a host",
    "checkpoint": "Checkpoints",
    "overhead": "Cost of being able to recover",
    "train_and_evaluate": "Training by global steps",
    "step_numbers": "Cost of measuring steps",
    "page_load": "The page",
    "parameter_server": "Parameter servers",
    "parameter_tables": "Parameter tables",
    "parameter_recovery": "Checkpoints and deaths of parameter servers",
}


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument(
        "--only", nargs="*", choices=BENCHMARKS, help="run these and keep the others' results"
    )
    arguments = options.parse_args()
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    for name in arguments.only or BENCHMARKS:
        common.say(f"== {name}")
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(results / f"{name}.json")]
        command += ["--quick"] if arguments.quick else []
        command += ["--rounds", str(arguments.rounds)] if arguments.rounds else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        (results / f"{name}.md").write_text(done.stdout)
    write_results(results)


def write_results(results: Path) -> None:
    """Write RESULTS.md: for each benchmark the script's docstring, then what it printed."""
    today = datetime.date.today().isoformat()
    parts = [
        "# Results\n\n`make bench` writes this page. Each section says what is measured and on which "
        'machine, then gives medians over alternating runs. The column "x is better by" says how many times '
        f"better x is than the row. Last written on {today}; all figures are in `benchmarks/results` as JSON."
    ]
    for name, title in BENCHMARKS.items():
        printed = results / f"{name}.md"
        if not printed.exists():
            continue
        docstring = re.match(r'"""(.*?)"""', (HERE / f"{name}.py").read_text(), re.S)
        claim = docstring[1].strip() if docstring else ""
        parts.append(f"## {title}\n\n`python benchmarks/{name}.py`\n\n```text\n{claim}\n```")
        parts.append(printed.read_text().strip())
    (HERE / "RESULTS.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
