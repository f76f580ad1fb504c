"""Files that users send are kept while something reads them, and for an hour otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")

from insitu.base.errors import InputError
from insitu.ui import uploads as module
from insitu.ui.uploads import Uploads


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def uploads(clock: Clock) -> Iterator[Uploads]:
    with contextlib.closing(Uploads(clock)) as made:
        yield made


def send(uploads: Uploads, beside: str | None = None, name: str = "a.npy") -> str:
    token, _, file = uploads.open(name, beside)
    file.close()
    return token


def test_what_an_import_reads_stays_and_the_rest_goes(uploads: Uploads, clock: Clock) -> None:
    """An import of more than an hour, or the ninth upload, lost the files that it read."""
    read, left = send(uploads), send(uploads)
    (path,) = uploads.use(read)
    uploads.use(read)
    clock.now = 2 * module._SECONDS
    for _ in range(module._MOST + 2):
        send(uploads)
    assert path.exists() and uploads.list_files(read) == [path]
    with pytest.raises(InputError, match="Send the file again"):
        uploads.use(left)
    assert len(uploads._files) == module._MOST + 1
    uploads.end_use(read)
    send(uploads)
    assert path.exists()  # the other one uses it
    uploads.end_use(read)
    send(uploads)
    assert not path.exists() and not uploads._used


def test_an_upload_that_gets_a_file_more_stays(uploads: Uploads, clock: Clock) -> None:
    token = send(uploads)
    clock.now = 2 * module._SECONDS
    assert send(uploads, token, "b.npy") == token and len(uploads.list_files(token)) == 2
