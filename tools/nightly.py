"""Runs every suite and mark that exists, one after the other, and prints one table at the end.

    python tools/nightly.py [--only NAME ...] [--kills 200]

A suite that fails doesn't end the run. One whose needs this machine lacks is named as not run.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTEST = f"{ROOT}/.venv/bin/python -m pytest --timeout 1800"
SUITES = {
    "check": "make check",
    "test": "make test",
    "test-long": "make test-long",
    "test-torch": "make test-torch",
    "test-slow": f'make ready-etcd && {PYTEST} -m "slow and not torch and not hosts and not ignite '
    'and not ui and not k8s"',
    "torch, slow": f'{PYTEST} -m "torch and slow and not hosts"',
    "test-tls": "make test-tls",
    "test-agreement": "make test-agreement",
    "test-hosts": "make ready-hosts ready-etcd && make test-hosts",
    "hosts, slow": f'make ready-hosts ready-etcd && {PYTEST} -m "hosts and slow" tests/fault/test_hosts.py '
    "tests/fault/test_hosts_disturbed.py tests/fault/test_hosts_replaced_head.py tests/process",
    "test-ray": "make ready-ray && make test-ray",
    "ray, slow": f'make ready-ray && {PYTEST} -m "hosts and slow" tests/fault/test_hosts_ray.py '
    "tests/fault/test_hosts_ray_disturbed.py tests/fault/test_hosts_ray_head.py",
    "test-launchers": "make ready-launchers && make test-launchers",
    "test-ui": "make ready-ui && make test-ui",
    "test-api": "make ready-api && make test-api",
    "test-formats": "make ready-formats && make test-formats",
    "test-stores": "make ready-stores && make test-stores",
    "test-track": "make ready-track && make test-track",
    "test-k8s": "make ready-k8s && make test-k8s",
    "test-notebook": "make ready-notebook && make test-notebook",
    "test-ignite": "make ready-ignite && make test-ignite",
    "test-wheel": "make test-wheel",
    "docs": "make docs",
    "smoke": "make ready-smoke && make smoke",
    "test-lowest": "make test-lowest",
    "test-newest": "make test-newest",
    "test-keras": "make test-keras",
    "sanitize": "make sanitize",
    "demo": "make demo",
    "demo on hosts": "make ready-lab && make demo HOSTS=3",
    "demo of Ignite": "make ready-ignite && make demo-ignite",
    "random kills": "",
}


@dataclass(frozen=True)
class Outcome:
    """How a suite ended."""

    name: str
    seconds: float
    code: int
    counts: str
    failed: tuple[str, ...]


def run(name: str, command: str, log: Path) -> Outcome:
    """Run a suite, with its output in `log`, and return how it ended."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')}  {name}: {command}\n")
    sys.stdout.flush()
    began = time.monotonic()
    with log.open("wb") as file:
        code = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    text = log.read_text(errors="replace")
    counts = ", ".join(re.findall(r"^=* ?(\d+ (?:passed|failed).*?) in [\d.]+s", text, re.MULTILINE))
    failed = tuple(re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE))
    return Outcome(name, time.monotonic() - began, code, counts, failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SUITES), choices=list(SUITES), help="suites to run")
    parser.add_argument("--kills", type=int, default=200, help="random kills on each backend")
    options = parser.parse_args()
    logs = ROOT / "build" / "nightly"
    logs.mkdir(parents=True, exist_ok=True)
    SUITES["random kills"] = " && ".join(
        f"PYTHONPATH=tests/support .venv/bin/python tests/support/random_kills.py --kills {options.kills} "
        f"--backend {backend}"
        for backend in ("tensorflow", "jax", "torch")
    )
    outcomes = [
        run(n, SUITES[n], logs / f"{n.replace(', ', '-').replace(' ', '-')}.log") for n in options.only
    ]
    width = max(len(outcome.name) for outcome in outcomes)
    sys.stdout.write(f"\n{'suite':{width}}  {'minutes':>7}  result\n")
    for outcome in outcomes:
        result = "passed" if outcome.code == 0 else f"FAILED ({outcome.code})"
        counts = f", {outcome.counts}" if outcome.counts else ""
        sys.stdout.write(f"{outcome.name:{width}}  {outcome.seconds / 60:7.1f}  {result}{counts}\n")
        for test in outcome.failed:
            sys.stdout.write(f"{'':{width}}  {'':7}  {test}\n")
    failed = [outcome.name for outcome in outcomes if outcome.code]
    sys.stdout.write(f"\n{len(outcomes) - len(failed)} passed, {len(failed)} failed; logs are in {logs}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
