"""HDFS of one name node and one data node on the loopback interface. Run as a program, this fetches its jars.

Jars come from Maven Central by `mvn`, once, into .cache/hdfs.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ROOT / "tests" / "hdfs"
JARS = Path(os.environ.get("INSITU_HDFS_CACHE", ROOT / ".cache" / "hdfs")) / "lib"
_COMPLETE = JARS / ".complete"
_START_SECONDS = 120.0


def find_obstacle() -> str:
    """Return why HDFS can't be started here; "" where it can."""
    if shutil.which("java") is None:
        return "HDFS needs Java (Debian: openjdk-17-jdk-headless)"
    return "" if _COMPLETE.exists() else "the jars of HDFS aren't there: `make ready-stores` fetches them"


class HdfsServer:
    """HDFS, which ends with this process."""

    def __init__(self, folder: Path) -> None:
        command = ["java", "--add-opens=java.base/java.lang=ALL-UNNAMED", "-Xmx512m", "-cp", f"{JARS}/*"]
        with (folder / "hdfs.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, str(FILES / "Hdfs.java"), str(folder / "hdfs")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
            )
        assert self._process.stdout is not None
        ready = select.select([self._process.stdout], [], [], _START_SECONDS)[0]
        words = self._process.stdout.readline().split() if ready else []
        assert words[:1] == [b"up"], (folder / "hdfs.log").read_text()[-2000:]
        #: The ports of the protocol of Hadoop, and of WebHDFS.
        self.port, self.web_port = int(words[1]), int(words[2])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=_START_SECONDS)


def main() -> None:
    """Fetch the jars unless they are there. Says what is missing."""
    if shutil.which("java") is None or shutil.which("mvn") is None:
        sys.exit("HDFS is left out: it needs Java and Maven (Debian: openjdk-17-jdk-headless, maven)")
    if not _COMPLETE.exists():
        JARS.mkdir(parents=True, exist_ok=True)
        command = ["mvn", "--batch-mode", "--quiet", "-f", str(FILES / "pom.xml")]
        command += ["dependency:copy-dependencies", f"-DoutputDirectory={JARS}"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=600)
        _COMPLETE.touch()


if __name__ == "__main__":
    main()
