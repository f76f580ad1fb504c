"""Workers on servers must look words up in the same vocabularies."""

from __future__ import annotations

from pathlib import Path

import pytest
from parameter_servers import clients, servers

from insitu.base.errors import TrainingError
from insitu.extensions.features import feature_column
from insitu.train.parameter_server.server_marks import ServerMarks, check_vocabularies


def read(file: Path, words: str) -> None:
    """Read a vocabulary as a column does."""
    file.write_text(words)
    feature_column.categorical_column_with_vocabulary_file("word", file)


def test_the_worker_that_comes_later_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu.train.replica.state._read_files", {})
    file, same = tmp_path / "words.txt", tmp_path / "same.txt"
    with servers(total_replicas=3) as addresses, clients(addresses, 3) as made:
        marks = [ServerMarks(client, 3, 30.0) for client in made]
        read(same, "a\nb\n")
        read(file, "one\ntwo\n")
        check_vocabularies(marks[0], [0])
        check_vocabularies(marks[1], [1])
        check_vocabularies(marks[1], [1])  # again, as one that was restarted
        read(file, "two\none\n")
        with pytest.raises(TrainingError) as raised:
            check_vocabularies(marks[2], [2])
        said = str(raised.value)
        assert f"Received: the file {file}: the workers of shards 0, 1 have another one" in said
        assert str(same) not in said and "Give all nodes the same file" in said
        read(file, "one\ntwo\n")  # mended, and started again
        check_vocabularies(marks[2], [2])
