"""Says why a command on a host has failed, and what to do about it. Pure."""

from __future__ import annotations

_SHOWN_LINES = 3
_OF_SSH = 255
_NOT_FOUND = 127

_REMEDIES = (
    (
        ("Host key verification failed", "REMOTE HOST IDENTIFICATION HAS CHANGED"),
        "Its key isn't in ~/.ssh/known_hosts, or another one is. Compare it, and accept it once by `ssh "
        "{host}`",
    ),
    (
        ("Permission denied (", "Too many authentication failures"),
        "`ssh {host} true` must work without a question. Give it your key by `ssh-copy-id {host}`, or name "
        "the user as USER@HOST in the file of hosts",
    ),
    (
        ("Could not resolve hostname",),
        "Correct its name in the file of hosts. Names of ~/.ssh/config are known, too",
    ),
    (
        ("Connection refused", "Connection timed out", "No route to host", "Network is unreachable"),
        "Check that it is on, and that its server of ssh listens there. Another port goes into ~/.ssh/config "
        "or into --launcher",
    ),
    (
        ("Connection reset by", "Connection closed by"),
        "Look at the log of its server of ssh. It may take fewer connections at a time (MaxStartups); then "
        "run the same command again",
    ),
)
"""What ssh says, and what helps."""
_NO_INSITU = (
    "Install insitu there, or give its path by --insitu, such as --insitu /opt/venv/bin/insitu. A shell that "
    "ssh starts may have another PATH than one of a terminal"
)
_NO_ANSWER = (
    "`ssh {host} true` must run that command alone. Look at the account's shell and its ~/.bashrc there"
)


def describe_failure(host: str, code: int, out: bytes, err: bytes) -> str:
    """Return why the command on `host` failed, from its exit code and what it and the launcher have said."""
    said = _lines(err)
    errors = [number for number, line in enumerate(said) if line.startswith("error: ")]
    if errors:  # insitu ran there, and says what to do
        return " ".join(said[errors[-1] :]).removeprefix("error: ")
    printed = [line for line in _lines(out) if not line.startswith("{")]
    parts = said[-_SHOWN_LINES:]
    if printed and code not in (_OF_SSH, _NOT_FOUND):
        parts = [*parts, *printed[-_SHOWN_LINES:]]
    remedy = _find_remedy(code, " ".join(said)).replace("{host}", host)
    if code not in (_OF_SSH, _NOT_FOUND) or not parts:
        parts = [f"the command ended with code {code}{':' if parts else ''}", *parts]
    why = " ".join(parts)
    return f"{why.rstrip('.')}. {remedy}" if remedy else why


def _lines(text: bytes) -> list[str]:
    return [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]


def _find_remedy(code: int, said: str) -> str:
    if code == _OF_SSH:
        return next((help for signs, help in _REMEDIES if any(sign in said for sign in signs)), "")
    if code == _NOT_FOUND:
        return _NO_INSITU
    return _NO_ANSWER if code == 0 else ""
