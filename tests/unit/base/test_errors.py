"""The tree of errors."""

from __future__ import annotations

import pickle

import pytest

from insitu import errors
from insitu.base.errors import InsituError

ALL = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, InsituError)]


@pytest.mark.parametrize("kind", ALL)
def test_each_error_is_named_in_the_tree_and_survives_pickling(kind: type[InsituError]):
    assert f" {kind.__name__}" in f" {errors.__doc__}"
    error = kind.__new__(kind)
    InsituError.__init__(error, "no", logs="/tmp/log")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and str(copy) == "no (logs: /tmp/log)"
    assert (copy.message, copy.logs, copy.exit_code) == ("no", "/tmp/log", kind.exit_code)


def test_without_logs_the_message_stands_alone():
    assert str(InsituError("no")) == "no"
