"""A lazy door loads a module when a name of it is asked for."""

from __future__ import annotations

import sys

import pytest

from insitu.doors import lazy_door

ROOM = {"affinity": ("splitmix64",), "order": ("Rows", "order"), "insitu.spec": ("TaskId",)}


def test_a_name_is_taken_from_its_module():
    load, names = lazy_door("insitu.grid.layout", ROOM)
    assert names() == ["Rows", "TaskId", "order", "splitmix64"]
    rows = load("Rows")
    assert rows is sys.modules["insitu.grid.layout.order"].Rows
    assert load("order") is sys.modules["insitu.grid.layout.order"]
    assert load("TaskId") is sys.modules["insitu.spec"].TaskId


def test_another_name_is_no_attribute():
    load, _ = lazy_door("insitu.grid.layout", ROOM)
    with pytest.raises(AttributeError, match=r"module 'insitu.grid.layout' has no attribute 'affinity'"):
        load("affinity")


def test_a_module_that_gives_its_own_name_is_given_whole():
    load, _ = lazy_door("insitu", {"insitu.grid.layout": ("layout",), "errors": ("InputError", "errors")})
    assert load("layout") is sys.modules["insitu.grid.layout"]
    assert load("errors") is sys.modules["insitu.errors"]
    assert load("InputError") is sys.modules["insitu.errors"].InputError
