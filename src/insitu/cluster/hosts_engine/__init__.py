"""Runs the tasks of a job on several hosts, for its supervisor. Begin reading with `hosts_engine.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.cluster.hosts_engine.hosts_engine import StoppedEarly, open_hosts_engine
    from insitu.cluster.hosts_engine.stores import find_known_stores, find_owners, find_stores

__getattr__, __dir__ = export_lazily(__name__)
