"""The command that serves the page."""

from __future__ import annotations

import pytest

from insitu.base.errors import InputError
from insitu.cli.ui import has_display, ui


def test_no_browser_opens_where_there_is_no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert not has_display()
    monkeypatch.setenv("DISPLAY", ":0")
    assert has_display()


def test_a_role_is_one_of_two() -> None:
    with pytest.raises(InputError, match="view or operate"):
        ui(link=True, role="admin")


def test_a_role_without_a_link_is_refused() -> None:
    with pytest.raises(InputError, match="--role goes with --link"):
        ui(role="view")
