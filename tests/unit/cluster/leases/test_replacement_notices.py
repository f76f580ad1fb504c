from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from insitu.base.errors import ClusterError
from insitu.base.paths import Paths
from insitu.cluster.leases import replacement_notices
from insitu.cluster.leases.replacement_notices import ReplacementNotices, record_replacement
from insitu.cluster.wire.records import change_head, make_token, read_head
from insitu.grid import import_cache, is_catalog_copy

MESSAGE = {"do": "replaced", "epoch": (1 << 20) + 1, "address": "h:2"}


@pytest.fixture
def paths(home: Path) -> Paths:
    home.mkdir(mode=0o700)
    return Paths(home)


def test_the_home_of_a_head_that_was_replaced_names_the_other_one_and_owns_no_catalogue(
    paths: Paths, tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    import_cache(paths, "a", [str(tmp_path / "a.npy")])
    record = change_head(paths, address="h:1", epoch=5)
    for wrong in ({"cluster": "d"}, {"epoch": 6}, {"epoch": None}):
        with pytest.raises(ClusterError, match="A head is replaced"):
            record_replacement(paths, record, {**MESSAGE, "cluster": record.cluster, **wrong})
    assert not is_catalog_copy(paths) and read_head(paths) == record
    record_replacement(paths, record, {**MESSAGE, "cluster": record.cluster})
    after = read_head(paths)
    assert is_catalog_copy(paths) and after is not None and after.replaced_by == "h:2"


def test_a_catalogue_that_cannot_be_read_does_not_keep_the_head_from_ending(paths: Paths) -> None:
    record = change_head(paths, address="h:1")
    paths.catalog.write_bytes(b"no catalogue at all" * 100)
    record_replacement(paths, record, {**MESSAGE, "cluster": record.cluster})
    after = read_head(paths)
    assert after is not None and after.replaced_by == "h:2"


def test_the_new_head_tells_the_one_before_until_it_ends_itself(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may be away for long."""
    said: list[tuple[str, Any]] = []
    enough = threading.Event()

    def ask(address: str, token: str, message: Any, *_: object, **__: object) -> None:
        said.append((address, message))
        if len(said) == 3:
            enough.set()
        raise ClusterError("no answer")

    monkeypatch.setattr(replacement_notices, "ask_head", ask)
    monkeypatch.setattr(replacement_notices, "_AGAIN_SECONDS", 0.0)
    make_token(paths)
    record = change_head(paths, address="h:2", epoch=7, replaces={"head": "h:1", "at": 0.0})
    notices = ReplacementNotices(paths, record)
    assert enough.wait(30)
    notices.close()
    message = {"do": "replaced", "cluster": record.cluster, "address": "h:2", "epoch": 7}
    assert said[:3] == [("h:1", message)] * 3
