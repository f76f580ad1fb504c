"""The metadata store of a head that was lost without its home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.cluster.client.names_repair import begin_lost_store, find_lost_names
from insitu.cluster.nodes.head_files import open_head_files
from insitu.cluster.wire.records import change_head, read_head, take_process_lock


def test_a_head_begins_with_an_empty_store_only_after_somebody_has_said_so(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    assert not begin_lost_store(paths) and find_lost_names(paths) is None
    record = change_head(paths, epoch=1)
    assert not begin_lost_store(paths)
    open_head_files(paths, record, "t" * 32).close()
    assert not begin_lost_store(paths), "it is there"
    paths.metadata.unlink()
    for each in tmp_path.glob("metadata*"):
        each.unlink()
    lock = take_process_lock(paths.head_lock)
    assert lock is not None
    assert not begin_lost_store(paths), "the head runs"
    os.close(lock)
    change_head(paths, pid=1)  # it was killed
    record = read_head(paths)
    assert record is not None
    with pytest.raises(InputError, match="insitu repair"):
        open_head_files(paths, record, "t" * 32)
    assert begin_lost_store(paths)
    record = read_head(paths)
    assert record is not None
    open_head_files(paths, record, "t" * 32).close()
    assert paths.metadata.exists()
