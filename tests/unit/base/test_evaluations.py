from __future__ import annotations

from pathlib import Path

from insitu.base.evaluations import (
    Evaluation,
    Training,
    append_evaluation,
    find_training,
    read_evaluations,
    record_training,
)


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


def test_a_training_is_known_by_what_was_said_first(tmp_path: Path) -> None:
    path = tmp_path / "trainings.jsonl"
    assert find_training(path, 0) is None
    record_training(path, Training(0, fit=3))
    record_training(path, Training(1, fit=0))
    assert find_training(path, 0) == Training(0, 3)
    record_training(path, Training(0, 3, True, (4, 2)))
    # The chief was started again, and says it once more, while the next training has saved.
    record_training(path, Training(0, 3))
    record_training(path, Training(0, 3, True, (9, 0)))
    with path.open("a") as file:
        file.write('{"number": 1, "fit"\n[]\n{"number": 1}\n')
    assert find_training(path, 0) == Training(0, 3, True, (4, 2))
    assert find_training(path, 1) == Training(1, 0)
    assert len(path.read_text().splitlines()) == 6
