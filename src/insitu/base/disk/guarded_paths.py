"""Uses paths in places where other users may write, without following what they put there.

Between a look at a path and its use another user may put a link there. So folders are opened name by name,
and what is in one is named by its descriptor: `/proc/self/fd/7/part-00000.arrow` stays in the folder that was
opened, whatever becomes of its name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from insitu.base.errors import InputError

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_BYTES = 16 << 20
"""Bytes of the largest record that is read."""


def descriptor_path(descriptor: int) -> Path:
    """Return a path that leads to what is open as `descriptor` in this process."""
    return Path(f"/proc/self/fd/{descriptor}")


def list_trusted_users(home: Path) -> frozenset[int]:
    """Return the users whose settings in a home count: this one, root, and the home's owner."""
    try:
        return frozenset({os.geteuid(), 0, home.stat().st_uid})
    except OSError:
        return frozenset({os.geteuid(), 0})


def list_folders(home: Path, parent: Path) -> list[Path]:
    """Return the folders in a folder of a home, none if it isn't one. A link to a folder counts if a trusted
    user has made it: another one's may lead out of insitu."""
    users = list_trusted_users(home)
    if not _is_folder(parent, users):
        return []
    return [found for found in parent.iterdir() if _is_folder(found, users)]


def _is_folder(path: Path, users: Collection[int]) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    if stat.S_ISLNK(found.st_mode):
        return found.st_uid in users and path.is_dir()
    return stat.S_ISDIR(found.st_mode)


def open_name(parent: int, name: str, link_owners: Collection[int] = ()) -> int:
    """Return a descriptor, for use in paths, of the folder `name` in the one that is open as `parent`.

    A link is followed if one of `link_owners` has made it. Raises OSError.
    """
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR) or not link_owners:
            raise
        refusal = error
    link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        found = os.fstat(link)
        if not stat.S_ISLNK(found.st_mode) or found.st_uid not in link_owners:
            raise refusal
        return os.open(os.readlink("", dir_fd=link), _FOLDER, dir_fd=parent)
    finally:
        os.close(link)


@contextlib.contextmanager
def open_folder(root: Path, folder: Path, *, follow: bool = False) -> Iterator[Path]:
    """Yield a path that leads to `folder`, which is `root` or in it, whatever takes its name meanwhile.

    Nothing below `root` may be a link; with `follow` those of this user, of root and of the owner of `root`
    may. Errors within the block name `folder`. Raises OSError.
    """
    opened = os.open(root, _FOLDER)
    try:
        owners = {os.geteuid(), 0, os.fstat(opened).st_uid} if follow else ()
        for name in folder.relative_to(root).parts:
            if name == "..":
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            try:
                inner = open_name(opened, name, owners)
            except OSError as error:
                error.filename = str(folder)
                raise
            os.close(opened)
            opened = inner
        here = descriptor_path(opened)
        try:
            yield here
        except OSError as error:
            error.filename = _rename(error.filename, here, folder)
            error.filename2 = _rename(error.filename2, here, folder)
            raise
    finally:
        os.close(opened)


def _rename(name: object, here: Path, folder: Path) -> object:
    """Return what a file of an opened folder is called for people."""
    if not isinstance(name, str | bytes):
        return name
    text = os.fsdecode(name)
    return f"{folder}{text.removeprefix(str(here))}" if text.startswith(f"{here}/") else text


def set_mode(parent: int, name: str, mode: int) -> None:
    """Give a file in the folder that is open as `parent` a mode, unless it is no regular file. Raises
    OSError."""
    file = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        if stat.S_ISREG(os.fstat(file).st_mode):
            os.chmod(descriptor_path(file), mode)
    finally:
        os.close(file)


def read_guarded(home: Path, path: Path) -> bytes:
    """Return the content of a small file in a home that only a trusted user may have written.

    Raises FileNotFoundError, OSError, and InputError for a file that somebody else has put there or may
    write.
    """
    users = list_trusted_users(home)
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _untrusted(path, "a link") from error
        raise
    with open(file, "rb") as opened:
        check_written_by(path, os.fstat(file), users)
        data = opened.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise _untrusted(path, f"more than {_MOST_BYTES} bytes")
    return data


def check_written_by(path: Path, found: os.stat_result, users: Collection[int]) -> None:
    """Raise InputError unless `found`, the state of the open file at `path`, is that of a file which one of
    `users` alone may write."""
    if not stat.S_ISREG(found.st_mode):
        raise _untrusted(path, "no regular file")
    if found.st_uid not in users:
        raise _untrusted(path, f"a file of user {found.st_uid}")
    if found.st_mode & WRITABLE_BY_OTHERS:
        raise _untrusted(path, f"mode {stat.S_IMODE(found.st_mode):o}")


def _untrusted(path: Path, received: str) -> InputError:
    return InputError(
        f"What {path} says is acted upon, so only the user who runs insitu, or the home's owner, may write "
        f"it. Received: {received}. If it is yours, take the right to write away from others: chmod go-w "
        f"{path}; else have its owner remove it, or set INSITU_HOME to another folder"
    )
