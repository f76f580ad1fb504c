"""The examples of docs/tutorial/after-training.md run as written: the script as a job, others beside it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from job_runs import insitu_at

from insitu.grid import bring_up

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial" / "after-training.md").read_text()
BLOCKS = dict.fromkeys(["train.py", "", "pandas"], "")
for kind, block in re.findall(r"```python ?(\S*)\n(.*?)```", PAGE, re.S):
    BLOCKS[kind] += block


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    with insitu_at(tmp_path) as insitu:
        bring_up(insitu.paths, 2)
        (tmp_path / "digits").mkdir()
        for label in range(10):
            np.save(tmp_path / f"digits/{label}.npy", digits.images[digits.target == label].astype("uint8"))
        files = sorted(map(str, tmp_path.glob("digits/*.npy")))
        insitu.run("import", "--label-from-filename", "--split", "train=0.9,test=0.1", "digits", *files)
        insitu.script(BLOCKS["train.py"])
        insitu.run("start", "--workers", "2", "digits/train", str(insitu.folder), "train.py")
        (job,) = insitu.json("ps", "--all")
        folder = insitu.json("describe", job["job_id"])["folder"]
        monkeypatch.chdir(Path(folder) / "code")
        monkeypatch.setenv("INSITU_HOME", str(insitu.paths.home))
        names: dict[str, object] = {"__name__": "__main__"}
        exec(compile(BLOCKS[""], "docs/tutorial/after-training.md", "exec"), names)
        assert len(names["of_file"]) == 20  # type: ignore[arg-type]
        np.testing.assert_allclose(names["of_file"], names["of_fit"])
        # What plain Keras says of the loaded model.
        wrong = re.findall(r"^row (\d+): (\d), taken for (\d)$", capsys.readouterr().out, re.M)
        ((batch, label),) = names["rows"]  # type: ignore[misc]
        guess = names["model"].predict(batch["x"], verbose=0).argmax(axis=1)  # type: ignore[attr-defined]
        at = np.flatnonzero(guess != label)
        expected = np.stack([batch["row"][at], label[at], guess[at]], axis=1)
        assert expected.tolist() == [[int(number) for number in each] for each in wrong] != []
        assert np.mean(guess == label) == pytest.approx(names["of_file"][-1])  # type: ignore[index]
        if importlib.util.find_spec("pandas") is not None:
            exec(compile(BLOCKS["pandas"], "docs/tutorial/after-training.md", "exec"), names)
            assert len(names["wrong"]) == len(wrong)  # type: ignore[arg-type]
