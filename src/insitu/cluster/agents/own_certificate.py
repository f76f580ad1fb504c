"""The certificate of one agent, which its store keeps.

Other agents recognize it by what the head has said last. So one that is started again while there is no head
has to show the same.
"""

from __future__ import annotations

import contextlib
import os
import stat

from insitu.access import PRIVATE_FILE
from insitu.certificates import Certificate, make_certificate, parse_certificate
from insitu.durable import replace_file
from insitu.paths import Paths
from insitu.spec import NodeId


def take_certificate(paths: Paths, node: NodeId) -> Certificate:
    """Return the certificate that the store of `node` keeps. A new one is made if there is none, or others
    may read its key; if it can't be kept, as on a full disk, it is used once."""
    path = paths.agent_certificate(node)
    with contextlib.suppress(OSError, ValueError):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(file) as opened:
            found = os.fstat(file)
            if found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077:
                return parse_certificate(opened.read())
    made = make_certificate()
    with contextlib.suppress(OSError):
        replace_file(path, f"{made.pem}{made.key_pem}".encode(), mode=PRIVATE_FILE)
    return made
