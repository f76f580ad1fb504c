"""Links work once, sessions end, secrets aren't kept."""

from __future__ import annotations

import pytest

from insitu.ui.access import IDLE_SECONDS, LINK_SECONDS, SESSION_SECONDS, Access


def test_a_link_signs_in_once() -> None:
    access = Access()
    link = access.make_link("view", 0.0)
    signed = access.sign_in(link, 1.0)
    assert signed is not None and signed[1].role == "view"
    assert access.sign_in(link, 1.0) is None
    found = access.find_session(signed[0], 2.0)
    assert found is not None and found.name == signed[1].name


@pytest.mark.parametrize("secret", ["", "x", "\ud800", "a" * 100_000])
def test_what_is_no_link_signs_nobody_in(secret: str) -> None:
    access = Access()
    access.make_link("operate", 0.0)
    assert access.sign_in(secret, 0.0) is None
    assert access.find_session(secret, 0.0) is None and access.find_bearer(secret) is None


def test_a_link_expires() -> None:
    access = Access()
    assert access.sign_in(access.make_link("view", 0.0), LINK_SECONDS) is None
    assert access.sign_in(access.make_link("view", 0.0), LINK_SECONDS - 1) is not None


def sign_in(access: Access) -> str:
    signed = access.sign_in(access.make_link("operate", 0.0), 0.0)
    assert signed is not None
    return signed[0]


def test_a_session_ends_when_nobody_uses_it_and_at_last_in_any_case() -> None:
    access = Access()
    cookie = sign_in(access)
    assert access.find_session(cookie, IDLE_SECONDS) is None
    cookie, now = sign_in(access), 0.0
    while now + IDLE_SECONDS / 2 < SESSION_SECONDS:
        now += IDLE_SECONDS / 2
        assert access.find_session(cookie, now) is not None
    assert access.find_session(cookie, SESSION_SECONDS) is None


def test_what_is_pushed_does_not_prolong_a_session() -> None:
    access = Access()
    cookie = sign_in(access)
    assert access.find_session(cookie, IDLE_SECONDS - 1, use=False) is not None
    assert access.find_session(cookie, IDLE_SECONDS, use=False) is None


def test_signing_out_ends_the_session() -> None:
    access = Access()
    cookie = sign_in(access)
    access.sign_out(cookie)
    assert access.find_session(cookie, 0.0) is None


def test_no_secret_is_kept_as_it_is() -> None:
    access = Access()
    link, bearer, cookie = access.make_link("view", 0.0), access.make_bearer("view"), sign_in(access)
    assert len({link, bearer, cookie}) == 3 and min(map(len, (link, bearer, cookie))) >= 43
    kept = repr(vars(access))
    assert not any(secret in kept for secret in (link, bearer, cookie))


def test_the_number_of_links_and_sessions_is_bounded() -> None:
    access = Access()
    first = access.make_link("view", 0.0)
    for _ in range(1000):
        access.make_link("view", 0.0)
    assert access.sign_in(first, 0.0) is None
