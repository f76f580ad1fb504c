from __future__ import annotations

from pathlib import Path

from insitu.evaluations import Evaluation, append_evaluation, read_evaluations


def evaluation(epoch: int) -> Evaluation:
    return Evaluation(f"epoch {epoch}", epoch, 0, 10 * epoch, {"loss": 0.5 / epoch, "mae": 0.25}, 1.5, 0.1)


def test_evaluations_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    assert read_evaluations(path) == []
    for epoch in (1, 2, 3):
        append_evaluation(path, evaluation(epoch))
    assert read_evaluations(path) == [evaluation(1), evaluation(2), evaluation(3)]


def test_a_line_that_was_cut_off_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    append_evaluation(path, evaluation(1))
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole[:cut])
        append_evaluation(path, evaluation(2))
        # Cut behind its last brace a line is whole.
        expected = [evaluation(1), evaluation(2)]
        assert read_evaluations(path) in (expected, [evaluation(1), *expected])


def test_an_evaluation_says_where_and_what() -> None:
    assert evaluation(2).describe() == "epoch 2 (20 updates): loss = 0.25, mae = 0.25"
