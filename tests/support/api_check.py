"""Tries the REST interface against its own description, by Schemathesis, on a home that is thrown away.

    python tests/support/api_check.py PATH/TO/schemathesis [OPTIONS]

Schemathesis sends what fits the description and what doesn't, as who may operate, as who may view, and as a
stranger. An answer that the description doesn't have, and each status of 500, is a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from job_runs import insitu_at
from page_browser import served

SEED = "20"
EXCLUDED = "positive_data_acceptance"
"""A job whose folder isn't there is refused with 400, though the description can't say so."""
STREAMS = "/live$"
"""Streams don't end by themselves."""


def main(schemathesis: str, *more: str) -> int:
    with tempfile.TemporaryDirectory() as folder, insitu_at(Path(folder)) as insitu:
        rows = Path(folder) / "rows.npz"
        np.savez(rows, x=np.arange(64.0), label=np.arange(64) % 2)
        insitu.run("import", "rows", str(rows))
        insitu.script("print('hello')")
        insitu.start("--workers", "1", "--name", "job", "--standby", "0")
        with served(insitu):
            record = json.loads(insitu.paths.ui(os.geteuid()).read_text())
            command = [
                schemathesis,
                "--config-file",
                str(Path(__file__).with_name("schemathesis.toml")),
                "run",
                f"{record['url']}/api/v1/openapi.json",
                "--header",
                f"Authorization: Bearer {record['operate']}",
                "--exclude-path-regex",
                STREAMS,
                "--exclude-checks",
                EXCLUDED,
                "--phases",
                "examples,coverage,fuzzing",
                "--max-examples",
                "15",
                "--seed",
                SEED,
                "--generation-database",
                "none",
                "--warnings",
                "off",
                "--request-timeout",
                "60",
                "--max-time",
                "200",
                "--continue-on-failure",
                "--no-color",
            ]
            # What it takes for paths is in an empty folder.
            (Path(folder) / "empty").mkdir()
            return subprocess.run([*command, *more], cwd=Path(folder) / "empty").returncode


if __name__ == "__main__":
    sys.exit(main(os.path.abspath(sys.argv[1]), *sys.argv[2:]))
