"""The examples of the pages on features run as written, one after another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from insitu import feature_column as fc

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "reference" / "feature-columns.md").read_text()
PAGES = [(DOCS / "how-to" / name).read_text() for name in ("features.md", "adapt.md", "text-and-times.md")]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, as it saves
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    blocks = re.findall(r"```python\n(.*?)```", "".join([*PAGES, REFERENCE]), re.S)
    assert len(blocks) == 8
    for block in blocks:
        exec(compile(block, "docs/how-to/features.md", "exec"), names)


def test_the_page_has_all_columns() -> None:
    listed = set(re.findall(r"^\| `(\w+)\(", REFERENCE, re.M))
    others = {"input_layer", "make_inputs", "raw_keys", "shared_embedding_columns", "FeatureTransform"} | {
        "DenseFeatures",
        "SequenceFeatures",
    }
    assert listed == set(fc.__all__) - others
