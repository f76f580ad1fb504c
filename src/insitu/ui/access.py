"""Who may use the page: links that work once, sessions that expire, bearer tokens, and two roles.

Secrets are kept as digests, so that neither memory dumps nor the time of a comparison reveal them.
The time is passed in, in seconds of any clock.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from dataclasses import dataclass, replace
from typing import Literal

Role = Literal["view", "operate"]
LINK_SECONDS = 15 * 60.0
"""How long a link may be used."""
SESSION_SECONDS = 12 * 3600.0
"""How long a session lasts at most."""
IDLE_SECONDS = 2 * 3600.0
"""How long a session lasts that nothing uses."""
_MOST = 1000
"""Links and sessions that are kept, so that nobody can fill the memory with them."""
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Session:
    """Who asks."""

    #: Permission: `operate` may change things, `view` may not.
    role: Role
    #: Tells sessions from each other in the audit log; no secret.
    name: str
    #: When it ends, whatever is done.
    ends: float
    #: When it ends unless it is used before.
    idle_until: float


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", errors="surrogatepass")).digest()


class Access:
    """Links, sessions and tokens of one server. Safe for use by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By the digest of a link's secret: its role and until when it may be used.
        self._links: dict[bytes, tuple[Role, float]] = {}
        #: By the digest of a cookie's value.
        self._sessions: dict[bytes, Session] = {}
        #: By the digest of a bearer token; they end with the server.
        self._bearers: dict[bytes, Session] = {}

    def make_link(self, role: Role, now: float) -> str:
        """Return the secret of a link that signs somebody in once."""
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        with self._lock:
            self._links = {key: link for key, link in self._links.items() if link[1] > now}
            _drop_oldest(self._links)
            self._links[_digest(secret)] = (role, now + LINK_SECONDS)
        return secret

    def make_bearer(self, role: Role) -> str:
        """Return a token for programs."""
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        endless = float("inf")
        with self._lock:
            self._bearers[_digest(secret)] = Session(role, f"token-{role}", endless, endless)
        return secret

    def sign_in(self, secret: str, now: float) -> tuple[str, Session] | None:
        """Return the value of a new session's cookie, and the session. None for a link that was used, has
        expired or never was."""
        with self._lock:
            link = self._links.pop(_digest(secret), None)
            if link is None or link[1] <= now:
                return None
            self._sessions = {key: s for key, s in self._sessions.items() if not _has_ended(s, now)}
            _drop_oldest(self._sessions)
            cookie = secrets.token_urlsafe(_SECRET_BYTES)
            session = Session(link[0], secrets.token_hex(4), now + SESSION_SECONDS, now + IDLE_SECONDS)
            self._sessions[_digest(cookie)] = session
            return cookie, session

    def find_session(self, cookie: str, now: float, *, use: bool = True) -> Session | None:
        """Return the session of a cookie, or None. With `use` it lasts longer, as what users do lets it."""
        with self._lock:
            key = _digest(cookie)
            session = self._sessions.get(key)
            if session is None:
                return None
            if _has_ended(session, now):
                del self._sessions[key]
                return None
            if use:
                session = self._sessions[key] = replace(session, idle_until=now + IDLE_SECONDS)
            return session

    def find_bearer(self, token: str) -> Session | None:
        """Return who a bearer token stands for, or None."""
        with self._lock:
            return self._bearers.get(_digest(token))

    def sign_out(self, cookie: str) -> None:
        """End the session of a cookie."""
        with self._lock:
            self._sessions.pop(_digest(cookie), None)


def _has_ended(session: Session, now: float) -> bool:
    return now >= min(session.ends, session.idle_until)


def _drop_oldest(kept: dict[bytes, object] | dict[bytes, Session] | dict[bytes, tuple[Role, float]]) -> None:
    while len(kept) >= _MOST:
        del kept[next(iter(kept))]
