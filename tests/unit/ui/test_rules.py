"""What the headers of a request decide."""

from __future__ import annotations

import pytest

from insitu.ui.access import Role, Session
from insitu.ui.rules import Facts, check_origin, check_role, counts_as_own

ORIGINS = frozenset({"http://127.0.0.1:8780", "http://localhost:8780"})


def facts(method: str = "POST", path: str = "/jobs/a/stop", **headers: str) -> Facts:
    given = {"host": "127.0.0.1:8780"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return Facts(method, path, {name: [value] for name, value in given.items() if value})


def status(given: Facts) -> int | None:
    refusal = check_origin(given, ORIGINS)
    return None if refusal is None else refusal.status


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "127.0.0.1", "127.0.0.1:1", "127.0.0.1:8780.evil.org", "127.0.0.1:8780@a"],
)
def test_another_host_is_refused_so_that_names_cannot_be_rebound(host: str) -> None:
    assert status(facts("GET", host=host)) == 421


def test_own_names_are_answered_in_any_case() -> None:
    assert status(facts("GET", host="LOCALHOST:8780")) is None


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "http://evil.example",
        "http://127.0.0.1:9999",
        "https://127.0.0.1:8780",
        "http://127.0.0.1:87800",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_another_origin_is_refused_also_one_of_another_port(method: str, origin: str) -> None:
    assert status(facts(method, origin=origin)) == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_another_site_has_a_browser_send_is_refused(site: str) -> None:
    assert status(facts(sec_fetch_site=site)) == 403
    assert status(facts("GET", sec_fetch_site=site)) is None  # a link that somebody clicks


def test_a_header_that_comes_twice_is_refused() -> None:
    for name in ("host", "origin", "authorization"):
        given = facts("GET")
        given.headers[name] = ["127.0.0.1:8780", "evil.example"]
        assert status(given) == 400


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "BREW"])
def test_other_methods_are_refused(method: str) -> None:
    assert status(facts(method)) == 405


def test_a_cookie_counts_for_a_change_only_if_the_browser_says_that_the_page_asks() -> None:
    assert counts_as_own(facts("GET")) and not counts_as_own(facts())
    assert counts_as_own(facts(origin="http://127.0.0.1:8780"))
    assert counts_as_own(facts(sec_fetch_site="same-origin"))
    assert not counts_as_own(facts(sec_fetch_site="none"))


def role_status(role: Role | None, method: str, path: str) -> int | None:
    session = None if role is None else Session(role, "a", 1.0, 1.0)
    refusal = check_role(facts(method, path), session)
    return None if refusal is None else refusal.status


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_who_may_view_changes_nothing(method: str) -> None:
    for path in ("/jobs/a/stop", "/api/v1/jobs", "/start", "/api/v1/links", "/login/", "/logout/x"):
        assert role_status("view", method, path) == 403
        assert role_status("operate", method, path) is None


def test_nothing_is_shown_without_a_session_but_the_form_to_sign_in() -> None:
    for path in ("/", "/api/v1/jobs", "/api/v1/openapi.json", "/live/jobs", "/login/x", "//static/"):
        assert role_status(None, "GET", path) == 401
    assert role_status(None, "GET", "/login") is None
    assert role_status(None, "GET", "/static/style.css") is None
    assert role_status("view", "GET", "/") is None


def test_cookies_and_tokens_are_read() -> None:
    given = facts(cookie="a=1; insitu-session-1=xyz; b=2", authorization="bearer  abc ")
    assert given.cookie("insitu-session-1") == "xyz" and given.cookie("c") is None
    assert given.bearer() == "abc"
    assert facts(authorization="Basic abc").bearer() is None
    assert facts(authorization="Bearer ").bearer() is None
