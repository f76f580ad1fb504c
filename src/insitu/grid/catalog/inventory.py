"""The content of a store by its manifests, compared with the catalogue.

A store may come back after it was offline: with data that nobody needs any more, without some of it, or empty
on a new disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from insitu.base.errors import CorruptManifest
from insitu.base.paths import Paths
from insitu.base.spec import NodeId, PlacedCopy
from insitu.grid.catalog.catalog import Catalog
from insitu.grid.catalog.manifests import find_versions, read_manifest
from insitu.grid.layout import reconcile_copies

logger = logging.getLogger("insitu")

Inventory = Mapping[tuple[str, int], Mapping[int, tuple[int, str]]]
"""Maps (cache, version) of a store to partition to (bytes, checksum)."""


def list_held(paths: Paths, node: NodeId) -> dict[tuple[str, int], dict[int, tuple[int, str]]]:
    """Return {(cache, version): {partition: (bytes, checksum)}} of the files that a store has.

    A manifest says what the bytes must be; the file must have the size, its bytes aren't read.
    """
    found: dict[tuple[str, int], dict[int, tuple[int, str]]] = {}
    for stored in find_versions(paths):
        if stored.node != node:
            continue
        try:
            manifest = read_manifest(stored.manifest)
        except CorruptManifest as error:
            logger.warning("%s. `insitu repair` on the head writes it again.", error)
            continue
        held = found.setdefault((stored.name, stored.version), {})
        for index in manifest.held:
            info = manifest.cache.partitions[index]
            path = paths.partition(node, stored.name, stored.version, index)
            try:
                size = path.stat().st_size
            except OSError:
                continue
            if size == info.bytes:
                held[index] = (info.bytes, info.checksum)
    return found


def _make_change(node: NodeId, held: set[int]) -> Callable[[list[PlacedCopy]], list[PlacedCopy]]:
    return lambda copies: reconcile_copies(copies, node, held)[0]


def reconcile_store(catalog: Catalog, node: NodeId, inventory: Inventory) -> list[str]:
    """Let the catalogue follow what the store of `node` holds. Returns what has changed, for people.

    A copy that isn't there counts as lost; one that is there again, with the right checksum, is live.
    """
    changes = []
    for spec in catalog.stored():
        before = catalog.placement(spec.name, spec.version)
        if not any(copy.node == node for copy in before):
            continue
        there = inventory.get((spec.name, spec.version), {})
        held = {p.index for p in spec.partitions if there.get(p.index) == (p.bytes, p.checksum)}
        lost, found = reconcile_copies(before, node, held)[1:]
        if not lost and not found:
            continue
        catalog.change_placement(spec.name, spec.version, _make_change(node, held))
        changes.append(f"{spec.name} version {spec.version}: {len(lost)} copies lost, {len(found)} back")
    return changes
