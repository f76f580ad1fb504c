"""What comes from agents and the head is understood, or refused by an error that is meant for it."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
from dataclasses import asdict
from typing import Any

import pytest
from agent_facts import LOAD, VERSIONS, WALL, facts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.base.errors import ClusterError
from insitu.base.spec import NodeId
from insitu.base.typed import convert
from insitu.cluster.decide import Membership
from insitu.cluster.decide.membership import Joining, decide
from insitu.cluster.wire import messages
from insitu.grid import StagedImport

JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-2, 1 << 70), st.just(10**400), st.floats(), st.text(max_size=5)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_members_come_back_equal() -> None:
    membership = decide(Membership(VERSIONS), Joining(3, facts(), LOAD), 1.0, WALL)[0]
    sent = through_json(messages.encode_members(membership))
    assert messages.parse_members(sent) == membership.members


def test_an_inventory_comes_back_equal() -> None:
    held = {0: (10, "crc32:00000000"), 7: (11, "crc32:00000001")}
    assert messages.parse_inventory(through_json(messages.encode_inventory("a/b", 2, held))) == (
        "a/b",
        2,
        held,
    )


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(asdict(facts()))), JSON)
def test_facts_with_any_value_in_a_field_are_checked(name: str, value: Any) -> None:
    made = through_json(asdict(facts()))
    made[name] = value
    with contextlib.suppress(ClusterError):
        assert type(getattr(messages.parse_facts(made), name)) is type(getattr(facts(), name))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("node", "../up"),
        ("port", 1 << 16),
        ("port", True),
        ("clock", 10**400),
        ("clock", 1e300),
        ("versions", {"insitu": "1"}),
        ("versions", {"insitu": "1", "python": 3}),
        ("gpus", "H200"),
        ("cores", -1),
        ("clock", float("nan")),
        ("store", "x" * 20_000),
    ],
)
def test_facts_that_cannot_be_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ClusterError, match=r"Received: "):
        messages.parse_facts({**through_json(asdict(facts())), name: value})


def test_fields_that_are_missing_or_too_many_are_refused() -> None:
    made = through_json(asdict(facts()))
    for wrong in ({**made, "more": 1}, {k: v for k, v in made.items() if k != "store"}, [], None):
        with pytest.raises(ClusterError, match="facts must have the fields"):
            messages.parse_facts(wrong)


@settings(deadline=None)
@given(JSON)
def test_other_messages_are_refused_whatever_they_hold(value: Any) -> None:
    for parse in (
        messages.parse_load,
        messages.parse_member,
        messages.parse_members,
    ):
        with contextlib.suppress(ClusterError):
            parse(value)
    with contextlib.suppress(ClusterError):
        found = convert("unreachable", value, messages.TextsByName, ClusterError)
        assert all(type(text) is str for text in found.values())
    with contextlib.suppress(ClusterError):
        messages.parse_inventory({"cache": value, "version": value, "partitions": value})
    with contextlib.suppress(ClusterError):
        messages.CatalogParts().add(
            dict.fromkeys(("number", "count", "start", "bytes", "of", "part", "digest"), value)
        )


def send_catalog(
    data: bytes, before: messages.CatalogVersion | None = None
) -> tuple[list[messages.Message], messages.CatalogVersion]:
    version = messages.identify_catalog(data)
    sent = [through_json(message) for message in messages.split_catalog(data, version, before)]
    assert all(len(json.dumps(message)) < messages.MAX_LINE_BYTES for message in sent)
    return sent, version


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (2 << 20) + 5])
def test_a_catalogue_is_put_together_from_its_parts(size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    parts = messages.CatalogParts()
    found = [parts.add(message) for message in send_catalog(data)[0]]
    assert found == [None] * (len(found) - 1) + [data]


@given(st.lists(st.binary(max_size=5), min_size=2, max_size=4), st.data())
def test_of_the_next_catalogue_only_changed_pages_are_sent(drawn: list[bytes], more: st.DataObject) -> None:
    # Each byte that is drawn stands for a page; the last page of a catalogue may be short.
    parts, before = messages.CatalogParts(), None
    for pages in drawn:
        data = b"".join(bytes([page]) * 4096 for page in pages)
        data += b"x" * more.draw(st.integers(0, 4095))
        sent, version = send_catalog(data, before)
        if before is not None:
            new = sum(page not in before.pages[n : n + 1] for n, page in enumerate(version.pages))
            assert sum(len(base64.b64decode(message["part"])) for message in sent) <= new * 4096
        assert [parts.add(message) for message in sent][-1] == data
        before = version


def test_a_catalogue_whose_parts_do_not_fit_is_refused() -> None:
    whole = bytes(3 << 20)
    sent, version = send_catalog(whole)
    with pytest.raises(ClusterError, match="come in order"):
        messages.CatalogParts().add(sent[1])
    changed = copy.deepcopy(sent)
    changed[1]["part"] = base64.b64encode(b"\1" * (1 << 20)).decode()
    parts = messages.CatalogParts()
    with pytest.raises(ClusterError, match="the digest"):
        for message in changed:
            parts.add(message)
    # After an interrupted one the next begins at its start.
    parts.add(sent[0])
    assert [parts.add(message) for message in sent][-1] == whole
    pages, _ = send_catalog(whole + b"more", version)
    with pytest.raises(ClusterError, match="of the last catalogue"):
        messages.CatalogParts().add(pages[0])
    assert parts.add(pages[0]) == whole + b"more"


def test_a_node_is_named_as_everywhere() -> None:
    assert messages.parse_facts(through_json(asdict(facts("n-1.x")))).node == NodeId("n-1.x")


def test_imports_and_their_ends_come_back_equal() -> None:
    staged = [StagedImport("a/b", "0a1b2c3d-7-ff", None), StagedImport("c", "x", 3)]
    assert messages.parse_imports(through_json(messages.encode_imports(staged))) == staged
    for published in (False, True):
        end = through_json(messages.encode_end(staged[0], published))
        assert messages.parse_end(end) == (staged[0], published)


@pytest.mark.parametrize(
    "listed", [None, [1], [["a", "x"]], [["../a", "x", None]], [["a", "../x", None]], [["a", "x", -1]]]
)
def test_imports_are_checked(listed: Any) -> None:
    with pytest.raises(ClusterError):
        messages.parse_imports({"do": "imports", "imports": listed})
    with pytest.raises(ClusterError):
        messages.parse_end({"do": "end_import", "import": listed, "published": True})
    with pytest.raises(ClusterError):
        messages.parse_end({"do": "end_import", "import": ["a", "x", None], "published": 1})
