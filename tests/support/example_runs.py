"""Runs the example of each way under each strategy, by changing one line of it, on the backend of
KERAS_BACKEND. Prints as JSON what accuracy each came to, or its error. All in one process, which a script on
its own has to itself: sessions are cleared in between.

python example_runs.py FOLDER '{"STRATEGY": "LINE", ...}' '[WAY, ...]'
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
import traceback
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "strategies"
LINE = "strategy = insitu.MultiWorkerMirroredStrategy()\n"


def accuracy(folder: Path, way: str, line: str) -> float | str:
    import keras

    text = (EXAMPLES / f"{way}.py").read_text()
    if text.count(LINE) != 1:
        return f"{way}.py must have the line once: {LINE}"
    script = folder / f"{way}.py"
    script.write_text(text.replace(LINE, line))
    keras.utils.clear_session()
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(str(script), run_name="__main__")
    except Exception:
        return traceback.format_exc()
    found = re.search(r"^accuracy ([0-9.]+) on \d+ replicas$", output.getvalue(), re.M)
    return float(found[1]) if found else output.getvalue()


def main() -> None:
    folder, lines, ways = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    (folder / "data.py").write_text((EXAMPLES / "data.py").read_text())
    sys.path.insert(0, str(folder))
    results = {f"{way}/{name}": accuracy(folder, way, line) for way in ways for name, line in lines.items()}
    sys.stdout.write(f"RESULTS{json.dumps(results)}\n")


if __name__ == "__main__":
    main()
