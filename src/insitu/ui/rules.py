"""Decides about a request by its headers alone, before anything of it is done. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from insitu.ui.access import Session

READING = frozenset({"GET", "HEAD", "OPTIONS"})
CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
"""All other methods are refused."""
OPEN = frozenset({"/login"})
"""Paths that need no session; so do those of static files."""
STATIC = "/static/"
FOR_VIEWERS = frozenset({"/login", "/logout"})
"""Paths at which who may only view may still change something: the own session."""
_MAX_HEADER = 8192


@dataclass(frozen=True, slots=True)
class Facts:
    """The part of a request that is known before its body is read."""

    #: The method, in capitals.
    method: str
    #: The path, decoded, without the query.
    path: str
    #: All values of each header, by its name in small letters.
    headers: dict[str, list[str]]

    def one(self, name: str) -> str | None:
        """Return the value of a header, None if it is missing. Raises ValueError if it comes twice."""
        values = self.headers.get(name, [])
        if len(values) > 1:
            raise ValueError(f"{name} comes {len(values)} times")
        return values[0] if values else None

    def cookie(self, name: str) -> str | None:
        """Return the value of a cookie."""
        for header in self.headers.get("cookie", []):
            jar: SimpleCookie = SimpleCookie()
            try:
                jar.load(header[:_MAX_HEADER])
            except CookieError:
                continue
            if name in jar:
                return jar[name].value
        return None

    def bearer(self) -> str | None:
        """Return the bearer token."""
        scheme, _, token = (self.one("authorization") or "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" and token.strip() else None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is refused."""

    #: The status of HTTP.
    status: int
    #: The reason, for users.
    text: str


def is_open(path: str) -> bool:
    """Return whether a path needs no session."""
    return path in OPEN or path.startswith(STATIC)


def check_origin(facts: Facts, origins: Collection[str]) -> Refusal | None:
    """Refuse what another site may have had a browser send, or a name that isn't this server's.

    `origins` are those under which the page is reached, such as `http://127.0.0.1:8780`. A browser names the
    origin of each request that changes something; programs name none, and then no cookie counts.
    """
    try:
        host, origin, site = facts.one("host"), facts.one("origin"), facts.one("sec-fetch-site")
        facts.one("authorization")
    except ValueError as error:
        return Refusal(400, f"Each header comes once. Received: {error}")
    if facts.method not in READING | CHANGING:
        return Refusal(405, f"Methods are {', '.join(sorted(READING | CHANGING))}. Received: {facts.method}")
    hosts = {urlsplit(origin).netloc.lower() for origin in origins}
    if host is None or host.lower() not in hosts:
        return Refusal(
            421, f"This server is {', '.join(sorted(hosts))}, and answers to no other name. Received: {host}"
        )
    if origin is not None and origin.lower() not in origins:
        return Refusal(403, f"Requests come from the page itself. Received: one from {origin}")
    if site not in (None, "same-origin", "none") and facts.method in CHANGING:
        return Refusal(403, f"Requests come from the page itself. Received: a {site} one")
    return None


def counts_as_own(facts: Facts) -> bool:
    """Return whether a cookie counts for this request: always to read; to change something only if the
    browser has said that the page itself asks."""
    if facts.method in READING:
        return True
    return facts.one("origin") is not None or facts.one("sec-fetch-site") == "same-origin"


def check_role(facts: Facts, session: Session | None) -> Refusal | None:
    """Refuse who hasn't signed in, and who may only view but would change something."""
    if is_open(facts.path):
        return None
    if session is None:
        return Refusal(
            401,
            "Sign in with the link that `insitu ui --link` prints, or send a bearer token "
            "(docs/reference/rest.md)",
        )
    if facts.method in CHANGING and session.role != "operate" and facts.path not in FOR_VIEWERS:
        return Refusal(403, "This needs the role operate. Received: a session with the role view")
    return None
