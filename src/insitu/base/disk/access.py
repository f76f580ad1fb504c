"""Who may use the content of INSITU_HOME: its owner alone, or the members of a group.

The mode of the home folder itself says which. insitu makes it for its owner alone. `insitu up --shared GROUP`
gives it the marks of a shared one: the group may write there, and what is made there belongs to the group.
Jobs stay private in either case: they hold a secret and run code.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

from insitu.base.disk.guarded_paths import (
    WRITABLE_BY_OTHERS,
    descriptor_path,
    list_trusted_users,
    open_name,
    set_mode,
)
from insitu.base.errors import InputError
from insitu.base.paths import Paths

_SHARED_MARKS = stat.S_ISGID | stat.S_IRWXG
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
SHARED_FOLDER, SHARED_FILE = 0o2770, 0o660
STICKY = stat.S_ISVTX
"""Lets only its owner rename or remove what is in a folder that others may write to."""
_OTHERS = 0o077
_OWNERS_ALONE = {"agent.json": ~WRITABLE_BY_OTHERS, "store.json": ~WRITABLE_BY_OTHERS, "agent.lock": ~_OTHERS}
"""Files in stores that say what processes do, with the modes that they may have in a shared home."""


def is_shared(home: Path) -> bool:
    """Return whether the home belongs to a group, as `share_home` leaves it."""
    try:
        mode = home.stat().st_mode
    except OSError:
        return False
    return mode & _SHARED_MARKS == _SHARED_MARKS


def folder_mode(home: Path) -> int:
    """Return the mode of folders in the home."""
    return SHARED_FOLDER if is_shared(home) else PRIVATE_FOLDER


def file_mode(home: Path) -> int:
    """Return the mode of files in the home."""
    return SHARED_FILE if is_shared(home) else PRIVATE_FILE


def owner_file_mode(home: Path) -> int:
    """Return the mode of files in the home that others may read if it is shared, and their owner alone
    writes."""
    return file_mode(home) & ~WRITABLE_BY_OTHERS


def make_folder(home: Path, folder: Path) -> None:
    """Make `folder`, which is the home or in it, and what is above it, with the modes of the home.

    Folders of this user that were open to more are closed, but for the home itself. In a shared home links
    that other members have made are not followed. Raises OSError, and InputError for a home in which others
    could put files in the place of this user's.
    """
    if not home.exists():
        home.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    _refuse_untrusted(home, home)
    here, mode, users = home, folder_mode(home), list_trusted_users(home)
    parent = os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in folder.relative_to(home).parts:
            here = here / name
            try:
                made = _make_in(parent, name, mode)
                opened = open_name(parent, name, users)
            except OSError as error:
                error.filename = str(here)
                raise
            os.close(parent)
            parent = opened
            found = os.fstat(parent)
            if found.st_uid != os.geteuid():
                _refuse_untrusted(home, here)
            elif made or found.st_mode & _OTHERS & ~mode:
                # The umask may remove the group's rights from what mkdir makes.
                os.chmod(descriptor_path(parent), mode)
    finally:
        os.close(parent)


def _make_in(parent: int, name: str, mode: int) -> bool:
    """Make a folder in the one that is open as `parent`. Returns False if the name is taken."""
    try:
        os.mkdir(name, mode, dir_fd=parent)
    except FileExistsError:
        return False
    return True


def make_file(home: Path, file: Path) -> None:
    """Make an empty `file` in the home, unless it is there; one that was open to more is closed. A link in
    its place raises OSError.

    The file isn't opened: to close it would end all locks that this process has on it, which SQLite takes.
    """
    mode = file_mode(home)
    with contextlib.suppress(FileExistsError):
        os.mknod(file, stat.S_IFREG | mode)
    descriptor = os.open(file, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISLNK(found.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(file))
        if found.st_uid != os.geteuid():
            _refuse_untrusted(home, file)
        elif stat.S_IMODE(found.st_mode) != mode:
            os.chmod(descriptor_path(descriptor), mode)
    finally:
        os.close(descriptor)


def make_sticky_folder(home: Path, folder: Path) -> None:
    """Make a folder as `make_folder` does. In a shared home what each user puts there can be removed by that
    user alone."""
    make_folder(home, folder)
    if is_shared(home) and folder.stat().st_uid == os.geteuid():
        folder.chmod(SHARED_FOLDER | STICKY)


def apply_modes(home: Path, folder: Path, *, group: int | None = None) -> None:
    """Give `folder` and everything in it the modes of the home, and the group with this number, not what
    links lead to. Raises OSError."""
    of_folders, of_files = folder_mode(home), file_mode(home)
    if not folder.exists():
        return
    for parent, _, names, opened in os.fwalk(folder):
        if group is not None:
            os.fchown(opened, -1, group)
        os.fchmod(opened, of_folders)
        for name in names:
            try:
                if group is not None:
                    os.chown(name, -1, group, dir_fd=opened, follow_symlinks=False)
                set_mode(opened, name, of_files & _OWNERS_ALONE.get(name, ~0))
            except OSError as error:
                error.filename = os.path.join(parent, name)
                raise


def share_home(paths: Paths, group: str) -> None:
    """Open caches to the members of `group`, who may also make and drop caches and start jobs of their own.

    Raises InputError for an unknown group, or if this user doesn't own the home.
    """
    make_folder(paths.home, paths.home)
    try:
        shutil.chown(paths.home, group=group)
        paths.home.chmod(SHARED_FOLDER | STICKY)
        for folder in (paths.nodes, paths.locks, paths.staging):
            make_folder(paths.home, folder)
            apply_modes(paths.home, folder.resolve(), group=paths.home.stat().st_gid)
        if paths.catalog.exists():
            # Who makes it owns it. Another member could make a link, and SQLite would write where that leads.
            make_file(paths.home, paths.catalog_journal)
        for file in (paths.catalog, paths.catalog_journal, paths.topology):
            if file.exists():
                shutil.chown(file, group=group)
                file.chmod(SHARED_FILE)
        for folder in (paths.jobs, paths.keys):
            make_sticky_folder(paths.home, folder)
            shutil.chown(folder, group=group)
            folder.chmod(SHARED_FOLDER | STICKY)
    except LookupError as error:
        raise InputError(
            f"--shared names a group of this machine (`getent group` lists them). Received: {group}"
        ) from error
    except PermissionError as error:
        raise InputError(
            f"--shared opens the home to a group that you are a member of, and every file in it must be "
            f"yours. Received: {group} for {error.filename} ({error.strerror}). Have its owner share it, or "
            f"name another group"
        ) from error


def close_home(paths: Paths) -> None:
    """Take back what `share_home` gave. Raises InputError if this user doesn't own the home."""
    try:
        paths.home.chmod(PRIVATE_FOLDER)
        for folder in (paths.nodes, paths.locks, paths.staging):
            apply_modes(paths.home, folder.resolve())
        for file in (paths.catalog, paths.catalog_journal, paths.topology):
            if file.exists():
                file.chmod(PRIVATE_FILE)
        for folder in (paths.jobs, paths.keys):
            if folder.exists():
                folder.chmod(PRIVATE_FOLDER)
    except PermissionError as error:
        raise InputError(
            f"--private closes a home in which every file is yours. Received: {error.filename} "
            f"({error.strerror}). Drop what others have made there first"
        ) from error


def _refuse_untrusted(home: Path, path: Path) -> None:
    """Raise InputError if another user could have this one's jobs run what that user wrote.

    `path` is the home or in it.
    """
    if is_shared(home):
        return
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()) and os.geteuid() != 0:
        raise InputError(
            f"INSITU_HOME must be a folder of your own, or one that its owner shares with `insitu up "
            f"--shared GROUP`. Received: {home}, where {path} is of user {found.st_uid}. Set INSITU_HOME to "
            f"another folder"
        )
    if found.st_mode & stat.S_IWOTH and not found.st_mode & STICKY:
        raise InputError(
            f"INSITU_HOME must not be a folder that every user may write to: what is there is run. "
            f"Received: {home} with mode {stat.S_IMODE(found.st_mode):o}. Set INSITU_HOME to a folder in it, "
            f"or take that right away: chmod o-w {home}"
        )
