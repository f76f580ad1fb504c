"""Compiles `members.c` with each sanitizer, and runs it. Exits with 1 if one of them finds anything."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("members.c")
KINDS = {"thread": ["setarch", "-R"], "address,undefined": []}
"""By sanitizer, what the program is run with: this ThreadSanitizer needs addresses that aren't random."""


def main() -> int:
    failed = 0
    for kind, prefix in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "members"
            options = [
                "-O2",
                "-g",
                "-pthread",
                "-DINSITU_SANITIZE",
                f"-fsanitize={kind}",
                "-fno-sanitize-recover=all",
            ]
            subprocess.run(["gcc", *options, "-o", program, SOURCE], check=True)
            code = subprocess.run([*prefix, program, *sys.argv[1:]], check=False).returncode
        print(f"{kind}: {'clean' if not code else f'exit code {code}'}")
        failed |= code != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
