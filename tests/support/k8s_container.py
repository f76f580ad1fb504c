"""The beginning of a container of `k8s_pods.py`: makes its file system, becomes its user, runs its command.

Runs in the namespaces of its pod, with the path of its description. The command is the first process of new
ones of its own, unless containers of its pod share theirs; an error before it runs is written to the file
that the description names. The root is that of this machine under a layer of the container's own: all
programs are there, and files that it writes outside of volumes are gone with it.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE, _DETACH = 1, 32, 4096, 16384, 1 << 18, 2
_NEW_MOUNTS, _NEW_PROCESSES = 0x20000, 0x20000000
_OUTSIDE = "/.outside"
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source, target, kind="none", flags=0, data=""):
    if _libc.mount(str(source).encode(), str(target).encode(), kind.encode(), flags, data.encode()):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"{source} on {target}")


def bind(source, target, read_only=False):
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    mount(source, target, flags=_BIND | _RECURSIVE)
    if read_only:
        mount(source, target, flags=_BIND | _REMOUNT | _READ_ONLY)


def enter(description):
    """Change into the container's own root."""
    mount("none", "/", flags=_RECURSIVE | _PRIVATE)
    layers = description["layers"]
    mount("tmpfs", layers, "tmpfs")
    for name in ("upper", "work", "root"):
        os.mkdir(f"{layers}/{name}")
    root = f"{layers}/root"
    mount("overlay", root, "overlay", data=f"lowerdir=/,upperdir={layers}/upper,workdir={layers}/work")
    bind("/", root + _OUTSIDE)
    # From here on, links such as /var/run lead to places inside.
    os.chroot(root)
    # Python can be in the folder of root, and an image lets others read it.
    os.chmod("/root", 0o755)
    for name, text in description["files"].items():
        if os.path.lexists(name):
            os.unlink(name)
        Path(name).write_text(text)
    mount("proc", "/proc", "proc")
    bind(f"{_OUTSIDE}/sys", "/sys")
    make_devices()
    for each in sorted(description["mounts"], key=lambda each: each["target"]):
        bind(_OUTSIDE + each["source"], each["target"], each["read_only"])
    # A volume at /tmp mustn't hide a checkout that is in this machine's.
    if not os.path.exists(
        f"{description['checkout']}/tests"
    ):  # the place may be there from another container
        bind(_OUTSIDE + description["checkout"], description["checkout"], True)
    if _libc.umount2(_OUTSIDE.encode(), _DETACH):
        raise OSError(ctypes.get_errno(), _OUTSIDE)
    os.rmdir(_OUTSIDE)
    if description["read_only_root"]:
        mount("overlay", "/", flags=_REMOUNT | _READ_ONLY)


def make_devices():
    """Make a /dev of the usual devices, with the pod's shared memory."""
    mount("tmpfs", "/dev", "tmpfs", data="mode=0755")
    for name in ("null", "zero", "full", "random", "urandom", "tty", "pts", "shm"):
        bind(f"{_OUTSIDE}/dev/{name}", f"/dev/{name}")
    for name, target in {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}.items():
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")


def become(description):
    """Become the container's user, without more rights if it wants none."""
    os.setgroups(description["groups"])
    os.setgid(description["group"])
    os.setuid(description["user"])
    if description["no_new_privileges"]:
        _libc.prctl(38, 1, 0, 0, 0)


def main():
    description = json.loads(Path(sys.argv[1]).read_text())
    if _libc.unshare(_NEW_MOUNTS | (0 if description["shares_processes"] else _NEW_PROCESSES)):
        sys.exit("the container can't have namespaces of its own")
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(128 - code if code < 0 else code)
    try:
        # Before it changes its root and its user, with which it can't write that file.
        failure = os.open(description["error"], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        enter(description)
        become(description)
        os.chdir(description["folder"])
        command = description["command"]
        os.execvpe(command[0], command, description["environment"])
    except BaseException as error:
        os.write(failure, f"{type(error).__name__}: {error}".encode())
        os._exit(128)


if __name__ == "__main__":
    main()
